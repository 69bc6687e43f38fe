"""The declared build matrix: ``matrix.toml``, read."""

from __future__ import annotations

import platform as _machine
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import EnvironmentProblem
from ..files import tomllib
from .model import Build, Change, Compilers, Cuda, Extra, Library, Matrix, Platform, Preload, Row, System, numbers
from .targets import Device, Targets, architecture_order, capability, newest_first

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
    "newest_first",
    "numbers",
    "parse",
    "platform",
]

REPOSITORY = Path(__file__).resolve().parents[2]
FIELDS = "correct it: docs/reference/matrix.md lists all fields"
TABLES = {
    "project", "release", "builds", "platforms", "compilers", "device", "cuda", "cpu", "driver", "gpus", "tests", "changes",
}  # fmt: skip


def _extra(table: dict[str, Any]) -> dict[str, Any]:
    read = {"libraries": Library, "preload": Preload}
    return table | {name: tuple(kind(**each) for each in table[name]) for name, kind in read.items() if name in table}


def _sources(names: tuple[str, ...], **targets: tuple[str, ...]) -> list[tuple[str, Targets]]:
    return [(name, Targets(**targets)) for name in names]


def _device(root: str, sass: tuple[str, ...], ptx: tuple[str, ...], sources: tuple[dict[str, Any], ...] = ()) -> Device:
    return Device(root, Targets(sass, ptx), tuple(each for table in sources for each in _sources(**table)))


def _rows(pythons: tuple[str, ...], **table: str) -> list[Row]:
    return [Row(python=python, **table) for python in pythons]


def _tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists, at any depth."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def load() -> Matrix:
    """Read ``ci/matrix/matrix.toml``."""
    return parse((Path(__file__).parent / "matrix.toml").read_text("utf-8"))


def parse(text: str) -> Matrix:
    """Read the text of a ``matrix.toml``; an :class:`EnvironmentProblem` names a field that is missing or unknown."""
    try:
        return _matrix(_tuples(tomllib.loads(text)))
    except KeyError as error:
        raise EnvironmentProblem(f"ci/matrix/matrix.toml lacks {error.args[0]!r}", fix=FIELDS) from error
    except TypeError as error:  # of a dataclass or function: it names the field that is missing or unknown
        said = str(error).replace(".__init__", "").replace("()", "").removeprefix("_")
        raise EnvironmentProblem(f"ci/matrix/matrix.toml: {said}", fix=FIELDS) from error
    except tomllib.TOMLDecodeError as error:
        raise EnvironmentProblem(f"ci/matrix/matrix.toml is not TOML: {error}", fix="correct it there") from error


def _matrix(data: dict[str, Any]) -> Matrix:
    read = Matrix(
        **data["project"],
        **data["release"],
        builds=tuple(Build(**table) for table in data["builds"]),
        platforms={name: Platform(name, **table) for name, table in data["platforms"].items()},
        compilers={system: Compilers(**table) for system, table in data["compilers"].items()},
        device=_device(**data["device"]) if "device" in data else Device(),
        cuda={version: Cuda(version=version, **_extra(table)) for version, table in data.get("cuda", {}).items()},
        cpu=Extra(**_extra(data["cpu"])),
        driver=data.get("driver", {}),
        gpus=data.get("gpus", {}),
        tests=tuple(row for table in data["tests"] for row in _rows(**table)),
        changes=tuple(Change(**table) for table in data["changes"]),
    )
    if unknown := data.keys() - TABLES:
        raise EnvironmentProblem(f"ci/matrix/matrix.toml has unknown tables: {', '.join(sorted(unknown))}", fix=FIELDS)
    return read


def host_platform() -> Platform:
    """The platform this interpreter runs on, or an :class:`EnvironmentProblem` if nothing is built for it."""
    machine = {"AMD64": "amd64", "arm64": "aarch64"}.get(_machine.machine(), _machine.machine())
    name = f"{ {'linux': 'linux', 'win32': 'win'}.get(sys.platform, sys.platform) }-{machine}"
    return load().platform(name)


def platform(name: str | None) -> Platform:
    """A platform by its name; this machine's for `host` and None."""
    return load().platform(name) if name not in {None, "host"} else host_platform()
