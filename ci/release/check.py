"""``release check``: what has to hold before the first byte of a release leaves.

The first part looks at the wheels alone. The second, with ``--index``, asks what is on the index already: whether the name is ours, whether
the version may be published there, whether there is room for it, and whether what the wheels require can be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import REPOSITORY, Matrix, load

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ..audit.wheel import Wheel
    from .dist import Dist
    from .index import Index, Remote

# Checks of the audit by their ids. The first read toolkit roots of every platform; the second read the archive alone, at once.
ROOT_CHECKS = ("provider", "unversioned-libc")
QUICK_CHECKS = ("record", "size", "tags", "licence")


@dataclass(frozen=True)
class Finding:
    check: str
    file: str  # "" for the release as a whole
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.check, self.message)))


@dataclass(frozen=True)
class Forecast:
    """The project's size on the index once this release is there."""

    there: int
    added: int  # by what is not there yet
    release: int
    limit: int

    @property
    def total(self) -> int:
        return self.there + self.added

    @property
    def further(self) -> int:
        """How many more releases of this size there is room for."""
        return max(0, self.limit - self.total) // max(1, self.release)


def wheels(dist: Dist, *, checks: Collection[str] | None = None) -> Iterator[Finding]:
    """What is wrong with the wheels themselves. `checks` are those of the audit to run, None being all."""
    yield from _twine(dist)
    yield from _archives(dist, checks)


def quick(dist: Dist) -> Iterator[Finding]:
    """What is looked at once more before publishing, which costs nothing. The rest was proved by `wheels`."""
    yield from _archives(dist, QUICK_CHECKS)


def _archives(dist: Dist, checks: Collection[str] | None) -> Iterator[Finding]:
    from ..audit import audit_wheel
    from ..audit.checks import SAME_DEVICE, device
    from ..audit.wheel import read

    opened = [read(path) for path in dist.paths]
    yield from _metadata(opened)
    yield from (Finding(SAME_DEVICE, wheel.path.name, f"{member}: {message}") for wheel, member, message in device.same(opened))
    for wheel in opened:
        if wheel.sbom not in wheel.members:
            yield Finding("sbom", wheel.path.name, "has no SBOM, expected the one that python -m ci repair writes")
        for violation in audit_wheel(wheel.path, checks=checks):
            message = ": ".join(filter(None, (violation.member, violation.message)))
            yield Finding(f"audit {violation.check}", violation.wheel, message)


def without_toolkits() -> list[str]:
    """The checks of the audit that need nothing but the wheel."""
    from ..audit.checks import CHECKS

    return [identifier for identifier in CHECKS if identifier not in ROOT_CHECKS]


def _metadata(opened: Sequence[Wheel]) -> Iterator[Finding]:
    """METADATA is the same to the byte: a resolver reads that of one wheel and takes it for all."""
    from ..audit.checks import SAME_METADATA
    from ..audit.checks.metadata import same

    first, *others = opened
    expected = first.members.get(f"{first.dist_info}/METADATA")
    differing = [wheel for wheel in others if wheel.members.get(f"{wheel.dist_info}/METADATA") != expected]
    explained = {wheel.path.name: message for wheel, _, message in same(opened)}
    for wheel in differing:
        message = explained.get(wheel.path.name, f"METADATA is not the same to the byte as that of {first.path.name}")
        yield Finding(SAME_METADATA, wheel.path.name, message)


def _twine(dist: Dist) -> Iterator[Finding]:
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.paths)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "COLUMNS": "1000"})
    if done.returncode:
        yield Finding("twine", "", f"twine check --strict: {(done.stdout + done.stderr).strip()}")


def against(dist: Dist, index: Index, files: Sequence[Remote], *, tags: Collection[Version] | None = None) -> Iterator[Finding]:
    """What stands on the index against this release. `tags` are the versions that were tagged here, by default those that git knows."""
    matrix = load()
    others = [remote for remote in files if remote.version != dist.version]
    yield from _owner(index, others, matrix, tags)
    newer = sorted({remote.version for remote in others if remote.version is not None and remote.version > dist.version})
    if newer:
        yield Finding("version", "", f"{dist.version} does not sort above {newer[-1]}, which is on {index.name}: nobody would get it")
    room = forecast(dist, index, files)
    if room.total > room.limit:
        held = f"{_mib(room.there)} are on {index.name}, {_mib(room.total)} with this release, and the limit is {_mib(room.limit)}"
        yield Finding("project-size", "", f"{held}: ask the index for more, or delete old releases")


