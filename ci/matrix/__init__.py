"""The declared build matrix: ``matrix.toml``, read."""

from __future__ import annotations

import platform as _machine
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..files import tomllib
from .model import Build, Compilers, Cuda, Library, Matrix, Platform, Release, System
from .targets import Device, Targets, architecture_order, capability

__all__ = [
    "REPOSITORY",
    "Build",
    "Compilers",
    "Cuda",
    "Device",
    "Library",
    "Matrix",
    "Platform",
    "Release",
    "System",
    "Targets",
    "architecture_order",
    "capability",
    "host_platform",
    "load",
    "parse",
    "platform",
]

REPOSITORY = Path(__file__).resolve().parents[2]


def _library(table: dict[str, Any]) -> Library:
    linux, windows = table["linux"], table["windows"]
    return Library(
        name=table["name"],
        provider=table["provider"],
        needed=table["needed"],
        files={"linux": linux["soname"], "windows": windows["dll"]},
        directories={"linux": linux["dir"], "windows": windows["dir"]},
    )


def _cuda(version: str, table: dict[str, Any]) -> Cuda:
    return Cuda(
        version=version,
        major=table["major"],
        module=table["module"],
        extra=table["extra"],
        roots=tuple(table["roots"]),
        driver=table["driver"],
        driver_cuda=table["driver_cuda"],
        requires=tuple(table["requires"]),
        libraries=tuple(_library(entry) for entry in table["libraries"]),
    )


def _targets(table: dict[str, Any]) -> Targets:
    return Targets(tuple(table["sass"]), tuple(table["ptx"]))


def _device(table: dict[str, Any]) -> Device:
    special = tuple((name, _targets(entry)) for entry in table["sources"] for name in entry["names"])
    return Device(table["root"], _targets(table), special)


@cache
def load() -> Matrix:
    """Read ``ci/matrix/matrix.toml``."""
    return parse((Path(__file__).parent / "matrix.toml").read_text("utf-8"))


def parse(text: str) -> Matrix:
    data = tomllib.loads(text)
    project = data["project"]
    return Matrix(
        name=project["name"],
        module=project["module"],
        mlx=project["mlx"],
        builds=tuple(Build(**table) for table in data["builds"]),
        size_budget_mib=project["size_budget_mib"],
        release=Release(tuple(data["release"]["inherited"])),
        platforms={name: Platform(name=name, **table) for name, table in data["platforms"].items()},
        compilers={system: Compilers(**table) for system, table in data["compilers"].items()},
        device=_device(data["device"]),
        cuda={version: _cuda(version, table) for version, table in data["cuda"].items()},
        driver={"linux": data["driver"]["linux"], "windows": data["driver"]["windows"]},
    )


def host_platform() -> Platform:
    """The platform this interpreter runs on, or an :class:`EnvironmentProblem` if nothing is built for it."""
    machine = {"AMD64": "amd64", "arm64": "aarch64"}.get(_machine.machine(), _machine.machine())
    name = f"{ {'linux': 'linux', 'win32': 'win'}.get(sys.platform, sys.platform) }-{machine}"
    return load().platform(name)


def platform(name: str | None) -> Platform:
    """The platform that was asked for: this machine's where that is `host`, or nothing."""
    return load().platform(name) if name not in {None, "host"} else host_platform()
