"""cmake/DeviceCode.cmake in a small project: an edit repeats exactly what it touches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import matrix
from ci.device import store
from ci.toolkit.roots import PREBUILT

from .device_support import edit, installed_tools, reported, write_kernels

PROJECT = """\
cmake_minimum_required(VERSION 3.28)
project(mlx_cuda LANGUAGES CXX)
include(cmake/DeviceCode.cmake)
mlx_cuda_add_device_code(device_code PYTHON "${Python_EXECUTABLE}" ARCHITECTURES 90 compute_80)
add_library(small MODULE small.cpp)
target_include_directories(small PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/include")
add_dependencies(small device_code)
install(TARGETS small LIBRARY DESTINATION mlx_cuda)
"""
PROGRAM = '#include "mlx_cuda_device_code.h"\nextern "C" const char* digest() { return MLX_CUDA_DEVICE_CODE; }\n'
FIRST = {"first.cu compute_80", "first.cu compute_90a", "first.cu sm_90a", "first.fatbin"}
SECOND = {step.replace("first", "second") for step in FIRST}
ALL = FIRST | SECOND, True


class Project:
    """A small CMake project; ``build`` tells what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(matrix.REPOSITORY / "ci", folder / "ci", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "cmake").symlink_to(matrix.REPOSITORY / "cmake")
        (folder / "CMakeLists.txt").write_text(PROJECT, "utf-8")
        (folder / "small.cpp").write_text(PROGRAM, "utf-8")
        write_kernels(folder / "src", "first", "second")
        self.cmake("-S", ".", "-B", "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", check=True)

    def cmake(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        search_path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
        program = shutil.which("cmake", path=search_path)
        assert program, "CMake belongs to the dependency group 'factory'"
        environment = {**os.environ, "PATH": search_path, store.VARIABLE: str(self.folder / "store"), PREBUILT: ""}
        return subprocess.run(
            [program, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            check=check,
        )

    def build(self) -> tuple[set[str], bool]:
        """Build; returns the steps of the device code that were done, and whether the module was compiled."""
        done = self.cmake("--build", "build")
        assert done.returncode == 0, done.stdout
        return reported(done.stdout), "small.cpp.o" in done.stdout

    def edit(self, name: str, old: str, new: str) -> None:
        edit(self.folder / "src" / "kernels" / name, old, new)

    def idle(self) -> bool:
        return "no work to do" in self.cmake("--build", "build").stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    installed_tools()
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    project = Project(tmp_path_factory.mktemp("a project"))
    assert project.build() == ALL
    return project


def test_without_an_edit_there_is_no_work(project: Project) -> None:
    assert project.idle()


def test_an_edited_kernel_is_compiled_alone(project: Project) -> None:
    project.edit("first.cu", "threadIdx.x", "blockIdx.x")
    assert project.build() == (FIRST, True)
    assert project.idle()


def test_an_edited_header_compiles_what_includes_it(project: Project) -> None:
    project.edit("shared.h", "2 * x", "3 * x")
    assert project.build() == ALL
    assert project.idle()


def test_what_was_there_before_is_not_compiled_again(project: Project) -> None:
    project.edit("shared.h", "3 * x", "2 * x")
    assert project.build() == (set(), True)


def test_the_same_digest_compiles_no_module(project: Project) -> None:
    """A file of the factory that changes nothing; twice, since what is older than its cause might be made again each time."""
    header = project.folder / "build" / "include" / "mlx_cuda_device_code.h"
    before = header.stat().st_mtime_ns
    for file in ("ci/matrix/matrix.toml", "ci/matrix/__init__.py", "ci/device/plan.py", "src/kernels/shared.h"):
        (project.folder / file).touch()
        done = project.cmake("--build", "build").stdout
        assert "device code: 2 fatbins" in done, file
        assert "small.cpp" not in done
        assert project.idle(), file
    assert header.stat().st_mtime_ns == before


def test_a_header_that_an_edit_includes_is_a_dependency_from_then_on(project: Project) -> None:
    (project.folder / "src" / "kernels" / "more.h").write_text("#define OFFSET 1\n", "utf-8")
    project.edit("second.cu", "#include", '#include "kernels/more.h"\n#include')
    assert project.build() == (SECOND, True)
    project.edit("more.h", "1", "2")
    assert project.build() == (SECOND, True)


def test_a_new_source_and_one_that_goes(project: Project) -> None:
    source = project.folder / "src" / "kernels" / "third.cu"
    source.write_text((source.parent / "first.cu").read_text("utf-8").replace("first", "third"), "utf-8")
    assert project.build() == ({step.replace("first", "third") for step in FIRST}, True)
    source.unlink()
    assert project.build() == (set(), True)
    assert sorted(path.name for path in (project.folder / "build" / "device").iterdir()) == [
        "first.fatbin.lzma",
        "manifest.json",
        "second.fatbin.lzma",
    ]


def test_an_error_has_file_and_line_and_its_fix_goes_on(project: Project) -> None:
    project.edit("second.cu", "scale(", "scalf(")
    done = project.cmake("--build", "build")
    assert done.returncode != 0
    source = project.folder / "src" / "kernels" / "second.cu"
    line = 1 + source.read_text("utf-8").partition("scalf(")[0].count("\n")
    assert f'{source}({line}): error: identifier "scalf" is undefined' in done.stdout
    project.edit("second.cu", "scalf(", "scale(")
    assert project.build() == (set(), False)


def test_what_is_installed(project: Project) -> None:
    (project.folder / "build" / "device" / "first.fatbin.lzma.123.partial").touch()  # of one that was killed
    project.cmake("--install", "build", "--prefix", "installed", check=True)
    found = {path.relative_to(project.folder / "installed").as_posix() for path in (project.folder / "installed").rglob("*.*")}
    assert found == {
        f"mlx_cuda/{name}"
        for name in ("libsmall.so", *(f"device/{file}" for file in ("first.fatbin.lzma", "manifest.json", "second.fatbin.lzma")))
    }
