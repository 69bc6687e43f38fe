"""The version: its form, its places in a checkout, and how to change it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from .. import process
from ..errors import CheckFailed, EnvironmentProblem
from ..files import tomllib, whole
from ..matrix import load

PROJECT = Path("pyproject.toml")
PACKAGE = Path("python", load().module, "_version.py")


def unfit(version: Version) -> Iterator[str]:
    """Why this is no version of mlx-cuda: `<mlx>.<n>`, as a candidate or a development version too."""
    if version.local:
        yield f"{version} is a local version, which no index takes"
    if not load().mlx:
        return
    mlx = Version(load().mlx)
    *base, number = version.release
    if version.epoch or version.post != mlx.post or tuple(base) != mlx.release or not number:
        yield f"{version} is not {load().mlx}.<n>, the version of the MLX that it was built for and a number from 1 on"


def stated(root: Path) -> dict[Path, str]:
    """The version in each file; empty if it has none."""
    project = tomllib.loads((root / PROJECT).read_text("utf-8"))["project"]
    package = re.search(r'^__version__ = "([^"]*)"$', (root / PACKAGE).read_text("utf-8"), re.MULTILINE)
    return {PROJECT: str(project.get("version", "")), PACKAGE: package[1] if package else ""}


def current(root: Path) -> Version:
    """The version of a checkout; CheckFailed if its files do not agree on a valid one."""
    said = stated(root)
    problems = [f"{path.as_posix()} says {text or 'nothing'}" for path, text in said.items()] if len({*said.values()}) > 1 else []
    try:
        problems += unfit(version := Version(said[PROJECT]))
    except InvalidVersion as error:
        problems.append(str(error))
    if problems:
        raise CheckFailed(f"this checkout has no version to release: {'; '.join(problems)}\n  fix: python -m ci release stamp VERSION")
    return version


def development(root: Path) -> Version:
    """A version between releases: of the next one, before all else, ordered by the commits' times.

    The same commit always gives the same: a tag that was made from it, or later, does not count.
    """
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        raise EnvironmentProblem("this clone is shallow: it may lack tags", fix="git fetch --unshallow --tags (in CI: fetch-depth: 0)")
    *base, number = current(root).release
    while _git(root, "tag", "--list", f"v{'.'.join(map(str, base))}.{number}", "--no-contains", "HEAD"):
        number += 1
    time = datetime.fromtimestamp(int(_git(root, "show", "--no-patch", "--format=%ct", "HEAD")), timezone.utc)
    return Version(f"{'.'.join(map(str, base))}.{number}.dev{time:%Y%m%d%H%M}")


def stamp(root: Path, version: Version) -> None:
    """Write the version wherever it stands; nothing is written where it does not fit."""
    if problems := [*unfit(version)]:
        raise CheckFailed("; ".join(problems))
    before = stated(root)
    texts = {}
    for path, line in {PROJECT: 'version = "{}"', PACKAGE: '__version__ = "{}"'}.items():
        old, lines = line.format(before[path]), (root / path).read_text("utf-8").split("\n")
        if lines.count(old) != 1:
            place = path.as_posix()
            raise CheckFailed(f"{place} does not say its version in one line {line.format('…')}\n  fix: git restore {place}")
        texts[root / path] = "\n".join(line.format(version) if each == old else each for each in lines)
    for path, text in texts.items():
        with whole(path, fix="git restore . puts back what was there") as part:
            part.write_bytes(text.encode())


def tagged(root: Path) -> set[Version]:
    """The versions that were tagged in this repository."""
    lines = _git(root, "tag", "--list", "v*").split()
    return {Version(line) for line in lines if re.fullmatch(VERSION_PATTERN, line, re.VERBOSE | re.IGNORECASE)}


def _git(root: Path, *arguments: str) -> str:
    return process.git(*arguments, cwd=root, fix="run from a clone of the repository, with its tags").strip()
