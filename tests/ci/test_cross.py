"""Building for aarch64 on another machine: what the build is told, and, with the real cross compiler, what comes out."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import matrix, toolkit
from ci.__main__ import main
from ci.audit import describe
from ci.build import build, compiler
from ci.wheelfile.binary import parse

ARM = matrix.load().platform("linux-aarch64")
TOOLCHAIN = compiler.TOOLCHAINS / "linux-aarch64.cmake"
needs_compiler = pytest.mark.skipif(
    matrix.host_platform() == ARM or not shutil.which("aarch64-linux-gnu-g++"),
    reason="needs a cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)",
)


def test_the_build_is_told_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def front_end(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        seen["settings"], seen["environment"] = command, env
        Path(command[command.index("--outdir") + 1], "mlx_cuda-1-cp310-abi3-linux_aarch64.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(compiler, "toolchain", lambda platform: TOOLCHAIN if platform == ARM else None)
    monkeypatch.setattr(subprocess, "run", front_end)
    build.build_wheel(["13.0"], ["declared"], tmp_path, platform=ARM)
    assert f"--config-setting=cmake.define.CMAKE_TOOLCHAIN_FILE={TOOLCHAIN}" in seen["settings"]
    assert "--config-setting=cmake.define.MLX_CUDA_PLATFORM=linux-aarch64" in seen["settings"]
    assert seen["environment"]["_PYTHON_HOST_PLATFORM"] == "linux-aarch64"


def test_no_cross_compiler_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "host_platform", lambda: matrix.load().platform("linux-x86_64"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(toolkit, "install", lambda *_: pytest.fail("fetched the toolkits"))
    assert main(["wheel", "--platform", "linux-aarch64", "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "  fix: apt-get install g++-aarch64-linux-gnu"
    assert not (tmp_path / "out").exists()


PROJECT = """\
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "probe"
version = "1"
[tool.scikit-build]
wheel.py-api = "cp310"
"""
LISTS = """\
cmake_minimum_required(VERSION 3.28)
project(probe LANGUAGES CXX)
find_package(Python REQUIRED COMPONENTS Interpreter Development.SABIModule)
Python_add_library(probe MODULE USE_SABI 3.10 WITH_SOABI probe.cpp)
install(TARGETS probe DESTINATION .)
"""
# Python.h is that of the machine that builds: what its pyconfig.h says of the target is compared with what the compiler knows.
SOURCE = """\
#include <Python.h>
static_assert(sizeof(long) == SIZEOF_LONG && sizeof(void*) == SIZEOF_VOID_P && sizeof(size_t) == SIZEOF_SIZE_T);
static_assert(sizeof(wchar_t) == SIZEOF_WCHAR_T && sizeof(long double) == SIZEOF_LONG_DOUBLE && sizeof(time_t) == SIZEOF_TIME_T);
static_assert(sizeof(off_t) == SIZEOF_OFF_T && sizeof(fpos_t) == SIZEOF_FPOS_T && sizeof(pthread_t) == SIZEOF_PTHREAD_T);
#if defined(WORDS_BIGENDIAN) != (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)
#error "byte order"
#endif
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "probe", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_probe() { return PyModule_Create(&definition); }
"""


@needs_compiler
def test_the_wheels_tag_and_its_module_are_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small project through the same function as ours; its source holds Python's headers against the target."""
    project = tmp_path / "project"
    project.mkdir()
    for name, text in {"pyproject.toml": PROJECT, "CMakeLists.txt": LISTS, "probe.cpp": SOURCE}.items():
        (project / name).write_text(text)
    monkeypatch.setattr(matrix, "REPOSITORY", project)
    wheel = build.build_wheel(["13.0"], ["declared"], tmp_path / "dist", platform=ARM)
    assert wheel.name == "probe-1-cp310-abi3-linux_aarch64.whl"
    with zipfile.ZipFile(wheel) as archive:
        binary = parse(archive.read("probe.abi3.so"))
    assert binary
    assert binary.machine == "aarch64"


@pytest.mark.slow
@needs_compiler
def test_all_stages(installed_root: Callable[[str, matrix.Platform], Path], tmp_path: Path, at_night: bool) -> None:
    """The real wheel, for one CUDA version and one GPU: built, repaired and audited on this machine."""
    if not at_night:
        pytest.skip("compiles all host code once more: left to --place nightly, and to nox -s emulated")
    for root in matrix.load().cuda["13.0"].roots:
        installed_root(root, ARM)
    installed_root(matrix.load().device.root, matrix.host_platform())
    assert main(["wheel", "--platform", ARM.name, "--cuda", "13.0", "--arch", "90", "-o", str(tmp_path)]) == 0
    (wheel,) = tmp_path.iterdir()
    facts = describe(wheel)
    assert all(tag.startswith("cp310-abi3-manylinux_") and tag.endswith("_aarch64") for tag in facts.tags)
    assert [module.member for module in facts.modules] == ["mlx_cuda/_cu13.abi3.so"]
    assert (facts.device.sass, facts.device.ptx) == (("90a",), ())
