"""The declared build matrix (``matrix.toml``) as frozen dataclasses."""

from __future__ import annotations

import platform as _platform
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Iterable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]

System = Literal["linux", "windows"]


def architecture_order(architecture: str) -> tuple[int, str]:
    """Sorts 90a after 90 and 100 after 90a; ValueError for what is no architecture's name."""
    parts = re.fullmatch(r"([0-9]+)([af]*)", architecture)
    if not parts:
        raise ValueError(f"unknown architecture {architecture!r}")
    return int(parts[1]), parts[2]


def capability(architecture: str) -> int:
    """The compute capability of the GPUs that an architecture is for: 90 of 90a."""
    return architecture_order(architecture)[0]


@dataclass(frozen=True)
class Platform:
    """A platform that wheels are built for, such as ``linux-x86_64``."""

    name: str
    tag: str
    uv: str
    runner: str

    @property
    def system(self) -> System:
        return "windows" if self.name.startswith("win") else "linux"

    @property
    def machine(self) -> str:
        return self.name.split("-", 1)[1]

    def takes(self, tag: str) -> bool:
        """Whether a wheel with this platform tag is for it, whatever glibc the tag names."""
        return tag.startswith("manylinux" if self.system == "linux" else "win") and tag.endswith(f"_{self.machine}")


@dataclass(frozen=True)
class Targets:
    """What a source is compiled for: machine code, such as 80 and 90a, and PTX."""

    sass: tuple[str, ...]
    ptx: tuple[str, ...]

    def front(self, architecture: str) -> str:
        """The PTX that machine code is assembled from: the newest declared one; its own where there is none or where it has a letter."""
        number, variant = architecture_order(architecture)
        older = [each for each in self.ptx if capability(each) <= number]
        return architecture if variant or not older else max(older, key=architecture_order)

    def holds(self, architecture: str) -> bool:
        """Whether the source has code for these GPUs at all."""
        bound = [each for each in self.sass if architecture_order(each)[1]]  # to instructions that only their own GPUs have
        if architecture_order(architecture)[1] or len(bound) == len(self.sass):
            return architecture in bound
        return capability(architecture) >= min(map(capability, self.sass))


@dataclass(frozen=True)
class Device:
    """The device code: the root of its compilers, and what sources are compiled for."""

    root: str
    default: Targets
    special: tuple[tuple[str, Targets], ...]  # by patterns of sources' names

    def declared(self, source: str) -> Targets:
        return next((targets for pattern, targets in self.special if fnmatchcase(source, pattern)), self.default)

    @property
    def sass(self) -> tuple[str, ...]:
        """Machine code of any source."""
        return _ascending(each for targets in (self.default, *dict(self.special).values()) for each in targets.sass)

    @property
    def ptx(self) -> tuple[str, ...]:
        return _ascending(each for targets in (self.default, *dict(self.special).values()) for each in targets.ptx)

    def asked(self, requested: Iterable[str]) -> Targets:
        """What names mean: a number alone is what is declared for it, so 90 is 90a; compute_80 is PTX. ValueError for no such name."""
        names = {str(capability(name)): name for name in self.sass}
        asked = [name.partition("_")[::2] if name.startswith("compute_") else ("", names.get(name, name)) for name in requested]
        return Targets(*(_ascending(name for kind, name in asked if kind == wanted) for wanted in ("", "compute")))

    def native(self, capability_: int) -> tuple[str, ...]:
        """The names of what a GPU runs: the newest machine code of its family, which the compilers know, else all PTX."""
        family = [name for name in self.sass if capability(name) // 10 == capability_ // 10 and capability(name) <= capability_]
        return (max(family, key=architecture_order),) if family else tuple(f"compute_{name}" for name in self.ptx)

    def narrowed(self, source: str, requested: Iterable[str]) -> Targets:
        """What is asked for, as far as the source has code for it."""
        declared, asked = self.declared(source), self.asked(requested)
        return Targets(*(tuple(filter(declared.holds, each)) for each in (asked.sass, asked.ptx)))


def _ascending(architectures: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(architectures), key=architecture_order))


@dataclass(frozen=True)
class Library:
    """A library outside the wheel: its file name and directory below site-packages, by system, and who supplies it."""

    name: str
    provider: str
    needed: bool
    files: dict[System, str]
    directories: dict[System, str]


@dataclass(frozen=True)
class Cuda:
    """One CUDA version: the native module built with it and what that module may need at run time."""

    version: str
    major: int
    module: str
    extra: str
    roots: tuple[str, ...]
    driver: str
    driver_cuda: str
    requires: tuple[str, ...]
    libraries: tuple[Library, ...]

    def rpath(self) -> tuple[str, ...]:
        """The RPATH entries of the native module (which lies in ``site-packages/mlx_cuda``), in the data file's order."""
        directories = dict.fromkeys(lib.directories["linux"] for lib in self.libraries if lib.needed)
        return tuple(f"$ORIGIN/../{directory}" for directory in directories)


@dataclass(frozen=True)
class Build:
    """One of the wheels that each platform gets: its Python and ABI tags, and cibuildwheel's name for the CPython that builds it."""

    abi: str
    identifier: str


@dataclass(frozen=True)
class Compilers:
    """The C++ compilers that are taken on a system, as CMake names and numbers them, and how CMake is told to choose one."""

    id: str
    minimum: str
    below: str = ""
    generator: str = ""
    toolset: str = ""

    def __contains__(self, version: str) -> bool:
        return _numbers(self.minimum) <= _numbers(version) and (not self.below or _numbers(version) < _numbers(self.below))

    def __str__(self) -> str:
        return f"{self.id} {self.minimum} or newer" + (f", but older than {self.below}" if self.below else "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Release:
    """What the index grants the project, and which versions there are a former owner's."""

    project_limit_gib: float
    inherited: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    name: str
    module: str
    mlx: str
    builds: tuple[Build, ...]
    size_budget_mib: int
    release: Release
    platforms: dict[str, Platform]
    compilers: dict[System, Compilers]
    device: Device
    cuda: dict[str, Cuda]
    driver: dict[System, str]

    def platform(self, name: str) -> Platform:
        if name not in self.platforms:
            raise EnvironmentProblem(f"unknown platform {name!r}", cure=f"use one of {', '.join(self.platforms)}")
        return self.platforms[name]


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
        release=Release(data["release"]["project_limit_gib"], tuple(data["release"]["inherited"])),
        platforms={name: Platform(name=name, **table) for name, table in data["platforms"].items()},
        compilers={system: Compilers(**table) for system, table in data["compilers"].items()},
        device=_device(data["device"]),
        cuda={version: _cuda(version, table) for version, table in data["cuda"].items()},
        driver={"linux": data["driver"]["linux"], "windows": data["driver"]["windows"]},
    )


def host_platform() -> Platform:
    """The platform this interpreter runs on, or an :class:`EnvironmentProblem` if nothing is built for it."""
    machine = {"AMD64": "amd64", "arm64": "aarch64"}.get(_platform.machine(), _platform.machine())
    name = f"{ {'linux': 'linux', 'win32': 'win'}.get(sys.platform, sys.platform) }-{machine}"
    return load().platform(name)
