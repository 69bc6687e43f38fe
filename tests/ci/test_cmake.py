"""ci.build.cmake and ci.matrix.gpu: what the CMake build is told."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from ci import matrix, toolkit
from ci.build import cmake
from ci.errors import EnvironmentProblem
from ci.matrix import gpu

CUDA = matrix.load().cuda["13.0"]
LINUX, WINDOWS = matrix.load().platform("linux-x86_64"), matrix.load().platform("win-amd64")
FILES = {
    "linux": [f"lib/lib{name}.so" for name in ("cublasLt", "cudnn", "cudart")] + ["lib/stubs/libcuda.so"],
    "windows": [f"lib/{name}.lib" for name in ("cublasLt", "cudnn", "cudart", "cuda")],
}


class FakeDriver:
    """As much of the driver as ci.matrix.gpu asks for: GPUs of these compute capabilities."""

    def __init__(self, *capabilities: tuple[int, int], status: int = 0, cuda: int = 13000) -> None:
        self.capabilities, self.status, self.cuda = capabilities, status, cuda

    def cuInit(self, _: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.capabilities)
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.cuda
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:  # noqa: N802
        value._obj.value = self.capabilities[index][{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Roots that hold nothing but empty files, in a folder with a space in its name; one folder for each root and platform."""
    cache = tmp_path / "tool kits"
    for platform in (LINUX, WINDOWS):
        for name in CUDA.roots:
            for file in FILES[platform.system]:
                (cache / f"{name}-{platform.name}" / file).parent.mkdir(parents=True, exist_ok=True)
                (cache / f"{name}-{platform.name}" / file).touch()
    monkeypatch.setattr(toolkit, "root_path", lambda name, platform: cache / f"{name}-{platform.name}")
    monkeypatch.setattr(matrix, "host_platform", lambda: LINUX)
    monkeypatch.setattr(sys, "platform", "linux")
    return cache


