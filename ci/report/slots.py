"""The platform and Python of each wheel of a release, by its file name."""

from __future__ import annotations

import re
from typing import NamedTuple

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from ..matrix import load

SYSTEMS = {"manylinux": "Linux", "musllinux": "Linux", "linux": "Linux", "win": "Windows", "macosx": "macOS"}


class Slot(NamedTuple):
    """A later wheel of the same slot is the successor of an earlier one, whatever glibc either earned."""

    project: str
    platform: str  # Linux x86_64
    python: str  # the Python and ABI tags: cp310-abi3


def of(name: str) -> Slot | None:
    """None for a file that is no wheel."""
    try:
        project, _, _, tags = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion):
        return None
    tag = min(tag.platform for tag in tags)
    match = re.fullmatch(r"(manylinux|musllinux|linux|win|macosx)(?:\d+)?_(?:\d+_\d+_)?(\w+)", tag)
    platform = f"{SYSTEMS[match[1]]} {match[2]}" if match else tag
    return Slot(project, platform, ", ".join(sorted({f"{tag.interpreter}-{tag.abi}" for tag in tags})))


def declared() -> list[Slot]:
    """Those of every wheel of a release."""
    matrix, project = load(), canonicalize_name(load().name)
    platforms = [f"{each.system.capitalize()} {each.machine}" for each in matrix.platforms.values()]
    return [Slot(project, platform, build.abi) for platform in platforms for build in matrix.builds]


def position(name: str) -> tuple[int, str]:
    """The sort key of wheels: in the declared order, then any others."""
    order = declared()
    slot = of(name)
    return order.index(slot) if slot in order else len(order), name
