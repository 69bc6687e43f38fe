"""Wheels to report on: the good ones of tests/ci, spoilt or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.audit import providers
from ci.audit.checks import CHECKS
from ci.device.packed import pack
from ci.report import verdict
from ci.report.model import Report, make
from ci.wheelfile.wheel import DEVICE

from ..audit_support import (
    DIST_INFO,
    NAMES,
    QUICK,
    Files,
    World,
    fatbin,
    good_files,
    make_world,
    replaced,
    with_module,
    write_wheel,
)

HOSTILE = 'mlx_cuda/"><img src=x onerror=alert(1)></style><script>alert(1)</script>\u202e\x1b[2J.py'


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that run another process or need a real build."""
    monkeypatch.setattr(verdict, "CHECKS", {identifier: CHECKS[identifier] for identifier in QUICK})


@pytest.fixture
def wheel(tmp_path: Path, world: World, files: Files, locked_roots: None) -> Callable[..., Path]:
    """Write the good wheel after changes, into a folder of its own where several are wanted."""

    def build(*changes: Callable[[Files], None], folder: str = "new", name: str = NAMES["linux"]) -> Path:
        changed = dict(files)
        for change in changes:
            change(changed)
        return write_wheel(tmp_path / folder / name, changed)

    return build


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("windows"), "windows")


@pytest.fixture
def windows_wheel(tmp_path: Path, world: World, windows: World, locked_roots: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The same for Windows."""
    monkeypatch.setattr(providers, "site", lambda root, platform: (windows if platform.system == "windows" else world).site(root))

    def build(*changes: Callable[[Files], None]) -> Path:
        changed = good_files(windows)
        for change in changes:
            change(changed)
        return write_wheel(tmp_path / NAMES["windows"], changed)

    return build


@pytest.fixture
def everything(wheel: Callable[..., Path], world: World, windows_wheel: Callable[..., Path]) -> Report:
    """A report with all that a report can have: violations, hostile names, a bill of materials, several wheels, changes."""
    sbom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "components": [{"type": "library", "name": "<b>bold</b>", "licenses": [{"expression": "\ud800"}]}],
    }
    path = wheel(
        with_module(world, gpu_code=fatbin([75, 86], []) * 2, without=["libcudnn"]),
        lambda files: files.update({f"{DEVICE}decode.fatbin.lzma": pack(fatbin([80, 87], [120]))}),
        lambda files: files.update({"mlx_cuda/large.txt": b"x" * 20_000, f"{DIST_INFO}/sboms/a.cdx.json": json.dumps(sbom).encode()}),
        replaced(f"{DIST_INFO}/METADATA", "License-File: LICENSE", f"License-File: {HOSTILE}"),
        replaced(f"{DIST_INFO}/METADATA", "Provides-Extra: cu12", "Provides-Extra: <i>italic</i>"),
    )
    return make([path, windows_wheel()], against=[wheel(folder="old")])
