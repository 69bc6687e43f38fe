"""``ci.build.compiler``: which compiler is taken, and that CMake asks."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ci import matrix
from ci.build import compiler
from ci.errors import CheckFailed, EnvironmentProblem

LINUX, ARM, WINDOWS = (matrix.load().platform(name) for name in ("linux-x86_64", "linux-aarch64", "win-amd64"))
needs_gcc = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")


@pytest.mark.parametrize(
    ("platform", "known"),
    [
        (LINUX, ("GNU", "12.2.0")),
        (LINUX, ("GNU", "14.2.1")),
        (ARM, ("GNU", "12")),
        (WINDOWS, ("MSVC", "19.44.35207.1")),
        (WINDOWS, ("MSVC", "19.49.0")),
    ],
)
def test_declared(platform: matrix.Platform, known: tuple[str, str]) -> None:
    compiler.judge(*known, platform)


@pytest.mark.parametrize(
    ("platform", "other", "said"),
    [
        (
            LINUX,
            ("GNU", "9.4.0"),
            r"is GNU 9\.4\.0, expected GNU 12 or newer for linux-x86_64\n  fix: ",
        ),
        (LINUX, ("Clang", "19.1.0"), r"is Clang 19\.1\.0, expected GNU 12 or newer"),
        (WINDOWS, ("MSVC", "19.43.34808"), r"expected MSVC 19\.44 or newer, but older than 19\.50 for win-amd64"),
        (
            WINDOWS,
            ("MSVC", "19.50.35717"),
            r"fix: install Visual Studio 17 with C\+\+ toolset 14\.44, and build in: python -m ci msvc-env -- COMMAND$",
        ),
        (WINDOWS, ("GNU", "14.2.0"), r"is GNU 14\.2\.0, expected MSVC"),
    ],
)
def test_not_declared(platform: matrix.Platform, other: tuple[str, str], said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        compiler.judge(*other, platform)


@pytest.fixture
def old_gcc(tmp_path: Path) -> Path:
    """A g++ that says it is version 9: CMake asks the preprocessor."""
    path = tmp_path / "g++-9"
    path.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -U__GNUC__ -D__GNUC__=9 "$@" 2>/dev/null\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_gcc
def test_another_compiler_fails_the_configure_step(old_gcc: Path, tmp_path: Path) -> None:
    """Only the function that CMakeLists.txt calls: a whole configure step needs the toolkits."""
    (tmp_path / "CMakeLists.txt").write_text(
        f"""cmake_minimum_required(VERSION 3.28)
project(probe LANGUAGES CXX)
set(PROJECT_SOURCE_DIR "{matrix.REPOSITORY.as_posix()}")
set(Python_EXECUTABLE "{Path(sys.executable).as_posix()}")
set(MLX_CUDA_PLATFORM host)
include("{(matrix.REPOSITORY / "cmake/Toolkit.cmake").as_posix()}")
mlx_cuda_check_compiler()
"""
    )

    def configure(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), "--fresh", *arguments]
        return subprocess.run(command, env=compiler.tools_first() | {"CXX": str(old_gcc)}, check=False, capture_output=True, text=True)

    refused = configure()
    assert refused.returncode == 1
    assert "expected GNU 12 or newer" in " ".join(refused.stderr.split())
    assert configure("-DMLX_CUDA_ANY_COMPILER=ON").returncode == 0
    assert "mlx_cuda_check_compiler()" in (matrix.REPOSITORY / "CMakeLists.txt").read_text("utf-8")


def test_a_cross_compiler_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "host_platform", lambda: LINUX)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(
        EnvironmentProblem, match=r"aarch64-linux-gnu-g\+\+ is not installed.*\n  fix: apt-get install g\+\+-aarch64-linux-gnu$"
    ):
        compiler.toolchain(ARM)
    assert compiler.toolchain(LINUX) is None


def test_a_platform_without_a_cross_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "host_platform", lambda: LINUX)
    with pytest.raises(
        EnvironmentProblem, match=r"this machine has no compiler for win-amd64\n  fix: build on a machine of it \(windows-2022\)"
    ):
        compiler.toolchain(WINDOWS)
