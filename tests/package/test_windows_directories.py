"""What the loader does on Windows before it loads a native module, in layouts as pip makes them.

It says where the DLLs of each CUDA major lie, and loads by path what these look for by bare names. `nox -s wine` has real ones.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_cuda import BackendError
from mlx_cuda._loader import device_code as _device_code
from mlx_cuda._loader import loaded as _loaded
from mlx_cuda._loader import native as _native

from .environments import TABLE, healthy

LAYOUTS = {  # the directories that are added
    12: {
        "nvidia/cuda_runtime/bin": "cudart64_12.dll",
        "nvidia/cublas/bin": "cublasLt64_12.dll",
        "nvidia/cudnn/bin": "cudnn64_9.dll",
        "mlx": "mlx.dll",
    },
    13: {
        "nvidia/cu13/bin/x86_64": "cublasLt64_13.dll",  # and cudart64_13.dll beside it
        "nvidia/cudnn/bin": "cudnn64_9.dll",
        "mlx": "mlx.dll",
    },
}
CUDNN = [  # of nvidia-cudnn-cu13 9.19.1.2, and one that a later version may bring
    "cudnn64_9.dll",
    "cudnn_adv64_9.dll",
    "cudnn_cnn64_9.dll",
    "cudnn_engines_precompiled64_9.dll",
    "cudnn_engines_runtime_compiled64_9.dll",
    "cudnn_graph64_9.dll",
    "cudnn_heuristic64_9.dll",
    "cudnn_of_tomorrow64_9.dll",
    "cudnn_ops64_9.dll",
]
NVRTC = {  # in the order in which they are loaded
    12: ("nvidia/cuda_nvrtc/bin", ["nvrtc-builtins64_129.dll", "nvrtc64_120_0.dll"]),
    13: ("nvidia/cu13/bin/x86_64", ["nvrtc-builtins64_130.dll", "nvrtc64_130_0.dll"]),
}


class Windows:
    """As much of Windows as the loader meets: the directories and files that it is given, and what was told when the module was imported.

    A file is loaded by an absolute path alone, and its parts are loaded after what they need.
    """

    def __init__(self) -> None:
        self.directories: list[Path] = []
        self.files: list[Path] = []
        self.before: list[str] = []  # loaded by somebody else
        self.at_import: dict[str, list[Path]] = {}
        self.handles: list[object] = []

    def add_dll_directory(self, path: str) -> object:
        return self._opened(Path(path), self.directories, Path(path).is_dir(), "87] The parameter is incorrect")

    def load(self, path: str) -> object:
        return self._opened(Path(path), self.files, Path(path).is_file(), "126] The specified module could not be found")

    def _opened(self, path: Path, known: list[Path], found: bool, wrong: str) -> object:
        if not path.is_absolute() or not found:
            raise OSError(f"[WinError {wrong}: {path}")
        known.append(path)
        self.handles.append(object())
        return self.handles[-1]

    def import_module(self, name: str) -> ModuleType:
        self.at_import[name] = [*self.directories, *self.files]
        module = ModuleType(name)
        vars(module)["build_info"] = lambda: {"device_code": ""}
        return module


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    fake = Windows()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "add_dll_directory", fake.add_dll_directory, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", fake.load)
    monkeypatch.setattr(_loaded, "mapped", lambda: fake.before)
    monkeypatch.setattr(importlib, "import_module", fake.import_module)
    monkeypatch.setattr(_native, "_kept", [])
    monkeypatch.setattr(
        _device_code, "read", lambda _: _device_code.DeviceCode("", {"swiglu": _device_code.Fatbin("", (), ("80",))})
    )  # of which test_native.py speaks
    monkeypatch.setattr(_device_code, "load", lambda *_: {})
    return fake


def site_packages(folder: Path, major: int) -> Path:
    for directory, dll in LAYOUTS[major].items():
        (folder / directory).mkdir(parents=True)
        (folder / directory / dll).touch()
    fill(folder / "nvidia/cudnn/bin", CUDNN)
    directory, files = NVRTC[major]
    fill(folder / directory, [*files, files[-1].replace(".dll", ".alt.dll"), "nvblas64_1.dll"])
    return folder


def fill(folder: Path, files: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).touch()


def environment(site: Path, major: int, **changed: Any) -> Any:
    """A Windows machine on which everything is installed into one site-packages."""
    env = healthy(major, system="windows", glibc=(), package=site / "mlx_cuda", **changed)
    return replace(env, distributions={name: replace(each, root=site) for name, each in env.distributions.items()})


@pytest.mark.parametrize("major", [12, 13])
def test_every_directory_is_told_before_the_module_is_imported(windows: Windows, tmp_path: Path, major: int) -> None:
    site = site_packages(tmp_path / "site-packages", major)
    _native._load(environment(site, major), (9, 0))
    assert windows.at_import == {f"mlx_cuda._cu{major}": [*(site / directory for directory in LAYOUTS[major]), *windows.files]}
    assert _native._kept == windows.handles, "a directory is forgotten when its handle is"


@pytest.mark.parametrize("major", [12, 13])
def test_what_is_asked_for_by_name_is_loaded_before(windows: Windows, tmp_path: Path, major: int) -> None:
    """All of cuDNN, the graph first, which its other parts need, and NVRTC, its builtins first; nothing else, and nothing twice."""
    site = site_packages(tmp_path / "site packages", major)
    _native._load(environment(site, major), (9, 0))
    folder, nvrtc = NVRTC[major]
    rest = [file for file in CUDNN if "graph" not in file]
    cudnn = [site / "nvidia/cudnn/bin" / file for file in ("cudnn_graph64_9.dll", *rest)]
    assert windows.files == [*(site / folder / file for file in nvrtc), *cudnn]


def test_parts_come_from_beside_what_another_package_has_loaded(windows: Windows, tmp_path: Path) -> None:
    """Windows gives the first that was loaded under a name: of two cuDNNs one would get the other's parts."""
    site = site_packages(tmp_path / "site", 13)
    torch = tmp_path / "torch/lib"
    fill(torch, ["torch_cpu.dll", *CUDNN[:-1]])
    windows.before = [str(tmp_path / "python.exe"), str(torch / "torch_cpu.dll"), str(torch / "cudnn_ops64_9.dll")]
    _native._load(environment(site, 13), (9, 0))
    folder, nvrtc = NVRTC[13]
    assert windows.files[:2] == [site / folder / file for file in nvrtc]
    assert {path.parent for path in windows.files[2:]} == {torch}
    assert {path.name for path in windows.files[2:]} == set(CUDNN[:-1])


