"""``_libraries.json`` as immutable classes: the libraries of each native module, and the packages that provide them."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, NamedTuple

System = Literal["linux", "windows", "darwin"]
Version = tuple[int, ...]

FRONTEND = "mlx"
CPU_BACKEND = "mlx-cpu"


def version(text: str) -> Version:
    """Return the release numbers of a version: ``"9.19.0.56"`` becomes ``(9, 19, 0, 56)``; a suffix that is not a number ends it."""
    return tuple(map(int, takewhile(str.isdecimal, text.partition("+")[0].split("."))))


@dataclass(frozen=True)
class Bounds:
    """The versions of a package that an extra accepts."""

    minimum: str = ""
    below: str = ""
    exactly: str = ""

    def __contains__(self, installed: str) -> bool:
        if self.exactly:
            return installed == self.exactly
        return version(self.minimum) <= version(installed) and (not self.below or version(installed) < version(self.below))

    def __str__(self) -> str:
        if self.exactly:
            return f"=={self.exactly}"
        return ",".join(f"{sign}{bound}" for sign, bound in ((">=", self.minimum), ("<", self.below)) if bound)


class Library(NamedTuple):
    """A library outside the wheel: its file below site-packages, by system, and the package that supplies it."""

    name: str
    provider: str
    needed: bool
    files: Mapping[str, PurePosixPath]


class Preload(NamedTuple):
    """DLLs to load before they are needed by a bare name: patterns, the first of which every folder must have."""

    provider: str
    directory: PurePosixPath
    files: tuple[str, ...]

    def takes(self, file: PurePath) -> bool:
        """Return whether a file is one of these, by its name."""
        return any(file.match(pattern) for pattern in self.files)

    def found(self, folder: Path) -> list[Path]:
        """Return those of a folder in loading order, each once."""
        return list(dict.fromkeys(path for pattern in self.files for path in sorted(folder.glob(pattern))))


@dataclass(frozen=True)
class Cuda:
    """One CUDA major: its native module, its extra, and the packages of that extra."""

    major: int
    module: str
    extra: str
    driver: str
    driver_cuda: tuple[int, int]  # the CUDA version that the oldest driver runs
    capability: tuple[int, int]
    requires: Mapping[str, Bounds]
    preload: tuple[Preload, ...]
    libraries: tuple[Library, ...]

    @property
    def backend(self) -> str:
        """Return the package of MLX's backend for this major."""
        return f"mlx-cuda-{self.major}"

    @property
    def needed(self) -> tuple[Library, ...]:
        """Return the libraries that the native module links."""
        return tuple(library for library in self.libraries if library.needed)


@dataclass(frozen=True)
class Table:
    """The versions of this build: MLX, the glibc of MLX's wheels, and each CUDA major."""

    mlx: str
    glibc: str
    cuda: Mapping[int, Cuda]

    @property
    def backends(self) -> tuple[str, ...]:
        """Return every package with MLX's backend library; an environment can have only one."""
        return (*(cuda.backend for cuda in self.cuda.values()), CPU_BACKEND)

    def packages(self) -> tuple[str, ...]:
        """Return every package that a check reads."""
        names = dict.fromkeys((FRONTEND, "nanobind-backend", *self.backends))
        for cuda in self.cuda.values():
            suppliers = *(library.provider for library in cuda.libraries), *(each.provider for each in cuda.preload)
            names |= dict.fromkeys((*cuda.requires, *suppliers))
        return tuple(names)


def library_paths(cuda: Cuda, system: System, roots: Mapping[str, Path]) -> dict[str, Path]:
    """Return the path of each needed library, given the site-packages directory of each provider."""
    return {library.name: roots[library.provider] / library.files[system] for library in cuda.needed if library.provider in roots}


def dll_directories(cuda: Cuda, roots: Mapping[str, Path]) -> tuple[Path, ...]:
    """Return the directories that Windows must search before the native module is loaded, each once, in the table's order."""
    return tuple(dict.fromkeys(path.parent for path in library_paths(cuda, "windows", roots).values()))


def _library(entry: dict[str, Any]) -> Library:
    names = {"linux": "soname", "windows": "dll"}
    files = {system: PurePosixPath(entry[system]["dir"], entry[system][name]) for system, name in names.items()}
    return Library(entry["name"], entry["provider"], entry["needed"], files)


def _cuda(major: str, entry: dict[str, Any]) -> Cuda:
    read = {
        "major": int(major),
        "driver_cuda": tuple(entry["driver_cuda"]),
        "capability": tuple(entry["capability"]),
        "requires": {name: Bounds(**bounds) for name, bounds in entry["requires"].items()},
        "preload": tuple(Preload(each["provider"], PurePosixPath(each["directory"]), tuple(each["files"])) for each in entry["preload"]),
        "libraries": tuple(map(_library, entry["libraries"])),
    }
    return Cuda(**entry | read)


@cache
def load() -> Table:
    """Read the table that came with the package."""
    data = json.loads(pkgutil.get_data("mlx_cuda", "_libraries.json") or "")  # out of a zip file too
    cuda = {int(major): _cuda(major, entry) for major, entry in data.items() if major.isdecimal()}
    return Table(data["mlx"], data["glibc"], cuda)
