"""The manifest: which bytes a release consists of, in which order they go, on disk before the first of them is sent."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from packaging.version import Version

from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from .dist import Dist, Entry

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1


def read(path: Path) -> tuple[Version, tuple[Entry, ...]]:
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise EnvironmentProblem(f"{path} has format {data['format']}, expected {FORMAT}", cure="use the version that wrote it")
        return Version(data["version"]), tuple(Entry(**entry) for entry in data["files"])
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", cure="check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(f"{path} is not a manifest of a release: {error}", cure="take it from the run that wrote it") from error


def settle(dist: Dist, path: Path) -> None:
    """Write the manifest, or hold the wheels to the one that is there: a release that was begun is finished with the same bytes."""
    if path.exists():
        agree(dist, path)
        return
    data = {"format": FORMAT, "version": str(dist.version), "files": [asdict(entry) for entry in dist.entries]}
    with whole(path, cure="free space, or give --manifest") as part:
        part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def agree(dist: Dist, path: Path) -> None:
    """CheckFailed unless the wheels are those of the manifest."""
    version, entries = read(path)
    theirs, ours = ({entry.name: entry.sha256 for entry in each} for each in (entries, dist.entries))
    changed = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if version != dist.version or changed:
        raise CheckFailed(
            f"the wheels are not those of {path}, which says what version {version} consists of: {', '.join(changed)}\n"
            "  cure: take the very wheels that it was written for (builds of another day may differ), or release them as a new version"
        )