def test_what_is_loaded_for_another_cuda_major_is_no_part(windows: Windows, tmp_path: Path) -> None:
    """torch loads all DLLs of its folder: its NVRTC of CUDA 12 is not ours of CUDA 13."""
    site, torch = site_packages(tmp_path / "site", 13), tmp_path / "torch/lib"
    fill(torch, files := NVRTC[12][1])
    windows.before = [str(torch / file) for file in files]
    _native._load(environment(site, 13), (9, 0))
    folder, nvrtc = NVRTC[13]
    assert windows.files[:2] == [site / folder / file for file in nvrtc]


def test_a_package_that_has_loaded_one_part_and_lacks_the_first(windows: Windows, tmp_path: Path) -> None:
    site, theirs = site_packages(tmp_path / "site", 13), tmp_path / "theirs"
    fill(theirs, ["cudnn64_9.dll"])
    windows.before = [str(theirs / "cudnn64_9.dll")]
    with pytest.raises(BackendError) as caught:
        _native._load(environment(site, 13), (9, 0))
    assert caught.value.fix == f"reinstall the package of {theirs / 'cudnn64_9.dll'}"


@pytest.mark.parametrize(
    ("file", "provider"),
    [
        ("nvidia/cudnn/bin/cudnn_graph64_9.dll", "nvidia-cudnn-cu13"),
        ("nvidia/cu13/bin/x86_64/nvrtc-builtins64_130.dll", "nvidia-cuda-nvrtc"),
    ],
)
def test_a_package_without_its_first_part(windows: Windows, tmp_path: Path, file: str, provider: str) -> None:
    """cuDNN would end the process at its first call."""
    site = site_packages(tmp_path, 13)
    (site / file).unlink()
    with pytest.raises(BackendError, match=rf"has no (cudnn_graph64_9|nvrtc-builtins64_13\*)\.dll, which .+ needs\n  fix: .* {provider}$"):
        _native._load(environment(site, 13), (9, 0))
    assert windows.at_import == {}


def test_a_part_that_does_not_load(windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_packages(tmp_path, 13)

    def refuse(path: str) -> object:
        raise OSError("[WinError 193] %1 is not a valid Win32 application")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(BackendError, match=r"nvrtc-builtins64_130\.dll does not load: \[WinError 193\] %1 is"):
        _native._load(environment(site, 13), (9, 0))


@pytest.mark.parametrize("major", [12, 13])
def test_every_dll_lies_in_a_directory_that_is_told(windows: Windows, tmp_path: Path, major: int) -> None:
    site = site_packages(tmp_path, major)
    for library in TABLE.cuda[major].needed:
        (site / library.files["windows"]).touch()
    _native._load(environment(site, major), (9, 0))
    found = {path.name for directory in windows.directories for path in directory.iterdir()}
    assert {library.files["windows"].name for library in TABLE.cuda[major].needed} <= found


def test_a_directory_that_is_not_there_is_passed_over(windows: Windows, tmp_path: Path) -> None:
    """An MLX built from source has none of the packages, and Windows refuses a directory that does not exist."""
    site = site_packages(tmp_path, 13)
    shutil.rmtree(site / "nvidia/cudnn")
    _native._load(environment(site, 13), (9, 0))
    assert windows.directories == [site / "nvidia/cu13/bin/x86_64", site / "mlx"]


def test_packages_in_two_site_packages(windows: Windows, tmp_path: Path) -> None:
    """A user's own site-packages beside the environment's: each directory is its package's."""
    ours, users = site_packages(tmp_path / "ours", 12), site_packages(tmp_path / "users", 12)
    env = environment(ours, 12)
    moved = replace(env.distributions["nvidia-cudnn-cu12"], root=users)
    _native._load(replace(env, distributions={**env.distributions, "nvidia-cudnn-cu12": moved}), (9, 0))
    assert users / "nvidia/cudnn/bin" in windows.directories
    assert ours / "nvidia/cudnn/bin" not in windows.directories
    assert ours / "nvidia/cublas/bin" in windows.directories
    assert {path.parent for path in windows.files if path.name.startswith("cudnn")} == {users / "nvidia/cudnn/bin"}


def test_the_other_major_is_not_told(windows: Windows, tmp_path: Path) -> None:
    """Two majors side by side: only that of the installed MLX backend."""
    site = site_packages(tmp_path, 12)
    for directory in LAYOUTS[13]:
        (site / directory).mkdir(parents=True, exist_ok=True)
    _native._load(environment(site, 12), (9, 0))
    assert not any("cu13" in directory.parts for directory in windows.directories)
