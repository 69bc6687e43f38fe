"""The contents of ``matrix.toml``, except device code, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import EnvironmentProblem
from .targets import Device

System = Literal["linux", "windows"]


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
        """Whether a wheel with this platform tag is for it, whatever glibc the tag names, if any."""
        return tag.startswith(("manylinux", "linux") if self.system == "linux" else "win") and tag.endswith(f"_{self.machine}")


@dataclass(frozen=True)
class Library:
    """A library outside the wheel: its file name and directory below site-packages, by system, and who supplies it."""

    name: str
    provider: str
    needed: bool
    files: dict[System, str]
    directories: dict[System, str]


@dataclass(frozen=True)
class Preload:
    """DLLs that are loaded by path before anything asks for them by name: patterns, below site-packages, and who supplies them."""

    provider: str
    directory: str
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of the wheel and what it requires; its native module, if it has one, and what that may need at run time."""

    extra: str
    requires: tuple[str, ...]
    module: str = ""
    roots: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cuda(Extra):
    """One CUDA version, and the native module built with it."""

    version: str
    major: int
    driver: str
    driver_cuda: str
    preload: tuple[Preload, ...] = ()

    def rpath(self) -> tuple[str, ...]:
        """The RPATH entries of the native module (which is in the package's directory), in the data file's order."""
        directories = dict.fromkeys(lib.directories["linux"] for lib in self.libraries if lib.needed)
        return tuple(f"$ORIGIN/../{directory}" for directory in directories)


@dataclass(frozen=True)
class Build:
    """One of the wheels that each platform gets: its Python and ABI tags, and cibuildwheel's name for the CPython that builds it."""

    abi: str
    identifier: str


@dataclass(frozen=True)
class Row:
    """One trial of the wheels: a platform, a CPython, an extra, and the GPU's family and the oldest driver where it needs a GPU."""

    platform: str
    python: str
    extra: str
    gpu: str = ""
    driver: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.platform, f"cp{self.python.replace('.', '')}", self.extra, self.gpu)))


@dataclass(frozen=True)
class Change:
    """The platforms that a change of some files needs, both as patterns."""

    files: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Compilers:
    """The C++ compilers that are taken on a system, as CMake names and numbers them, and where Windows has one."""

    id: str
    minimum: str
    below: str = ""
    toolset: str = ""
    studio: int = 0

    def __contains__(self, version: str) -> bool:
        return numbers(self.minimum) <= numbers(version) and (not self.below or numbers(version) < numbers(self.below))

    def __str__(self) -> str:
        return f"{self.id} {self.minimum} or newer" + (f", but older than {self.below}" if self.below else "")


def numbers(version: str) -> tuple[int, ...]:
    """A version for comparisons."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Matrix:
    name: str
    module: str
    repository: str
    mlx: str  # "" where the project is not built for a version of MLX
    builds: tuple[Build, ...]
    size_budget_mib: int
    inherited: tuple[str, ...]  # versions on the index that are a former owner's
    platforms: dict[str, Platform]
    compilers: dict[System, Compilers]
    device: Device
    cuda: dict[str, Cuda]
    cpu: Extra
    driver: dict[System, str]
    gpus: dict[str, tuple[int, ...]]  # the compute capabilities of each family
    tests: tuple[Row, ...]
    changes: tuple[Change, ...]

    @property
    def extras(self) -> tuple[Extra, ...]:
        return *self.cuda.values(), self.cpu

    def platform(self, name: str) -> Platform:
        if name not in self.platforms:
            raise EnvironmentProblem(f"unknown platform {name!r}", fix=f"use one of {', '.join(self.platforms)}")
        return self.platforms[name]

    def row(self, name: str) -> Row:
        rows = {row.name: row for row in self.tests}
        if name not in rows:
            raise EnvironmentProblem(f"unknown row {name!r}", fix=f"use one of {', '.join(rows)}")
        return rows[name]
