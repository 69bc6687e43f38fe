"""What is left to upload, decided from the bytes that an index has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .dist import Dist, Entry
    from .index import Remote


@dataclass(frozen=True)
class Plan:
    present: tuple[Entry, ...]  # on the index, the same to the byte
    missing: tuple[Entry, ...]  # in the order in which they go


def make(dist: Dist, files: Sequence[Remote]) -> Plan:
    """CheckFailed where the index has other bytes under a name of this release, or files of its version that are not part of it."""
    there = {remote.name: remote for remote in files}
    ours = {entry.name: entry for entry in dist.entries}
    problems = [
        f"{name}: the index has other bytes, sha256 {there[name].sha256}, expected {entry.sha256}"
        for name, entry in ours.items()
        if name in there and there[name].sha256 != entry.sha256
    ]
    problems += [
        f"{remote.name}: is on the index under {dist.version}, but no file of this release"
        for remote in files
        if remote.version == dist.version and remote.name not in ours
    ]
    if problems:
        cure = "an index never takes other bytes under a name that was used: find out whose files these are, and release a new version"
        raise CheckFailed("\n  ".join([f"version {dist.version} is on the index already, and differs:", *problems, f"cure: {cure}"]))
    return Plan(
        tuple(entry for entry in dist.entries if entry.name in there),
        tuple(entry for entry in dist.entries if entry.name not in there),
    )
