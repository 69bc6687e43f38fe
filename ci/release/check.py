"""``release check``: what has to hold before the first byte of a release leaves.

The first part looks at the wheels alone. The second, with ``--index``, asks what is on the index already: whether the name is ours, whether
the version may be published there, and whether what the wheels require can be had.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import VERSION_PATTERN, Version

from .. import console
from ..audit import Violation, audit_wheel, disagreements
from ..audit.checks import CHECKS, SAME_METADATA
from ..audit.wheel import read
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import REPOSITORY, load
from ..toolkit import uv

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ..matrix import Platform
    from .dist import Dist
    from .index import Index, Remote

# Checks of the audit by their ids. The first read toolkit roots of every platform; the second read the archive alone, at once.
ROOT_CHECKS = ("provider", "unversioned-libc")
QUICK_CHECKS = ("record", "size", "tags", "licence")
WITHOUT_TOOLKITS = tuple(identifier for identifier in CHECKS if identifier not in ROOT_CHECKS)


def wheels(dist: Dist, *, checks: Collection[str] | None = None) -> Iterator[Violation]:
    """What is wrong with the wheels, by the audit: by these checks of it, None being all, and by those across wheels."""
    opened = [read(path) for path in dist.paths]
    yield from disagreements(opened)
    # A resolver reads the METADATA of one wheel and takes it for all.
    if len({wheel.members.get(f"{wheel.dist_info}/METADATA") for wheel in opened}) > 1:
        yield Violation("", "", SAME_METADATA, "METADATA is not the same to the byte in all wheels")
    for wheel in opened:
        if wheel.sbom not in wheel.members:
            yield Violation(wheel.path.name, wheel.sbom, "sbom", "is missing, expected the one that python -m ci repair writes")
        yield from audit_wheel(wheel.path, checks=checks)


def twine(dist: Dist) -> Iterator[Violation]:
    """What the index would refuse, as far as twine knows."""
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.paths)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "COLUMNS": "1000"})
    if done.returncode:
        yield Violation("", "", "twine", f"twine check --strict: {(done.stdout + done.stderr).strip()}")


def against(dist: Dist, index: Index, files: Sequence[Remote], *, tags: Collection[Version] | None = None) -> Iterator[Violation]:
    """What stands on the index against this release. `tags` are the versions that were tagged here, by default those that git knows."""
    versions = sorted({remote.version for remote in files if remote.version and remote.version != dist.version})
    # The name is ours if it is free, or if every version under it is one that was tagged in this repository.
    foreign = versions and sorted({*versions} - {*(tagged() if tags is None else tags), *map(Version, load().inherited)})
    if foreign:
        shown = f"{'…, ' * (len(foreign) > 3)}{', '.join(map(str, foreign[-3:]))}"
        yield Violation(
            "",
            "",
            "owner",
            f"{load().name} on {index.name} is not ours: it has versions that were never tagged here ({len(foreign)}: {shown}). "
            "Choose another name or ask for this one: docs/releasing.md; in a checkout without tags: git fetch --tags",
        )
    if versions and versions[-1] > dist.version:
        message = f"{dist.version} does not sort above {versions[-1]}, which is on {index.name}: nobody would get it"
        yield Violation("", "", "version", message)


def tagged() -> set[Version]:
    """The versions that were tagged in this repository."""
    done = subprocess.run(["git", "tag", "--list", "v*"], cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblem(
            f"git cannot list the tags: {done.stderr.strip()}", cure="run from a clone of the repository, with its tags"
        )
    return {Version(line) for line in done.stdout.split() if re.fullmatch(VERSION_PATTERN, line, re.VERBOSE | re.IGNORECASE)}


def dependencies(dist: Dist) -> Iterator[Violation]:
    """What each extra requires can be had as wheels, on each platform, from the index that this machine's uv uses.

    A release whose sibling is not published yet cannot be installed by anybody, and no look at the wheels shows it.
    """
    metadata = read(dist.paths[0]).metadata
    oldest = oldest_python(metadata)
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    for extra in metadata.get_all("Provides-Extra", []):
        wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
        lines = "".join(f"{each.name}{each.specifier}\n" for each in wanted)
        for platform in load().platforms.values() if wanted else ():
            console.say(f"resolving the extra {extra} for {platform.name}")
            try:
                with tempfile.TemporaryDirectory() as folder:  # away from this project's own settings of uv
                    resolve(platform, Path(folder), "--python-version", oldest, "--python", sys.executable, "-", lines=lines)
            except CheckFailed as error:
                said = " ".join(str(error).split())
                message = f"the extra {extra} cannot be installed on {platform.name}, CPython {oldest}: {said}"
                yield Violation("", "", "dependencies", message)


def oldest_python(metadata: Message) -> str:
    return min((each.version for each in SpecifierSet(metadata.get("Requires-Python", "")) if each.operator == ">="), default="3.10")


def resolve(platform: Platform, folder: Path, *arguments: str, lines: str | None = None) -> str:
    """What uv resolves for a platform; CheckFailed where there is no solution."""
    command = [uv.executable(), "pip", "compile", "--quiet", "--no-build", "--python-platform", platform.uv, *arguments]
    done = subprocess.run(command, cwd=folder, input=lines, check=False, capture_output=True, text=True)
    if done.returncode and "No solution found" not in done.stderr:
        raise uv.explain(done.stderr, done.returncode)
    if done.returncode:
        raise CheckFailed(done.stderr.strip())
    return done.stdout


def report(findings: Sequence[Violation]) -> None:
    """CheckFailed with every finding, if there are any."""
    if findings:
        raise CheckFailed("\n  ".join(["this release may not go out:", *map(str, findings)]))


def show(dist: Dist) -> None:
    """The table of a release that may go out."""
    table = console.table(title=f"{load().name} {dist.version}")
    for name in ("wheel, in the order of upload", "platform", "build", f"MiB of {load().size_budget_mib}", "sha256"):
        table.add_column(name, justify="right" if name.startswith("MiB") else "left", overflow="fold")
    for entry in dist.entries:
        table.add_row(entry.name, entry.platform, entry.build, f"{entry.size / 2**20:.2f}", entry.sha256[:16])
    console.show(table)
    print("nothing found: this release may go out")
