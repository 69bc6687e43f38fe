"""The declared roots, their directories, and whether one is complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci import matrix
from ci.errors import EnvironmentProblem
from ci.files import tomllib, user_cache

from . import manifest

TOOLKITS = Path(__file__).parent / "locks"

# Part of a root's folder name: raise a system's when layout.py or manifest.py changes what its roots hold.
LAYOUT_VERSION: dict[matrix.System, int] = {"linux": 1, "windows": 2}

PREBUILT = "MLX_CUDA_DEVICE_CODE"  # a folder of finished device code, which a build takes: then it needs no root of compilers of it


@dataclass(frozen=True)
class Root:
    """One entry of ``toolkits.toml``."""

    name: str
    about: str
    packages: tuple[str, ...]
    platforms: tuple[str, ...]
    unpacked_bytes: int

    @property
    def lock_file(self) -> Path:
        return TOOLKITS / f"{self.name}.txt"


@cache
def declared() -> dict[str, Root]:
    """Read ``ci/toolkit/locks/toolkits.toml``."""
    return parse((TOOLKITS / "toolkits.toml").read_text("utf-8"))


def parse(text: str) -> dict[str, Root]:
    data = tomllib.loads(text)
    return {
        name: Root(
            name=name,
            about=table["about"],
            packages=tuple(table["packages"]),
            platforms=tuple(table.get("platforms", matrix.load().platforms)),
            unpacked_bytes=table["unpacked_mib"] << 20,
        )
        for name, table in data["roots"].items()
    }


def find(name: str) -> Root:
    if name not in declared():
        raise EnvironmentProblem(f"unknown root {name!r}", fix=f"use one of {', '.join(declared())}")
    return declared()[name]


def lock_text(root: Root) -> str:
    if not root.lock_file.is_file():
        raise EnvironmentProblem(f"{root.name} is not locked: {root.lock_file} is missing", fix=f"python -m ci toolkit lock {root.name}")
    return root.lock_file.read_text("utf-8")


def cache_directory() -> Path:
    """The directory of all roots: ``MLX_CUDA_TOOLKITS``, or the user's cache directory."""
    chosen = os.environ.get("MLX_CUDA_TOOLKITS")
    if chosen:
        return Path(chosen).absolute()
    if (cache := user_cache(matrix.load().name)) is None:
        raise EnvironmentProblem("there is no home directory to install toolkits into", fix="set MLX_CUDA_TOOLKITS to a folder")
    return cache / "toolkits"


def directory(name: str, platform: matrix.Platform) -> Path:
    """The folder of a root, installed or not. A changed lock gives another folder, so a root is never changed in place."""
    digest = hashlib.sha256(f"{lock_text(find(name))}layout {LAYOUT_VERSION[platform.system]}\n".encode()).hexdigest()
    return cache_directory() / f"{name}-{platform.name}-{digest[:12]}"


def installed(name: str, platform: matrix.Platform) -> tuple[Path, dict[str, manifest.Entry]]:
    """The folder of an installed root and what it holds: its manifest is there, and every file it lists, with the right size."""
    path = directory(name, platform)
    fix = f"python -m ci toolkit install {name} --platform {platform.name}"
    files = manifest.read(path)
    if files is None:
        raise EnvironmentProblem(f"{name} for {platform.name} is not installed ({path})", fix=fix)
    if lacking := manifest.lacking(path, files):
        raise EnvironmentProblem(f"{path} is incomplete: {len(lacking)} files missing or truncated, the first is {lacking[0]}", fix=fix)
    return path, files


def needed(versions: Iterable[str], platform: matrix.Platform, *, compilers: bool = True) -> dict[str, matrix.Platform]:
    """The roots that a build of these CUDA versions for a platform needs, each with the platform that it is installed for.

    The compilers of device code run on this machine, and what they make is for all; a build that is given finished code needs none.
    """
    extras = [*(matrix.load().cuda[version] for version in versions), matrix.load().cpu]
    found = {root: platform for extra in extras for root in extra.roots}
    if compilers and (root := matrix.load().device.root) and not os.environ.get(PREBUILT):
        found[root] = matrix.host_platform()
    return found


def root_path(name: str, platform: matrix.Platform) -> Path:
    """The folder of an installed root; an :class:`EnvironmentProblem`, which says how to install it, if it is not complete."""
    return installed(name, platform)[0]
