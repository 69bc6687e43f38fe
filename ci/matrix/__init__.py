"""The declared build matrix: ``matrix.toml``, read."""

from __future__ import annotations

import platform as _machine
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..files import tomllib
from .model import Build, Change, Compilers, Cuda, Extra, Library, Matrix, Platform, Preload, Row, System, numbers
from .targets import Device, Targets, architecture_order, capability

__all__ = [
    "REPOSITORY",
    "Build",
    "Change",
    "Compilers",
    "Cuda",
    "Device",
    "Extra",
    "Library",
    "Matrix",
    "Platform",
    "Preload",
    "Row",
    "System",
    "Targets",
    "architecture_order",
    "capability",
    "host_platform",
    "load",
    "numbers",
    "parse",
    "platform",
]

REPOSITORY = Path(__file__).resolve().parents[2]


def _extra(table: dict[str, Any]) -> dict[str, Any]:
    read = {"libraries": Library, "preload": Preload}
    return table | {name: tuple(kind(**each) for each in table[name]) for name, kind in read.items() if name in table}


def _device(table: dict[str, Any]) -> Device:
    special = tuple((name, Targets(entry["sass"], entry["ptx"])) for entry in table["sources"] for name in entry["names"])
    return Device(table["root"], Targets(table["sass"], table["ptx"]), special)


def _rows(pythons: tuple[str, ...], **table: str) -> list[Row]:
    return [Row(python=python, **table) for python in pythons]


def _tuples(value: Any) -> Any:
    """TOML's lists as tuples, at any depth."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def load() -> Matrix:
    """Read ``ci/matrix/matrix.toml``."""
    return parse((Path(__file__).parent / "matrix.toml").read_text("utf-8"))


def parse(text: str) -> Matrix:
    data = _tuples(tomllib.loads(text))
    return Matrix(
        **data["project"],
        **data["release"],
        builds=tuple(Build(**table) for table in data["builds"]),
        platforms={name: Platform(name, **table) for name, table in data["platforms"].items()},
        compilers={system: Compilers(**table) for system, table in data["compilers"].items()},
        device=_device(data["device"]) if "device" in data else Device(),
        cuda={version: Cuda(version=version, **_extra(table)) for version, table in data.get("cuda", {}).items()},
        cpu=Extra(**_extra(data["cpu"])),
        driver=data.get("driver", {}),
        gpus=data.get("gpus", {}),
        tests=tuple(row for table in data["tests"] for row in _rows(**table)),
        changes=tuple(Change(**table) for table in data["changes"]),
    )


def host_platform() -> Platform:
    """The platform this interpreter runs on, or an :class:`EnvironmentProblem` if nothing is built for it."""
    machine = {"AMD64": "amd64", "arm64": "aarch64"}.get(_machine.machine(), _machine.machine())
    name = f"{ {'linux': 'linux', 'win32': 'win'}.get(sys.platform, sys.platform) }-{machine}"
    return load().platform(name)


def platform(name: str | None) -> Platform:
    """The platform that was asked for: this machine's where that is `host`, or nothing."""
    return load().platform(name) if name not in {None, "host"} else host_platform()
