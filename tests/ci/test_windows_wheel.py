"""A Windows wheel as it leaves the build, from repair to a DLL that is found at import: real DLLs by mingw-w64, the real delvewheel."""

from __future__ import annotations

import os
import runpy
import zipfile
from pathlib import Path

import pytest

from ci import matrix
from ci.audit import audit_wheel, describe, policy, providers
from ci.audit.checks import CHECKS
from ci.audit.checks.contents import DELVEWHEEL
from ci.errors import CheckFailed
from ci.repair import repair
from ci.wheelfile.binary import parse

from .audit_support import CU12, CU13, NAMES, World, good_files, member, write_wheel
from .test_audit_upstream import Backend, folder, wheel_of  # noqa: F401  # the fixture `folder`

CALL = "__declspec(dllimport) int greet(void); int use(void) { return greet(); }"


INIT = b'"""Kernels."""\n\nfrom __future__ import annotations\n\n__version__ = "1"\n'


@pytest.fixture(scope="module")
def system() -> matrix.System:
    return "windows"


@pytest.fixture
def repaired(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both modules need the compiler's run-time too, or what stands for it here, which lies on PATH on the build machine."""
    ordinary = world.library(world.folder / "ordinary" / "msvcp140.dll", "int greet(void) { return 1; }")
    files = good_files(world)
    for cuda in (CU12, CU13):
        files[member(world, cuda)] = world.module(f"{cuda.module}.pyd", cuda, source=CALL, arguments=[f"{ordinary}.lib"])
    files["mlx_cuda/__init__.py"] = INIT
    monkeypatch.setattr(providers, "site", lambda root, _: world.site(root))
    monkeypatch.setenv("PATH", f"{ordinary.parent}{os.pathsep}{os.environ['PATH']}")
    return repair(write_wheel(tmp_path / "dist" / NAMES["windows"], files), tmp_path / "wheelhouse")


def vendored(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.startswith("mlx_cuda.libs/") and name.endswith(".dll")]


def test_everything_that_matters_is_needed_before_the_repair(world: World) -> None:
    """The made modules are like the real ones: they import what ci/matrix/matrix.toml declares, and what every Windows module does."""
    for cuda in (CU12, CU13):
        binary = parse(good_files(world)[member(world, cuda)])
        assert binary
        declared = {library.files["windows"].lower() for library in cuda.libraries if library.needed}
        assert declared | {matrix.load().driver["windows"], "python3.dll"} <= {name.lower() for name in binary.needed}
        assert {f"cudart64_{cuda.major}.dll", f"cublaslt64_{cuda.major}.dll", "cudnn64_9.dll", "mlx.dll"} == declared


def test_the_ordinary_dll_is_copied_in_and_nothing_else(repaired: Path) -> None:
    (name,) = vendored(repaired)
    assert name.startswith("mlx_cuda.libs/msvcp140-"), "delvewheel names a copy after its contents"
    for module in describe(repaired).modules:
        if module.member.endswith(".pyd"):
            assert Path(name).name in module.needed
            assert "msvcp140.dll" not in module.needed
            assert {"mlx.dll", "cudnn64_9.dll", "nvcuda.dll", "python3.dll"} <= set(module.needed)


def test_the_repaired_wheel_passes_the_audit(repaired: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_bytes(INIT)
    package = policy._package
    monkeypatch.setattr(policy, "_package", lambda given: {**package(given), "mlx_cuda/__init__.py": tmp_path / "__init__.py"})
    assert [str(each) for each in audit_wheel(repaired, checks=tuple(CHECKS))] == []


def test_only_the_words_of_delvewheel_are_passed_over(repaired: Path) -> None:
    with zipfile.ZipFile(repaired) as archive:
        patched = archive.read("mlx_cuda/__init__.py")
    assert DELVEWHEEL.sub(b"\n", patched) == INIT
    for word in (b"os.pardir, ", b"mlx_cuda.libs", b"    import os\n", b"os.add_dll_directory"):
        assert DELVEWHEEL.sub(b"\n", patched.replace(word, b"evil" + word, 1)) != INIT


def test_the_copy_is_found_at_import(repaired: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, run as Windows would, adds the directory that the copy lies in."""
    added: list[Path] = []
    monkeypatch.setattr(os, "add_dll_directory", lambda path: added.append(Path(path)), raising=False)
    monkeypatch.delenv("CONDA_DLL_SEARCH_MODIFICATION_ENABLE", raising=False)
    with zipfile.ZipFile(repaired) as archive:
        archive.extractall(tmp_path / "site")
    namespace = runpy.run_path(str(tmp_path / "site/mlx_cuda/__init__.py"))
    assert namespace["__version__"] == "1"
    assert [path.resolve() for path in added] == [(tmp_path / "site/mlx_cuda.libs").resolve()]
    assert (added[0] / Path(vendored(repaired)[0]).name).is_file()


def test_the_real_package_can_be_patched(repaired: Path, world: World, tmp_path: Path) -> None:
    """delvewheel writes into `__init__.py`, after the docstring and the __future__ imports: ours has to take that."""
    with zipfile.ZipFile(repaired) as archive:
        text = archive.read("mlx_cuda/__init__.py").decode()
    assert text.startswith('"""')
    compile(text, "__init__.py", "exec")
    files = good_files(world)
    ordinary = world.folder / "ordinary" / "msvcp140.dll"
    files[member(world, CU13)] = world.module("_cu13.pyd", CU13, source=CALL, arguments=[f"{ordinary}.lib"])
    files["mlx_cuda/__init__.py"] = (matrix.REPOSITORY / "python/mlx_cuda/__init__.py").read_bytes()
    again = repair(write_wheel(tmp_path / "again" / NAMES["windows"], files), tmp_path / "patched")
    with zipfile.ZipFile(again) as archive:
        patched = archive.read("mlx_cuda/__init__.py").decode()
    compile(patched, "__init__.py", "exec")
    assert "mlx_cuda.libs" in patched


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("major", [12, 13])
def test_repair_refuses_a_wheel_that_is_not_ours(folder: Path, tmp_path: Path, major: int) -> None:  # noqa: F811
    """MLX's own Windows wheel holds none of our modules, so no exclude can be proved: nothing is written."""
    with pytest.raises(CheckFailed, match=rf"mlx_cuda_{major}-.*-win_amd64\.whl holds no native module, expected _cu12 or _cu13"):
        repair(wheel_of(folder, Backend(major, "windows")), tmp_path / "wheelhouse")
    assert not (tmp_path / "wheelhouse").exists()
