"""cmake/Kernels.cmake in a small project: an edit repeats exactly what it touches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import matrix
from ci.binary import fatbin

from .device_support import compiler, write_kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the roots of Linux are used")

PROJECT = """\
cmake_minimum_required(VERSION 3.28)
project(small LANGUAGES CXX)
include(cmake/Kernels.cmake)
add_library(small MODULE small.cpp)
mlx_cuda_add_kernels(small src/kernels/first.cu src/kernels/second.cu
    NVRTC "{0.nvrtc}" NVFATBIN "{0.nvfatbin}" INCLUDES "{0.include}" SASS 80 90a PTX 80)
"""
# The program refers to the arrays, as the real one does.
PROGRAM = """\
#include <cstdint>
extern const std::uint64_t mlx_cuda_fatbin_first[], mlx_cuda_fatbin_second[];
extern "C" const void* kernels(int i) { return i ? mlx_cuda_fatbin_first : mlx_cuda_fatbin_second; }
"""
FIRST = {f"first.cu {arch}" for arch in ("sm_80", "sm_90a", "compute_80")}
SECOND = {image.replace("first", "second") for image in FIRST}


class Project:
    """A small CMake project; ``build`` tells what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "cmake").symlink_to(matrix.REPOSITORY / "cmake")
        (folder / "CMakeLists.txt").write_text(PROJECT.format(compiler("13.0")), "utf-8")
        (folder / "small.cpp").write_text(PROGRAM, "utf-8")
        write_kernels(folder / "src", "first", "second")
        self.cmake("-S", ".", "-B", "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", check=True)

    def cmake(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        search_path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
        program = shutil.which("cmake", path=search_path)
        assert program, "CMake belongs to the dependency group 'factory'"
        environment = {**os.environ, "PATH": search_path}
        command = [program, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, encoding="utf-8", check=check)

    def build(self) -> tuple[set[str], set[str]]:
        """Build; returns the images that were compiled and the sources that were packed anew."""
        done = self.cmake("--build", "build")
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"NVRTC small (.*)", done.stdout)), set(re.findall(r"Packing small (.*)", done.stdout))

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / "src" / "kernels" / name
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    project = Project(tmp_path_factory.mktemp("project"))
    assert project.build() == (FIRST | SECOND, {"first.cu", "second.cu"})
    return project


def test_the_library_holds_the_fatbins(project: Project) -> None:
    data = (project.folder / "build" / "libsmall.so").read_bytes()
    found = [(sorted(each.architectures("sass")), sorted(each.architectures("ptx"))) for each in fatbin.find(data)]
    assert found == [(["80", "90a"], ["80"])] * 2


def test_without_an_edit_there_is_no_work(project: Project) -> None:
    assert "no work to do" in project.cmake("--build", "build").stdout


def test_an_edited_kernel_is_compiled_alone(project: Project) -> None:
    project.edit("first.cu", "threadIdx.x", "blockIdx.x")
    assert project.build() == (FIRST, {"first.cu"})
    assert project.build() == (set(), set())


def test_an_edited_header_compiles_what_includes_it(project: Project) -> None:
    project.edit("shared.h", "2 * x", "3 * x")
    assert project.build() == (FIRST | SECOND, {"first.cu", "second.cu"})


def test_a_header_that_an_edit_includes_is_a_dependency_from_then_on(project: Project) -> None:
    (project.folder / "src" / "kernels" / "more.h").write_text("#define OFFSET 1\n", "utf-8")
    project.edit("second.cu", "#include", '#include "kernels/more.h"\n#include')
    assert project.build() == (SECOND, {"second.cu"})
    project.edit("more.h", "1", "2")
    assert project.build() == (SECOND, {"second.cu"})


def test_an_error_has_file_and_line_and_its_cure_goes_on(project: Project) -> None:
    project.edit("second.cu", "scale(", "scalf(")
    done = project.cmake("--build", "build")
    assert done.returncode != 0
    source = project.folder / "src" / "kernels" / "second.cu"
    line = 1 + source.read_text("utf-8").partition("scalf(")[0].count("\n")
    assert f'{source}({line}): error: identifier "scalf" is undefined' in done.stdout
    project.edit("second.cu", "scalf(", "scale(")
    assert project.build() == (SECOND, {"second.cu"})
