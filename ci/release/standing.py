"""The reasons on an index not to publish a release, and how findings are reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from packaging.version import Version

from ..audit import Violation
from ..errors import CheckFailed
from ..index import Index, Remote
from ..matrix import REPOSITORY, load
from .version import tagged


def finding(check: str, message: str, fix: str) -> Violation:
    """One that is of no wheel."""
    return Violation("", "", check, message, fix)


def unwelcome(version: Version, index: Index) -> Iterator[Violation]:
    """Why this index does not get a version of that kind."""
    if version.is_devrelease and not index.rehearsals:
        message = f"{version} is a development version, {index.name} gets releases and candidates"
        yield finding("version", message, "--index testpypi, or a version of its own: python -m ci release stamp VERSION")


def against(version: Version, index: Index, files: Sequence[Remote], *, tags: Collection[Version] | None = None) -> Iterator[Violation]:
    """Why this version may not go where these files are. `tags` are the versions that were tagged here, by default those that git knows."""
    yield from unwelcome(version, index)
    # Rehearsals leave versions behind that were never tagged, and that are no obstacle.
    counted = {each.version for each in files if each.version and not (index.rehearsals and each.version.is_prerelease)}
    versions = sorted(counted - {version})
    # The name is ours if it is free, or if every version under it is one that was tagged in this repository.
    foreign = versions and sorted({*versions} - {*(tagged(REPOSITORY) if tags is None else tags), *map(Version, load().inherited)})
    if foreign:
        shown = f"{'…, ' * (len(foreign) > 3)}{', '.join(map(str, foreign[-3:]))}"
        message = f"{load().name} on {index.name} is not ours: it has versions that were never tagged here ({len(foreign)}: {shown})"
        fix = "another name, or this one from its owner: docs/factory/releasing.md; in a clone without tags: git fetch --tags"
        yield finding("owner", message, fix)
    offered = {each.version for each in files if not each.yanked}  # installers pass over what is yanked
    if (newest := max((each for each in versions if each in offered), default=version)) > version:
        message = f"{version} does not sort above {newest}, which is on {index.name}: installers would not choose it"
        yield finding("version", message, f"a version after {newest}")


def report(findings: Sequence[Violation]) -> None:
    """CheckFailed with every finding, if there are any."""
    if findings:
        raise CheckFailed("\n  ".join(["this release cannot be published:", *map(str, findings)]))


def refuse_yanked(version: Version, files: Sequence[Remote]) -> None:
    """CheckFailed where files of a version were withdrawn: it may be there, byte-identical, but installers skip it."""
    if names := sorted(each.name for each in files if each.version == version and each.yanked):
        fix = "find out why they were yanked; un-yank them on the index, or release a new version"
        raise CheckFailed(f"version {version} was yanked, so installers skip it: {', '.join(names)}\n  fix: {fix}")
