"""What stands on an index against a release, what of it is still to be uploaded, and how findings are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from ..audit import Violation
from ..errors import CheckFailed
from ..matrix import REPOSITORY, load
from .version import tagged

if TYPE_CHECKING:
    from ..index import Index, Remote
    from .dist import Dist, Entry


def finding(check: str, message: str, cure: str) -> Violation:
    """One that is of no wheel."""
    return Violation("", "", check, message, cure)


def unwelcome(version: Version, index: Index) -> Iterator[Violation]:
    """Why this index does not get a version of that kind."""
    if version.is_devrelease and not index.rehearsals:
        message = f"{version} is a development version, {index.name} gets releases and candidates"
        yield finding("version", message, "--index testpypi, or a version of its own: python -m ci release stamp VERSION")


def against(version: Version, index: Index, files: Sequence[Remote], *, tags: Collection[Version] | None = None) -> Iterator[Violation]:
    """Why this version may not go where these files are. `tags` are the versions that were tagged here, by default those that git knows."""
    yield from unwelcome(version, index)
    # Rehearsals leave versions behind that were never tagged, and that stand in nobody's way.
    counted = {each.version for each in files if each.version and not (index.rehearsals and each.version.is_prerelease)}
    versions = sorted(counted - {version})
    # The name is ours if it is free, or if every version under it is one that was tagged in this repository.
    foreign = versions and sorted({*versions} - {*(tagged(REPOSITORY) if tags is None else tags), *map(Version, load().inherited)})
    if foreign:
        shown = f"{'…, ' * (len(foreign) > 3)}{', '.join(map(str, foreign[-3:]))}"
        message = f"{load().name} on {index.name} is not ours: it has versions that were never tagged here ({len(foreign)}: {shown})"
        cure = "another name, or this one from its owner: docs/releasing.md; in a clone without tags: git fetch --tags"
        yield finding("owner", message, cure)
    offered = {each.version for each in files if not each.yanked}  # installers pass over what is yanked
    if (newest := max((each for each in versions if each in offered), default=version)) > version:
        message = f"{version} does not sort above {newest}, which is on {index.name}: nobody would get it"
        yield finding("version", message, f"a version after {newest}")


def report(findings: Sequence[Violation]) -> None:
    """CheckFailed with every finding, if there are any."""
    if findings:
        raise CheckFailed("\n  ".join(["this release may not go out:", *map(str, findings)]))


@dataclass(frozen=True)
class Plan:
    """What an upload has to do, decided from the bytes that the index has."""

    present: tuple[Entry, ...]  # on the index, the same to the byte
    missing: tuple[Entry, ...]  # in the order in which they go


def plan(dist: Dist, files: Sequence[Remote]) -> Plan:
    """CheckFailed where the index has other bytes under a name of this release, and foreign or yanked files of its version."""
    there = {remote.name: remote for remote in files}
    problems = [
        f"{entry.name}: the index has other bytes, sha256 {there[entry.name].sha256}, expected {entry.sha256}"
        for entry in dist.entries
        if entry.name in there and there[entry.name].sha256 != entry.sha256
    ]
    foreign = {remote.name for remote in files if remote.version == dist.version} - {entry.name for entry in dist.entries}
    problems += [f"{name}: is on the index under {dist.version}, but no file of this release" for name in sorted(foreign)]
    if problems:
        cure = "an index never takes other bytes under a name that was used: find out whose files these are, and release a new version"
        raise CheckFailed("\n  ".join([f"version {dist.version} is on the index already, and differs:", *problems, f"cure: {cure}"]))
    refuse_yanked(dist.version, files)
    present, missing = (tuple(entry for entry in dist.entries if (entry.name in there) is wanted) for wanted in (True, False))
    return Plan(present, missing)


def refuse_yanked(version: Version, files: Sequence[Remote]) -> None:
    """CheckFailed where files of a version were withdrawn: it may be there to the byte, and nobody gets it."""
    if names := sorted(each.name for each in files if each.version == version and each.yanked):
        cure = "find out why they were yanked; un-yank them on the index, or release a new version"
        raise CheckFailed(f"version {version} was yanked, installers pass it over: {', '.join(names)}\n  cure: {cure}")
