"""What the loader tells Windows before it loads a native module: where the DLLs of each CUDA major lie, in layouts as pip makes them."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlx_cuda._loader import device_code as _device_code
from mlx_cuda._loader import native as _native

from .environments import TABLE, healthy

LAYOUTS = {
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


class Windows:
    """As much of Windows as the loader meets: the directories that it is told, and what was told when the module was imported."""

    def __init__(self) -> None:
        self.directories: list[Path] = []
        self.at_import: dict[str, list[Path]] = {}
        self.handles: list[object] = []

    def add_dll_directory(self, path: str) -> object:
        if not Path(path).is_absolute() or not Path(path).is_dir():
            raise OSError(f"[WinError 87] The parameter is incorrect: {path}")
        self.directories.append(Path(path))
        self.handles.append(object())
        return self.handles[-1]

    def import_module(self, name: str) -> ModuleType:
        self.at_import[name] = list(self.directories)
        module = ModuleType(name)
        vars(module)["build_info"] = lambda: {"device_code": ""}
        return module


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    fake = Windows()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "add_dll_directory", fake.add_dll_directory, raising=False)
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
    return folder


def environment(site: Path, major: int, **changed: Any) -> Any:
    """A Windows machine on which everything is installed into one site-packages."""
    env = healthy(major, system="windows", glibc=(), package=site / "mlx_cuda", **changed)
    return replace(env, distributions={name: replace(each, root=site) for name, each in env.distributions.items()})


@pytest.mark.parametrize("major", [12, 13])
def test_every_directory_is_told_before_the_module_is_imported(windows: Windows, tmp_path: Path, major: int) -> None:
    site = site_packages(tmp_path / "site-packages", major)
    _native._load(environment(site, major), (9, 0))
    assert windows.at_import == {f"mlx_cuda._cu{major}": [site / directory for directory in LAYOUTS[major]]}
    assert _native._kept == windows.handles, "a directory is forgotten when its handle is"


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
    (site / "nvidia/cudnn/bin/cudnn64_9.dll").unlink()
    (site / "nvidia/cudnn/bin").rmdir()
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


def test_the_other_major_is_not_told(windows: Windows, tmp_path: Path) -> None:
    """Two majors side by side: only that of the installed MLX backend."""
    site = site_packages(tmp_path, 12)
    for directory in LAYOUTS[13]:
        (site / directory).mkdir(parents=True, exist_ok=True)
    _native._load(environment(site, 12), (9, 0))
    assert not any("cu13" in directory.parts for directory in windows.directories)
