"""The locked provider wheels, as ``python -m ci toolkit install`` unpacked them: which file is where, and from which package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from ..errors import EnvironmentProblem
from ..matrix import Platform
from ..wheelfile.binary import BinaryError, elf


@dataclass(frozen=True)
class Supplied:
    """A file of a locked package."""

    path: Path
    package: str
    version: str


@cache  # looking whether a root is whole asks for the size of each of its files
def site(root: str, platform: Platform) -> Path:
    """The site-packages folder of a toolkit root; an EnvironmentProblem with its fix where the root is not installed."""
    from ..toolkit import root_path

    return root_path(root, platform) / "site"


def supplied(sites: tuple[Path, ...], relative: str) -> Supplied | None:
    """The locked package that installs `relative` (a path below site-packages), if its file is there."""
    for folder in sites:
        if (folder / relative).is_file() and (owner := _owners(folder).get(relative)):
            return Supplied(folder / relative, canonicalize_name(owner.metadata["Name"]), owner.version)
    return None


@cache
def _owners(folder: Path) -> dict[str, Distribution]:
    return {file.as_posix(): each for each in distributions(path=[str(folder)]) for file in each.files or ()}


@cache
def exports(path: Path) -> dict[str, bool]:
    """The symbols that a shared library of a locked package exports, and whether each has a version."""
    try:
        with path.open("rb") as stream:
            return elf.exports(stream)
    except (BinaryError, ValueError) as error:  # this one of an empty file
        fix = "python -m ci toolkit verify, which says what to remove, then python -m ci toolkit install"
        raise EnvironmentProblem(f"cannot read {path}: {error}", fix=fix) from error
