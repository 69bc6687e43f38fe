"""The wheels of one release: every declared build for every declared platform, and nothing else."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import Matrix, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANIFEST = "release.json"
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


def complete(folder: Path, *, tag: str | None = None, matrix: Matrix | None = None) -> Dist:
    """The release in `folder`, or CheckFailed with all that is missing, superfluous or misnamed. `tag` is the version's, such as v1.2."""
    matrix = matrix or load()
    if not folder.is_dir():
        raise EnvironmentProblem(f"{folder} is no folder", cure="give the folder that holds all wheels of the release")
    found, problems = _read(folder, matrix)
    versions = {version for version, _ in found}
    problems += _missing([entry for _, entry in found], matrix)
    problems += [f"there are {len(versions)} versions: {', '.join(map(str, sorted(versions)))}, expected one"] if len(versions) > 1 else []
    problems += [problem for version in sorted(versions) for problem in _unfit(version, tag, matrix)]
    if problems:
        raise CheckFailed("\n  ".join([f"{folder} is not a complete release:", *problems]))
    order = _order(matrix)
    return Dist(folder, versions.pop(), tuple(sorted((entry for _, entry in found), key=lambda entry: order[entry.platform, entry.build])))


def _order(matrix: Matrix) -> dict[tuple[str, str], int]:
    """When each wheel goes: the reverse of the data file, so that the most used one, declared first, is the last."""
    pairs = [(platform, build.abi) for platform in matrix.platforms for build in matrix.builds]
    return {pair: -position for position, pair in enumerate(pairs)}


def _read(folder: Path, matrix: Matrix) -> tuple[list[tuple[Version, Entry]], list[str]]:
    found: list[tuple[Version, Entry]] = []
    problems: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST or path.name.endswith(ATTESTATION) or path.name.startswith("."):  # such as half a manifest
            continue
        if path.suffix != ".whl":
            sdist = path.name.endswith((".tar.gz", ".zip"))
            problems.append(
                f"{path.name}: is no wheel{', and no sdist is published: pip would try to build it where a wheel does not fit' * sdist}"
            )
            continue
        try:
            found.append(_entry(path, matrix))
        except (InvalidWheelFilename, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    return found, problems


def _entry(path: Path, matrix: Matrix) -> tuple[Version, Entry]:
    project, version, number, tags = parse_wheel_filename(path.name)
    if project != canonicalize_name(matrix.name):
        raise ValueError(f"is of the project {project}, expected {matrix.name}")
    if number:
        raise ValueError("has a build number, expected none: each release has a version of its own")
    tagged = {tag.platform for tag in tags}
    platform = next((each.name for each in matrix.platforms.values() if each.tag in tagged), None)
    if platform is None:
        declared = ", ".join(each.tag for each in matrix.platforms.values())
        raise ValueError(f"is tagged {', '.join(sorted(tagged))}, expected one of {declared}")
    abis = {f"{tag.interpreter}-{tag.abi}" for tag in tags}
    build = next((each.abi for each in matrix.builds if {each.abi} == abis), None)
    if build is None:
        raise ValueError(f"is tagged {', '.join(sorted(abis))}, expected {' or '.join(each.abi for each in matrix.builds)}")
    return version, Entry(path.name, platform, build, path.stat().st_size, sha256(path))


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _missing(entries: list[Entry], matrix: Matrix) -> Iterator[str]:
    held = Counter((entry.platform, entry.build) for entry in entries)
    for platform in matrix.platforms:
        for build in matrix.builds:
            count = held[platform, build.abi]
            if count != 1:
                yield f"{platform} has {count or 'no'} wheel{'s' * (count > 1)} of {build.abi}, expected one"


def _unfit(version: Version, tag: str | None, matrix: Matrix) -> Iterator[str]:
    if version.local:
        yield f"{version} is a local version, which no index takes"
    if version.is_devrelease:
        yield f"{version} is a development version, expected one to release"
    if version.release[:-1] != Version(matrix.mlx).release:
        yield f"{version} is not {matrix.mlx}.<n>, the version of the MLX that it was built for"
    if tag is not None and not _same(tag, version):
        yield f"the wheels have the version {version}, but the tag is {tag}, expected v{version}"


def _same(tag: str, version: Version) -> bool:
    try:
        return tag.startswith("v") and Version(tag[1:]) == version
    except InvalidVersion:
        return False
