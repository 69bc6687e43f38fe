"""What the audit finds in MLX's own CUDA backends: known, and pinned, so that a change of theirs or a slip of ours is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import filelock
import pytest

from ci.audit import describe
from ci.audit.checks import CHECKS
from ci.audit.checks.metadata import same_metadata
from ci.audit.policy import Module, for_wheel
from ci.files import tomllib
from ci.matrix import Library, Targets, load
from ci.wheelfile.binary import fatbin
from ci.wheelfile.wheel import read

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # these wheels change with MLX's version only

DECLARED = tomllib.loads(Path(__file__).with_name("upstream.toml").read_text("utf-8"))  # what the wheels are held to
ARCHITECTURES = Targets(tuple(DECLARED["sass"]), tuple(DECLARED["ptx"]))
# What is for our own wheels alone: what our build and our linkers write, the stable ABI, device code in files, SBOM, the package's table,
# locked libraries.
OURS = {
    "members",
    "sources",
    "versions",
    "abi3",
    "architectures",
    "device",
    "device-digest",
    "sbom",
    "archive",
    "build-facts",
    "loader",
    "metadata",
    "record",
    "tags",
    "dll-directories",
    "symbols",
}
CONTAINERS = {"contourpy": "1.4.0", "msgpack": "1.2.4", "nanobind-backend": "1.0.0"}  # by GCC 14 of AlmaLinux 8
PLATFORMS = {"linux": "manylinux_2_35_x86_64", "windows": "win_amd64"}


class Backend(NamedTuple):
    major: int
    system: str


@pytest.fixture(scope="session")
def folder(shared_folder: Path) -> Path:
    """Where the wheels are; MLX_CUDA_UPSTREAM_WHEELS names a folder that has them already."""
    return Path(os.environ.get("MLX_CUDA_UPSTREAM_WHEELS") or shared_folder / "upstream")


def wheel_of(folder: Path, backend: Backend) -> Path:
    return fetched(folder, f"mlx-cuda-{backend.major}=={load().mlx}", PLATFORMS[backend.system])


def fetched(folder: Path, requirement: str, platform: str) -> Path:
    """A wheel from the index, which `folder` may have already."""
    package, _, version = requirement.replace("-", "_").partition("==")
    pattern = f"{package}-{version}-*{platform}*.whl"
    with filelock.FileLock(folder.parent / f"{package}-{platform}.lock"):
        if not list(folder.glob(pattern)):
            pip = ["uv", "tool", "run", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--quiet"]
            where = ["--platform", platform, "--dest", str(folder)]
            subprocess.run([sys.executable, "-m", *pip, *where, requirement], check=True)
    (path,) = folder.glob(pattern)
    return path


def found(path: Path) -> set[tuple[str, str, str]]:
    wheel = read(path)
    table, system = DECLARED[str(wheel.project)], wheel.system
    libraries = (Library(needed=True, **entry) for entry in table["libraries"] if system in entry["files"])
    policy = replace(
        for_wheel(wheel),
        size_budget_mib=100,  # the package index's limit of one file, unless it is raised
        abis=("py3-none",),
        modules=(Module(DECLARED["stem"][system], "", tuple(libraries), roots=()),),
        bundled=table["bundled"][system],
    )
    return {(member, name, message) for name, check in CHECKS.items() if name not in OURS for member, message in check(wheel, policy)}


def unlike(path: Path, member: str) -> tuple[int, set[str]]:
    """How many fatbins lie in a member, and what they hold that differs from upstream's Linux build."""
    fatbins = list(fatbin.find(read(path).members[member]))
    return len(fatbins), {problem for each in fatbins for problem in fatbin.unlike(each, ARCHITECTURES)}


NOT_STRIPPED = ("mlx/lib/libmlx.so", "stripped", "has .symtab, expected it stripped")
BUILD_PATH = (
    "mlx/lib/libmlx.so",
    "build-path",
    "holds paths of the build (1), such as /home/runner/work/mlx/mlx/mlx/distributed/nccl/nccl.cpp, expected none (see -ffile-prefix-map)",
)


def no_bound(major: int) -> tuple[str, str, str]:
    message = f"needs libnccl.so.2, expected a bound on nvidia-nccl-cu{major}: a new major renames it"
    return "mlx/lib/libmlx.so", "provider", message


def needless_rpath(directory: str) -> tuple[str, str, str]:
    message = f"has $ORIGIN/../../nvidia/{directory} in its RPATH, expected only directories of libraries that it needs"
    return "mlx/lib/libmlx.so", "rpath", message


@pytest.mark.parametrize(
    ("major", "directories"),
    [(12, ["cu13/lib"]), (13, ["cublas/lib", "cuda_nvrtc/lib", "cufft/lib", "cusolver/lib"])],
)
def test_linux(folder: Path, major: int, directories: list[str]) -> None:
    path = wheel_of(folder, Backend(major, "linux"))
    assert found(path) == {NOT_STRIPPED, BUILD_PATH, no_bound(major), *map(needless_rpath, directories)}
    facts = {Path(module.member).name: module for module in describe(path).modules}
    mlx = facts["libmlx.so"]
    assert unlike(path, mlx.member) == (99, set())
    assert (mlx.glibc, mlx.glibcxx) == ("2.35", "3.4.30")
    assert {"libcuda.so.1", "libcudnn.so.9", "libnccl.so.2", f"libcublasLt.so.{major}", f"libnvrtc.so.{major}"} <= set(mlx.needed)


@pytest.mark.parametrize("major", [12, 13])
def test_windows(folder: Path, major: int) -> None:
    path = wheel_of(folder, Backend(major, "windows"))
    assert unlike(path, "mlx/mlx.dll") == (99, {"SASS for 75, 80, 120a, expected 75, 80, 90a, 100a, 120a, 121a"})
    violations = found(path)
    assert {(member, check) for member, check, _ in violations} == {
        ("mlx/mlx.dll", "build-path"),
        ("mlx/mlx.dll", "needed"),
        ("mlx/libopenblas.dll", "build-path"),
        ("mlx/libopenblas.dll", "stripped"),
    }
    (missing,) = (message for _, check, message in violations if check == "needed")
    assert missing == "needs MSVCP140.dll, which neither win_amd64 nor the wheel nor a declared provider supplies"
    facts = {Path(module.member).name: module for module in describe(path).modules}
    assert {"cudnn64_9.dll", f"cublasLt64_{major}.dll"} <= set(facts["mlx.dll"].needed)  # the first is delay-loaded


@pytest.mark.parametrize("major", [12, 13])
def test_linux_and_windows_ask_for_different_packages(folder: Path, major: int) -> None:
    wheels = [read(wheel_of(folder, Backend(major, system))) for system in ("linux", "windows")]
    expected = f"lacks Requires-Dist: nvidia-nccl-cu{major}, expected the same as in {wheels[0].path.name}"
    assert [message for _, _, message in same_metadata(wheels)] == [expected]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("package", ["contourpy", "msgpack", "nanobind-backend"])
def test_modules_of_real_containers(folder: Path, package: str, machine: str) -> None:
    """What manylinux's own images build, none of which runs here, is taken."""
    binaries = read(fetched(folder, f"{package}=={CONTAINERS[package]}", f"manylinux_2_28_{machine}")).binaries
    assert binaries
    assert [fault for binary in binaries.values() for fault in binary.faults] == []
