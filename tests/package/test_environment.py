from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_cuda._common.limits import PLAIN
from mlx_cuda._loader import driver, environment, limits_file, loaded
from mlx_cuda._loader.driver import Driver, Gpu
from mlx_cuda._loader.environment import Distribution, Headers
from mlx_cuda._loader.table import load

from .environments import healthy


def toolkit(path: Path, cuda_version: int) -> Path:
    (path / "include").mkdir(parents=True)
    (path / "include" / "cuda.h").write_text(f"/* … */\n#define CUDA_VERSION {cuda_version}\n", encoding="utf-8")
    return path


def test_this_environment() -> None:
    env = environment.take(ask_driver=False)
    assert env.table is load()
    assert env.package.name == "mlx_cuda"
    assert env.driver is None
    if sys.platform == "linux":
        assert env.glibc >= (2, 17)


def test_a_library_without_metadata_is_sought_where_rpath_looks(tmp_path: Path) -> None:
    package = tmp_path / "site" / "mlx_cuda"
    elsewhere = {"nvidia-cublas": Distribution("13.0.0", tmp_path / "other", ())}
    roots = healthy(13, package=package, distributions=elsewhere).roots
    assert roots["nvidia-cuda-runtime"] == (tmp_path / "site").resolve()
    assert roots["nvidia-cublas"] == tmp_path / "other"


def test_an_installed_package_is_described_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mlx_cuda_13-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: mlx-cuda-13\nVersion: 0.32.4\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_35_x86_64\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = environment._distribution("mlx-cuda-13")
    assert found == Distribution("0.32.4", tmp_path.resolve(), ("py3-none-manylinux_2_35_x86_64",))
    assert environment._distribution("no-such-package") is None


@pytest.mark.parametrize(
    ("tags", "glibc"),
    [
        (("cp310-abi3-manylinux_2_27_x86_64", "cp310-abi3-manylinux_2_28_x86_64"), (2, 27)),
        (("py3-none-win_amd64",), ()),
        ((), ()),
    ],
)
def test_glibc_of_a_wheel(tags: tuple[str, ...], glibc: tuple[int, ...]) -> None:
    assert Distribution("1", Path(), tags).glibc == glibc


def test_headers_are_those_that_mlx_takes(tmp_path: Path) -> None:
    home, path, system = (toolkit(tmp_path / name, version) for name, version in (("home", 12080), ("path", 13000), ("system", 13010)))
    both = {"CUDA_HOME": str(home), "CUDA_PATH": str(path)}
    assert environment._headers(both, system) == Headers("CUDA_HOME", home, (12, 8))
    assert environment._headers({"CUDA_PATH": str(path)}, system) == Headers("CUDA_PATH", path, (13, 0))
    assert environment._headers({}, system) == Headers("the system's toolkit", system, (13, 1))
    assert environment._headers({}, tmp_path / "none") is None


@pytest.mark.parametrize(("value", "graphs"), [
    (None, True), ("1", True), ("02", True), (" 1", True), ("0", False), ("", False), ("00", False), ("no", False), ("off1", False),
])  # fmt: skip
def test_whether_mlx_launches_graphs(value: str | None, graphs: bool) -> None:
    assert environment._graphs({} if value is None else {"MLX_USE_CUDA_GRAPHS": value}) is graphs


def test_libraries_are_found_in_their_packages(tmp_path: Path) -> None:
    library = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    cuda = load().cuda[12]
    roots = dict.fromkeys((library.provider for library in cuda.libraries), tmp_path)
    found = environment._libraries(cuda, "windows", roots)  # with the names of Windows, and no search by the loader
    assert found == {}
    assert environment._libraries(cuda, "linux", roots)["libcudnn"] == str(library)


class FakeDriver:
    """libcuda with one H200; `failing` names the call that returns an error. Every function of a stub returns one."""

    def __init__(self, failing: str = "", *, stub: bool = False) -> None:
        self.failing = failing
        self.stub = stub

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if self.stub:
                return 34
            if name == self.failing:
                return 803
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"system driver mismatch"
            values = {"cuDriverGetVersion": 13020, "cuDeviceGetCount": 1, "cuDeviceGetAttribute": {75: 9, 76: 0}}
            if name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            elif name in values:
                value: Any = values[name]
                arguments[0]._obj.value = value[arguments[1]] if isinstance(value, dict) else value
            return 0

        return call


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver())
    assert driver.query() == Driver(cuda=(13, 2), gpus=(Gpu("NVIDIA H200", (9, 0)),))


def test_a_failing_driver_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(failing="cuInit"))
    assert driver.query() == Driver(cuda=(13, 2), error="cuInit failed with error 803 (system driver mismatch)")


def test_a_stub_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = "/usr/local/cuda/lib64/stubs/libcuda.so"
    monkeypatch.setattr(driver, "LIBRARY", "libcuda.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(stub=True))
    monkeypatch.setattr(loaded, "mapped", lambda: ["/lib/libc.so.6", "/lib/libcudart.so.13", stubs])
    answer = driver.query()
    assert answer == Driver(error="libcuda.so.1 is a stub, which a toolkit brings to link against", stub=True)
    assert answer.path == stubs


@pytest.mark.parametrize(("release", "wsl"), [
    ("5.15.167.4-microsoft-standard-WSL2", True), ("4.4.0-19041-Microsoft", True), ("6.8.0-45-generic", False),
])  # fmt: skip
def test_windows_subsystem_for_linux(release: str, wsl: bool) -> None:
    assert environment._wsl(release) is wsl


def test_conda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))  # of a virtual environment
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert environment._conda() == ""
    (tmp_path / "conda-meta").mkdir()
    assert environment._conda() == str(tmp_path)


def test_no_driver_is_an_answer() -> None:
    answer = driver.query("libno_such_driver.so.1")
    assert answer.cuda is None
    assert "libno_such_driver.so.1" in answer.error


def test_what_was_measured_on_the_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = healthy()
    monkeypatch.setenv("MLX_CUDA_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.delenv("MLX_CUDA_CAPABILITY", raising=False)
    assert environment._measured(env) == "measured on NVIDIA H200, with mlx-cuda"
    versions = limits_file.versions("13.0", env.distributions["mlx"].version)
    limits_file.keep(tmp_path / "tuned-limits.json", "NVIDIA H200", versions, PLAIN)
    assert environment._measured(env) == "measured here on NVIDIA H200"
    monkeypatch.setenv("MLX_CUDA_CAPABILITY", "80")  # it is to be another one
    assert environment._measured(env) == ""