def _owner(index: Index, others: Sequence[Remote], matrix: Matrix, tags: Collection[Version] | None) -> Iterator[Finding]:
    """The name is ours if it is free, or if every version under it is one that was tagged in this repository."""
    versions = {remote.version for remote in others if remote.version is not None}
    if not versions:
        return
    known = {*(tagged() if tags is None else tags), *map(Version, matrix.release.inherited)}
    foreign = sorted(versions - known)
    if not foreign:
        return
    newest = next(remote for remote in others if remote.version == foreign[-1])
    shown = f"{'…, ' * (len(foreign) > 3)}{', '.join(map(str, foreign[-3:]))}"
    yield Finding(
        "owner",
        "",
        f"{matrix.name} on {index.name} is not ours: it has versions that were never tagged here ({len(foreign)}: {shown}); "
        f"{newest.name} says: {index.says(newest) or 'nothing of its origin'}. "
        "Choose another name or ask for this one: docs/releasing.md; in a checkout without tags: git fetch --tags",
    )


def tagged() -> set[Version]:
    """The versions that were tagged in this repository."""
    done = subprocess.run(["git", "tag", "--list", "v*"], cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblem(
            f"git cannot list the tags: {done.stderr.strip()}", cure="run from a clone of the repository, with its tags"
        )
    return {version for line in done.stdout.split() if (version := _parsed(line.removeprefix("v"))) is not None}


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def forecast(dist: Dist, index: Index, files: Sequence[Remote]) -> Forecast:
    there = {remote.name: index.size(remote) for remote in files}
    added = sum(entry.size for entry in dist.entries if entry.name not in there)
    return Forecast(sum(there.values()), added, dist.size, int(load().release.project_limit_gib * 2**30))


def dependencies(dist: Dist, say: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """What each extra requires can be had as wheels, on each platform, from the index that this machine's uv uses.

    A release whose sibling is not published yet cannot be installed by anybody, and no look at the wheels shows it.
    """
    from ..audit.wheel import read
    from ..toolkit import uv

    metadata = read(dist.paths[0]).metadata
    oldest = min((each.version for each in SpecifierSet(metadata.get("Requires-Python", "")) if each.operator == ">="), default="3.10")
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    for extra in metadata.get_all("Provides-Extra", []):
        wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
        lines = "".join(f"{each.name}{each.specifier}\n" for each in wanted)
        for platform in load().platforms.values() if wanted else ():
            say(f"resolving the extra {extra} for {platform.name}")
            command = [uv.executable(), "pip", "compile", "--quiet", "--no-build", "--python-version", oldest]
            command += ["--python", sys.executable, "--python-platform", platform.uv, "-"]
            with tempfile.TemporaryDirectory() as folder:  # away from this project's own settings of uv
                done = subprocess.run(command, cwd=folder, input=lines, check=False, capture_output=True, text=True)
            if done.returncode and "No solution found" not in done.stderr:
                raise uv.explain(done.stderr, done.returncode)
            if done.returncode:
                said = " ".join(done.stderr.split())
                yield Finding("dependencies", "", f"the extra {extra} cannot be installed on {platform.name}, CPython {oldest}: {said}")


def report(findings: Sequence[Finding]) -> None:
    """CheckFailed with every finding, if there are any."""
    if findings:
        raise CheckFailed("\n  ".join(["this release may not go out:", *map(str, findings)]))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def show(dist: Dist, room: Forecast | None, index: str | None) -> None:
    """The table of a release that may go out."""
    from rich.console import Console
    from rich.table import Table

    budget = load().size_budget_mib
    table = Table(title=f"{load().name} {dist.version}", title_justify="left", title_style="bold")
    for name in ("wheel, in the order of upload", "platform", "build", f"MiB of {budget}", "sha256"):
        table.add_column(name, justify="right" if name.startswith("MiB") else "left", overflow="fold")
    for entry in dist.entries:
        table.add_row(entry.name, entry.platform, entry.build, f"{entry.size / 2**20:.2f}", entry.sha256[:16])
    Console().print(table)
    if room:
        print(
            f"on {index}: {_mib(room.there)} now, {_mib(room.total)} with this release, {_mib(room.limit)} at most; "
            f"room for {room.further} more of its size"
        )
    print("nothing found: this release may go out")
