"""The committed table and locks, and (slow) the real roots that come of them."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from ci import __main__ as cli
from ci import matrix, toolkit
from ci.device import compilers
from ci.errors import EnvironmentProblem
from ci.toolkit import lock, manifest, provision, roots, stub

MATRIX = matrix.load()
ROOTS = roots.declared()
LINUX = MATRIX.platform("linux-x86_64")


def test_the_matrix_names_declared_roots_and_no_other_is_declared() -> None:
    assert {MATRIX.device.root, *(root for cuda in MATRIX.cuda.values() for root in cuda.roots)} == set(ROOTS)


@pytest.mark.parametrize(
    ("arguments", "prebuilt", "chosen"),
    [
        ([], "", list(ROOTS)),
        ([], "folder", [name for name in ROOTS if name != "device"]),
        (["--cuda", "13.0"], "", ["cuda-13.0", "mlx-cu13", "cudnn-frontend", "device"]),
        (["--cuda", "13.0"], "folder", ["cuda-13.0", "mlx-cu13", "cudnn-frontend"]),
        (["mlx-cu12"], "", ["mlx-cu12"]),
        (["device"], "folder", ["device"]),
    ],
)
def test_the_roots_that_are_installed(monkeypatch: pytest.MonkeyPatch, arguments: list[str], prebuilt: str, chosen: list[str]) -> None:
    """All that a build needs, so that it can follow at once."""
    asked: list[str] = []

    def install(name: str, _: matrix.Platform) -> provision.Installed:
        asked.append(name)
        return provision.Installed(name, LINUX.name, roots.TOOLKITS, True, 0, 0)

    monkeypatch.setattr(provision, "install", install)
    monkeypatch.setenv(roots.PREBUILT, prebuilt)
    assert cli.main(["toolkit", "install", *arguments]) == 0
    assert sorted(asked) == sorted(chosen)


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_the_compilers_are_found_in_their_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """Among the files of the real one: NVRTC's builtins and its other build are not NVRTC."""
    windows = system == "win32"
    names = ["nvrtc-builtins64_128.dll", "nvrtc64_120_0.alt.dll", "nvrtc64_120_0.dll", "nvfatbin_120_0.dll", "nvvm64_40_0.dll"]
    files = [f"bin/{name}" for name in names] if windows else [f"lib/lib{name}.so" for name in ("nvrtc", "nvrtc.alt", "nvfatbin")]
    for file in [*files, f"site/nvidia/cuda_nvcc/bin/ptxas{'.exe' * windows}"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(matrix, "host_platform", lambda: LINUX)
    monkeypatch.setattr(toolkit, "root_path", lambda *_: tmp_path)
    found = compilers.tools()
    assert found.nvrtc.name == ("nvrtc64_120_0.dll" if windows else "libnvrtc.so")
    assert found.nvfatbin.name == ("nvfatbin_120_0.dll" if windows else "libnvfatbin.so")
    assert found.ptxas.stem == "ptxas"
    found.ptxas.unlink()
    with pytest.raises(EnvironmentProblem, match=r"lacks site/nvidia/.*ptxas.*\n  fix: python -m ci toolkit verify"):
        compilers.tools()


@pytest.mark.parametrize(
    ("builtins", "library"), [("libnvrtc-builtins.so.12.8", "libnvrtc.so.12"), ("nvrtc-builtins64_128.dll", "nvrtc64_120_0.dll")]
)
def test_what_nvrtc_opens_by_name_is_loaded_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtins: str, library: str) -> None:
    """On Windows it is found in no folder that is added: only test_wine.py has the real one."""
    for name in (builtins, library, "nvrtc-builtins.alt64_128.dll"):
        (tmp_path / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    compilers._load(tmp_path / library)
    assert loaded == [str(tmp_path / builtins), str(tmp_path / library)]


@pytest.mark.parametrize("name", ROOTS)
def test_each_lock_holds_its_packages_for_each_platform(name: str) -> None:
    wheels = lock.parse(roots.lock_text(ROOTS[name]))
    assert [(wheel.requirement, wheel.platform) for wheel in wheels] == [
        (requirement, platform) for requirement in ROOTS[name].packages for platform in ROOTS[name].platforms
    ]
    for wheel in wheels:
        distribution, version, _, tags = parse_wheel_filename(wheel.file)
        assert f"{canonicalize_name(distribution)}=={version}" == wheel.requirement
        system, _, machine = wheel.platform.partition("-")
        assert all(tag.platform.startswith("manylinux" if system == "linux" else "win") for tag in tags)
        assert all(tag.platform.endswith(machine) for tag in tags)


@pytest.mark.parametrize("name", ROOTS)
def test_each_lock_is_what_pip_and_uv_read(name: str) -> None:
    """What our own comments say is what the requirement lines say."""
    text = roots.lock_text(ROOTS[name])
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    blocks = re.findall(r"^(\S+==\S+)((?: \\\n    --hash=\S+)+)$", plain, re.MULTILINE)
    hashes = {requirement: set(re.findall(r"sha256:([0-9a-f]{64})", block)) for requirement, block in blocks}
    wheels = lock.parse(text)
    assert hashes == {wheel.requirement: {other.sha256 for other in wheels if other.requirement == wheel.requirement} for wheel in wheels}


def test_the_build_uses_versions_that_the_extras_allow() -> None:
    """What a user gets at run time is never older than what the native modules were built with."""
    for version, cuda in MATRIX.cuda.items():
        locked = {Requirement(package).name: Requirement(package) for name in cuda.roots for package in ROOTS[name].packages}
        for line in cuda.requires:
            requirement = Requirement(line)
            (pin,) = [specifier.version for specifier in locked[requirement.name].specifier]
            assert requirement.specifier.contains(pin), f"CUDA {version}: {line} does not allow {pin}"
            floors = [specifier.version for specifier in requirement.specifier if specifier.operator in {">=", "=="}]
            assert pin.startswith(tuple(floors)), f"CUDA {version}: built with {pin}, but {line} allows older ones"


def test_the_documentation_states_the_downloads() -> None:
    text = (matrix.REPOSITORY / "docs" / "factory" / "toolkits.md").read_text("utf-8")
    for name, root in ROOTS.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\|$", text, re.MULTILINE)
        cells = [cell.strip() for cell in row.split("|")[3:7]]
        downloads = [sum(wheel.size for wheel in lock.wheels_for(root, platform)) / 1e6 for platform in MATRIX.platforms.values()]
        assert cells[:3] == [f"{megabytes:.0f}" for megabytes in downloads]
        assert int(cells[3]) << 20 <= root.unpacked_bytes


HEADERS = {
    "cuda": (
        "cuda.h",
        "cuda_runtime.h",
        "cuda_fp16.h",
        "cublasLt.h",
        "cudnn.h",
        "crt/host_defines.h",
        "cub/cub.cuh",
    ),
    "device": ("cuda_fp16.h", "cuda_fp8.h", "cuda/barrier"),
    "mlx": ("mlx/mlx.h", "mlx/backend/cuda/device.h", "cutlass/cutlass.h"),
    "cudnn": ("cudnn_frontend.h",),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("platform", MATRIX.platforms)
@pytest.mark.parametrize("name", ROOTS)
def test_real_root(name: str, platform: str) -> None:
    """Install (6 GB of downloads for all), verify, and look for what the matrix says lies in it."""
    target = MATRIX.platform(platform)
    path = toolkit.install([name], target)[0].path
    files = manifest.read(path)
    assert files is not None
    assert manifest.differences(path, files) == []
    unique = {(stat.st_dev, stat.st_ino): stat.st_size for stat in ((path / file).stat() for file in files)}
    assert sum(unique.values()) <= ROOTS[name].unpacked_bytes

    suppliers = {wheel.requirement.partition("==")[0] for wheel in lock.wheels_for(ROOTS[name], target)}
    for library in (library for cuda in MATRIX.cuda.values() for library in cuda.libraries if library.provider in suppliers):
        file = library.files[target.system]
        assert (path / "site" / library.directories[target.system] / file).is_file()
        if target.system == "linux":
            assert (path / "lib" / file).samefile(path / "lib" / f"{library.name}.so")
        else:
            assert (path / "bin" / file).is_file()
            assert (path / "lib" / f"{library.name.removeprefix('lib')}.lib").is_file()
    for header in HEADERS[name.partition("-")[0]]:
        assert (path / "include" / header).is_file()
    if name.startswith("cuda-"):
        driver = path / "lib" / ("stubs/libcuda.so" if target.system == "linux" else "cuda.lib")
        assert b"cuLibraryLoadData" in driver.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("version", MATRIX.cuda)
def test_the_stub_has_every_driver_function_that_mlx_needs(version: str) -> None:
    target = MATRIX.platform("linux-x86_64")
    cuda_root, mlx_root = (toolkit.install([name], target)[0].path for name in MATRIX.cuda[version].roots[:2])
    functions = set(stub.driver_functions(cuda_root / "include/cuda.h"))
    with (mlx_root / "lib/libmlx.so").open("rb") as file:
        elf: Any = ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        needed = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and re.match(r"cu[A-Z]", symbol.name)}
    driver = {name for name in needed if not re.match(r"cu(blas|dnn|fft|rand|solver|sparse)", name)}
    assert driver
    assert driver <= functions


@pytest.mark.nightly
@pytest.mark.slow
def test_pip_accepts_the_lock(tmp_path: Path) -> None:
    """Nothing in it is particular to uv."""
    pytest.importorskip("pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += [
        "--python-version",
        lock.PYTHON,
        "--platform",
        "win_amd64",
        "--dest",
        str(tmp_path),
        "--requirement",
        str(ROOTS["cudnn-frontend"].lock_file),
    ]
    subprocess.run(command, check=True)
    (wheel,) = lock.wheels_for(ROOTS["cudnn-frontend"], MATRIX.platform("win-amd64"))
    assert (tmp_path / wheel.file).stat().st_size == wheel.size


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_a_folder_has_to_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_CUDA_TOOLKITS", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"no home directory.*\n  fix: set MLX_CUDA_TOOLKITS to a folder"):
        roots.cache_directory()
    monkeypatch.setenv("MLX_CUDA_TOOLKITS", str(tmp_path))
    assert roots.cache_directory() == tmp_path
