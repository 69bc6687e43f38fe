"""The wheels of one release: every declared build for every declared platform, and nothing else.

The manifest says which bytes they are and in which order they go. It is on disk before the first of them is sent.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256, whole
from ..matrix import load
from .version import unfit

MANIFEST = "release.json"
FORMAT = 1  # of the manifest
ATTESTATION = ".publish.attestation"  # what twine looks for beside a wheel


@dataclass(frozen=True)
class Entry:
    """One wheel of a release, as the manifest has it: what it is for, and which bytes it is."""

    name: str
    platform: str
    build: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Dist:
    """A complete release in a folder, its wheels in the order in which they are uploaded."""

    folder: Path
    version: Version
    entries: tuple[Entry, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / entry.name for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def complete(folder: Path, *, expected: Version | None = None) -> Dist:
    """The release in `folder`, or CheckFailed with all that is missing, superfluous, misnamed or of another version."""
    if not folder.is_dir():
        raise EnvironmentProblem(f"{folder} is not a directory", fix="give the folder that holds all wheels of the release")
    found: list[tuple[Version, Entry]] = []
    problems = []
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST or path.name.endswith(ATTESTATION) or path.name.startswith("."):  # such as half a manifest
            continue
        try:
            found.append(_entry(path))
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
    # The most used wheel, declared first, goes last.
    order = [(platform, build.abi) for platform in load().platforms for build in load().builds][::-1]
    held = Counter((entry.platform, entry.build) for _, entry in found)
    for platform, abi in order:
        if (count := held[platform, abi]) != 1:
            problems.append(f"{platform} has {count or 'no'} wheel{'s' * (count > 1)} of {abi}, expected one")
    versions = sorted({version for version, _ in found})
    if len(versions) > 1:
        problems.append(f"there are {len(versions)} versions: {', '.join(map(str, versions))}, expected one")
    for version in versions:
        problems += unfit(version)
        if expected not in {None, version}:
            problems.append(f"the wheels have the version {version}, expected {expected}, which this checkout states")
    if problems:
        raise CheckFailed("\n  ".join([f"{folder} is not a complete release:", *problems]))
    entries = sorted((entry for _, entry in found), key=lambda entry: order.index((entry.platform, entry.build)))
    return Dist(folder, versions[0], tuple(entries))


def _entry(path: Path) -> tuple[Version, Entry]:
    """A wheel of this project; ValueError says what else the file is."""
    version, platform, build = judged(path.name)
    return version, Entry(path.name, platform, build, path.stat().st_size, sha256(path))


def judged(name: str) -> tuple[Version, str, str]:
    """The version, platform and build of a wheel of this project by its name; ValueError says what else it is."""
    if not name.endswith(".whl"):
        sdist = name.endswith((".tar.gz", ".zip"))
        raise ValueError("is no wheel" + ", and no sdist is published: pip would try to build it where a wheel does not fit" * sdist)
    project, version, number, tags = parse_wheel_filename(name)
    if project != canonicalize_name(load().name):
        raise ValueError(f"is of the project {project}, expected {load().name}")
    if number:
        raise ValueError("has a build number, expected none: each release has a version of its own")
    declared = {each.tag: each.name for each in load().platforms.values()}
    tagged = {tag.platform for tag in tags}
    platform = next((name for tag, name in declared.items() if tag in tagged), None)
    if platform is None:
        raise ValueError(f"is tagged {', '.join(sorted(tagged))}, expected one of {', '.join(declared)}")
    abis = {f"{tag.interpreter}-{tag.abi}" for tag in tags}
    build = next((each.abi for each in load().builds if {each.abi} == abis), None)
    if build is None:
        raise ValueError(f"is tagged {', '.join(sorted(abis))}, expected {' or '.join(each.abi for each in load().builds)}")
    return version, platform, build


def read_manifest(path: Path) -> tuple[Version, tuple[Entry, ...]]:
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise EnvironmentProblem(f"{path} has format {data['format']}, expected {FORMAT}", fix="use the version that wrote it")
        return Version(data["version"]), tuple(Entry(**entry) for entry in data["files"])
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", fix="check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(f"{path} is not a manifest of a release: {error}", fix="take it from the run that wrote it") from error


def settle(dist: Dist, path: Path) -> None:
    """Write the manifest, or hold the wheels to the one that is there: a release that was begun is finished with the same bytes."""
    if path.exists():
        agree(dist, path)
        return
    data = {"format": FORMAT, "version": str(dist.version), "files": [asdict(entry) for entry in dist.entries]}
    with whole(path, fix="free space, or give --manifest") as part:
        part.write_bytes(f"{json.dumps(data, indent=2)}\n".encode())


def agree(dist: Dist, path: Path, digest: str | None = None) -> None:
    """CheckFailed unless the wheels are those of the manifest, and that has the SHA-256, if one is given."""
    version, entries = read_manifest(path)
    if digest not in (None, found := sha256(path)):
        raise CheckFailed(f"{path} has the sha256 {found}, expected {digest or 'one'}\n  fix: give the manifest that check wrote")
    theirs, ours = ({entry.name: entry.sha256 for entry in each} for each in (entries, dist.entries))
    changed = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if version != dist.version or changed:
        raise CheckFailed(
            f"the wheels are not those of {path}, the manifest of version {version}: {', '.join(changed)}\n"
            "  fix: take the very wheels that it was written for (builds of another day may differ), or release them as a new version"
        )
