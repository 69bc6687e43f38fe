"""What the audit expects of a wheel (ci/audit/policy.py), and the text files that it makes again (ci/audit/expected.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from ci.audit import expected, policy
from ci.audit.expected import LONGEST, MOST, differences
from ci.audit.policy import Module, for_wheel
from ci.matrix import REPOSITORY, System
from ci.wheelfile.wheel import Wheel

from .audit_support import BUILD, CU12, CU13, DIST_INFO, MATRIX, NAMES, RECORD, WHEEL


def wheel(system: System, text: str = "") -> Wheel:
    project, version, _, tags = parse_wheel_filename(NAMES[system])
    return Wheel(Path(NAMES[system]), project, version, tags, {WHEEL: text.encode(), RECORD: b""})


@pytest.mark.parametrize(
    ("member", "held"),
    [
        ("mlx_cuda/_cu12.abi3.so", True),
        ("mlx_cuda/_cu12.pyd", True),
        ("mlx_cuda/_cu12", False),
        ("mlx_cuda/_cu123.pyd", False),
        ("mlx_cuda/_cu12.d/evil.so", False),
        ("mlx_cuda/mlx_cuda/_cu12.pyd", False),
    ],
)
def test_which_module_a_member_is(member: str, held: bool) -> None:
    assert Module("mlx_cuda/_cu12", "", (), ()).holds(member) == held
    found = for_wheel(wheel("linux")).module(member)
    assert (found.stem if found else "") == ("mlx_cuda/_cu12" if held else "")


def test_modules() -> None:
    for cuda, chosen in (((), (CU12, CU13)), (("13.0",), (CU13,)), (("13.0", "12.8"), (CU12, CU13))):
        assert for_wheel(wheel("linux"), cuda=cuda).modules == tuple(
            Module(f"mlx_cuda/{each.module}", each.extra, each.libraries, each.roots) for each in chosen
        )


DIGITS = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("member", "copied"),
    [
        (f"mlx_cuda.libs/msvcp140-{DIGITS}.dll", True),
        (f"MLX_CUDA.LIBS/MSVCP140_1-{DIGITS.upper()}.DLL", True),
        (f"mlx_cuda.libs/msvcp140-{DIGITS}0.dll", False),
        (f"mlx_cuda.libs/msvcp140-{DIGITS[1:]}.dll", False),
        (f"mlx_cuda.libs/a/msvcp140-{DIGITS}.dll", False),
        (f"mlx_cuda/msvcp140-{DIGITS}.dll", False),
        (f"mlx_cuda.libs/msvcp140-{DIGITS[:-1]}g.dll", False),
        ("mlx_cuda.libs/msvcp140.dll", False),
        ("", False),
    ],
)
def test_what_repair_copies(member: str, copied: bool) -> None:
    assert for_wheel(wheel("windows")).copied(wheel("windows"), member) == copied
    assert not member or not for_wheel(wheel("linux")).copied(wheel("linux"), member)


def test_what_differs_by_system() -> None:
    linux, windows = (for_wheel(wheel(system)) for system in ("linux", "windows"))
    assert (linux.bundled, linux.driver, linux.platform.name) == ("", "libcuda.so.1", "linux-x86_64")
    assert (windows.driver, windows.platform.name) == ("nvcuda.dll", "win-amd64")
    assert (linux.compiler, windows.compiler) == (MATRIX.compilers["linux"], MATRIX.compilers["windows"])


def test_what_is_the_same() -> None:
    found = for_wheel(wheel("linux"))
    assert (found.mlx, found.size_budget_mib, found.nanobind) == (MATRIX.mlx, MATRIX.size_budget_mib, BUILD["nanobind"])
    assert (found.abis, found.platforms) == (("cp310-abi3", "cp315-abi3t"), tuple(MATRIX.platforms))
    assert (found.libraries_file, found.device_root) == ("mlx_cuda/_libraries.json", "device")
    files = {*(f"{DIST_INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "sboms/mlx-cuda.cdx.json")), "mlx_cuda/_build.json"}
    assert found.made == files
    assert found.sources["mlx_cuda/nn.py"] == REPOSITORY / "python/mlx_cuda/nn.py"
    assert found.sources[f"{DIST_INFO}/licenses/LICENSE"] == REPOSITORY / "LICENSE"


def test_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python has written beside is none."""
    for name in ("a.py", "deep/b.py", "deep/__pycache__/b.pyc", "__pycache__/a.pyc"):
        (path := tmp_path / "python/mlx_cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "python/other.py").touch()
    monkeypatch.setattr(policy, "REPOSITORY", tmp_path)
    files = {f"mlx_cuda/{name}": tmp_path / "python/mlx_cuda" / name for name in ("a.py", "deep/b.py")}
    assert policy._package(MATRIX) == files


def test_build_facts() -> None:
    text = """{
  "a" : "1",
  "b" :\x20
  {
    "c" : "2",
    "d" : "3"
  }
}
"""
    assert expected.build_facts({"b": {"d": "3", "c": "2"}, "a": "1"}) == text


@pytest.mark.parametrize(
    ("found", "generator"),
    [
        ("Generator: scikit-build-core 1.2.3\n", "scikit-build-core 1.2.3"),
        ("x\nGenerator: scikit-build-core 1\n", "scikit-build-core 1"),
        ("Generator: scikit-build-core 1.2.3 evil\n", "scikit-build-core VERSION"),
        ("Generator: scikit-build-core 1.\n", "scikit-build-core VERSION"),
        ("", "scikit-build-core VERSION"),
    ],
)
def test_wheel_file(found: str, generator: str) -> None:
    tag = "cp310-abi3-manylinux_2_28_x86_64"
    text = f"Wheel-Version: 1.0\nGenerator: {generator}\nRoot-Is-Purelib: false\nTag: {tag}\n\n"
    assert expected.wheel_file(wheel("linux", found)) == text


def test_differences() -> None:
    """Up to a number, and to a number of characters of each."""
    has, lacks = "has the line {}, expected no such line there", "lacks the line {}, expected it there"
    assert (LONGEST, MOST) == (160, 20)
    assert list(differences("a\nb", "a\nb")) == []
    assert list(differences("a\nb\n", "a\n")) == [has.format("'b'")]
    assert list(differences("a\n", "a\nb\n")) == [lacks.format("'b'")]
    assert list(differences("x" * 161, "")) == [has.format(repr("x" * 160)), lacks.format("''")]
    for more, last in ((20, has.format("'19'")), (21, "differs in 1 more lines, expected none")):
        found = list(differences("\n".join([*map(str, range(more)), "x"]), "x"))
        assert (len(found), found[-1]) == (min(more, 21), last)