def cmake_program() -> str:
    program = shutil.which("cmake", path=str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"])
    assert program, "CMake belongs to the dependency group 'factory'"
    return program


def settings(text: str, folder: Path) -> dict[str, str]:
    """The variables of a rendered file as CMake itself reads them; a list's entries are apart by semicolons."""
    (folder / "rendered.cmake").write_text(text, "utf-8")
    (folder / "print.cmake").write_text(
        'include("${CMAKE_CURRENT_LIST_DIR}/rendered.cmake")\nget_cmake_property(names VARIABLES)\n'
        'foreach(name IN LISTS names)\nif(name MATCHES "^MLX_CUDA_")\nmessage("${name}=${${name}}")\nendif()\nendforeach()\n',
        "utf-8",
    )
    done = subprocess.run([cmake_program(), "-P", folder / "print.cmake"], check=True, capture_output=True, encoding="utf-8")
    return dict(line.split("=", 1) for line in done.stderr.splitlines())


def test_cmake_reads_what_is_rendered(roots: Path, tmp_path: Path) -> None:
    read = settings(cmake.render(["13.0"], LINUX), tmp_path)
    root = roots / "cuda-13.0-linux-x86_64"
    assert read["MLX_CUDA_MLX_VERSION"] == matrix.load().mlx
    assert read["MLX_CUDA_13_0_MODULE"] == "_cu13"
    assert read["MLX_CUDA_13_0_RPATH"].split(";") == list(CUDA.rpath())
    assert "$ORIGIN/../mlx/lib" in read["MLX_CUDA_13_0_RPATH"]
    assert read["MLX_CUDA_13_0_ROOT"] == str(root)
    assert read["MLX_CUDA_13_0_MLX_ROOT"] == str(roots / "mlx-cu13-linux-x86_64")
    assert read["MLX_CUDA_13_0_CUDNN_FRONTEND"] == str(roots / "cudnn-frontend-linux-x86_64")
    assert read["MLX_CUDA_13_0_CUBLASLT_LIBRARY"] == str(root / "lib/libcublasLt.so")
    assert read["MLX_CUDA_13_0_DRIVER_LIBRARY"] == str(root / "lib/stubs/libcuda.so")
    assert (read["MLX_CUDA_TARGET_PLATFORM"], read["MLX_CUDA_HOST_PLATFORM"]) == ("linux-x86_64", "linux-x86_64")


def test_a_cross_build_links_the_target(roots: Path, tmp_path: Path) -> None:
    read = settings(cmake.render(["13.0"], WINDOWS), tmp_path)
    target = roots / "cuda-13.0-win-amd64"
    assert read["MLX_CUDA_13_0_ROOT"] == str(target)
    assert read["MLX_CUDA_13_0_CUDNN_LIBRARY"] == str(target / "lib/cudnn.lib")
    assert read["MLX_CUDA_13_0_DRIVER_LIBRARY"] == str(target / "lib/cuda.lib")
    assert (read["MLX_CUDA_TARGET_PLATFORM"], read["MLX_CUDA_HOST_PLATFORM"]) == ("win-amd64", "linux-x86_64")


def test_windows_paths_reach_cmake_with_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CMake's text a backslash would begin an escape, and in a variable a folder's name."""

    class Place(PureWindowsPath):
        def exists(self) -> bool:
            return True

    monkeypatch.setattr(toolkit, "root_path", lambda name, _: Place(r"D:\tool kits\ü", name))
    monkeypatch.setattr(toolkit.roots, "cache_directory", lambda: Place(r"D:\tool kits\ü"))
    monkeypatch.setattr(matrix, "host_platform", lambda: WINDOWS)
    read = settings(cmake.render(["13.0"], WINDOWS), tmp_path)
    assert read["MLX_CUDA_TOOLKITS"] == "D:/tool kits/ü"
    assert read["MLX_CUDA_13_0_MLX_ROOT"] == "D:/tool kits/ü/mlx-cu13"
    assert read["MLX_CUDA_13_0_DRIVER_LIBRARY"] == "D:/tool kits/ü/cuda-13.0/lib/cuda.lib"
    assert not [value for value in read.values() if "\\" in value]


def test_what_the_build_tells_the_sbom(tmp_path: Path) -> None:
    """cmake/BuildFacts.cmake: everything that was asked for, nothing that differs between two builds of one environment."""
    (tmp_path / "tell.cmake").write_text(
        f'include("{matrix.REPOSITORY.as_posix()}/cmake/BuildFacts.cmake")\n'
        "set(CMAKE_CXX_COMPILER_ID MSVC)\nset(CMAKE_CXX_COMPILER_VERSION 19.44.35207.1)\nset(CMAKE_GENERATOR Ninja)\n"
        "set(MLX_CUDA_TARGET_PLATFORM win-amd64)\nset(MLX_CUDA_HOST_PLATFORM win-amd64)\nset(nanobind_VERSION 3.1.0)\n"
        'mlx_cuda_write_build_facts("${CMAKE_CURRENT_LIST_DIR}/_build.json")\n',
        "utf-8",
    )
    subprocess.run([cmake_program(), "-P", tmp_path / "tell.cmake"], check=True)
    told = json.loads((tmp_path / "_build.json").read_text("utf-8"))
    assert told.pop("cmake")
    assert told == {
        "compiler": {"id": "MSVC", "version": "19.44.35207.1"},
        "generator": "Ninja",
        "host": "win-amd64",
        "nanobind": "3.1.0",
        "platform": "win-amd64",
    }


@pytest.mark.parametrize("file", FILES["linux"])
def test_a_root_that_lacks_something_is_refused(roots: Path, file: str) -> None:
    (roots / "cuda-13.0-linux-x86_64" / file).unlink()
    with pytest.raises(EnvironmentProblem, match=r"the toolkit root lacks .*\n  fix: python -m ci toolkit verify"):
        cmake.render(["13.0"], LINUX)


def test_an_unchanged_file_is_not_written_again(roots: Path, tmp_path: Path) -> None:
    output = tmp_path / "matrix.cmake"
    arguments = [f"--output={output}", "--cuda", "13.0"]
    assert cmake.main([*arguments, "--platform=linux-x86_64"]) == 0
    os.utime(output, (0, 0))
    assert cmake.main([*arguments, "--platform=linux-x86_64"]) == 0
    assert output.stat().st_mtime == 0
    assert cmake.main([*arguments, "--platform=win-amd64"]) == 0
    assert output.stat().st_mtime > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cuda", "11.8"], "unknown CUDA version '11.8'\n  fix: use 12.8 or 13.0"),
        (["--cuda"], "MLX_CUDA_VERSIONS is empty: the wheel would have no native module\n  fix: give it one version or more, as in -D"),
        (["--cuda", "13.0", "--platform", "mac"], "unknown platform 'mac'\n  fix: use one of linux-x86_64"),
    ],
)
def test_a_problem_is_said_with_its_fix(
    roots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cmake.main([f"--output={tmp_path / 'out'}", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["ci.build.cmake", "ci.device.__main__"])
def test_needs_only_what_every_build_environment_has(module: str) -> None:
    code = """
import importlib, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
files = {name.split(".")[0]: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
print(*sorted(name for name, file in files.items() if "site-packages" in file))
"""
    done = subprocess.run([sys.executable, "-c", code, module], cwd=matrix.REPOSITORY, check=True, capture_output=True, encoding="utf-8")
    assert set(done.stdout.split()) <= {"platformdirs", "tomli"}


def test_no_driver_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(EnvironmentProblem, match=r"no NVIDIA driver .*cannot open.*\n  fix: name the architecture, for example --arch 90"):
        gpu.capabilities()


@pytest.mark.parametrize("driver", [FakeDriver(), FakeDriver((9, 0), status=100)], ids=["no GPU", "cuInit fails"])
def test_a_driver_without_gpu_has_a_fix(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    with pytest.raises(EnvironmentProblem, match="sees no GPU\n  fix: name the architecture"):
        gpu.capabilities()


def test_each_capability_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver((12, 0), (9, 0), (9, 0)))
    assert gpu.capabilities() == (90, 120)


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        (FakeDriver((9, 0), cuda=13010), "cu13"),
        (FakeDriver((9, 0), cuda=12080), "cu12"),
        (FakeDriver((9, 0), cuda=11080), "cpu"),
        (FakeDriver(), "cpu"),
    ],
    ids=["CUDA 13.1", "CUDA 12.8", "CUDA 11.8", "no GPU"],
)
def test_the_extra_that_fits_the_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, extra: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    assert gpu.extra() == extra
