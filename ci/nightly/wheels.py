"""A wheel of the nightly channel, as its index describes it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..errors import CheckFailed
from ..files import sha256
from ..matrix import load
from ..release.dist import judged
from ..wheelfile.wheel import read

STAMP = "%Y%m%d%H%M"


@dataclass(frozen=True)
class Nightly:
    name: str
    version: Version
    platform: str
    size: int
    sha256: str
    metadata: bytes
    requires_python: str

    @property
    def metadata_sha256(self) -> str:
        return hashlib.sha256(self.metadata).hexdigest()

    @property
    def made(self) -> datetime:
        return stamp(self.version)


def stamp(version: Version) -> datetime:
    """When the version was made, which its last part says to the minute; ValueError where it does not."""
    number = str(version.dev)
    try:
        if len(number) == 12 and version.local is None:
            return datetime.strptime(number, STAMP).replace(tzinfo=timezone.utc)
    except ValueError:
        pass
    raise ValueError(f"has the version {version}, expected one such as {load().mlx}.1.dev202701312359")


def named(name: str) -> tuple[Version, str]:
    """The version and platform of a wheel of this channel by its name; ValueError says what else it is."""
    if not re.fullmatch(r"[\w.+-]+", name, re.ASCII):
        raise ValueError("has characters that no wheel of this project has in its name")
    version, platform, _ = judged(name)
    stamp(version)
    return version, platform


def examine(path: Path) -> Nightly:
    """Describe a wheel; CheckFailed where it is none of this channel, or is not what its name says."""
    try:
        version, platform = named(path.name)
    except ValueError as error:
        raise CheckFailed(f"{path.name}: {error}\n  fix: give wheels that were stamped by `python -m ci release stamp dev`") from error
    wheel = read(path)
    said = f"{wheel.metadata['Name']} {wheel.metadata['Version']}"
    try:
        same = canonicalize_name(str(wheel.metadata["Name"])) == load().name and Version(str(wheel.metadata["Version"])) == version
    except InvalidVersion:
        same = False
    if not same:
        raise CheckFailed(f"{path.name}: METADATA names {said}\n  fix: build it again, and never rename a wheel")
    metadata = wheel.members[f"{wheel.dist_info}/METADATA"]
    requires_python = str(wheel.metadata["Requires-Python"] or "")
    return Nightly(path.name, version, platform, path.stat().st_size, sha256(path), metadata, requires_python)
