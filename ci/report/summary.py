"""``python -m ci summary``: print finished wheels and their change in size as a Markdown table.

The columns are platform, tag, size, change since an earlier release, and native modules. The earlier release is a directory of wheels, or a
version on the index. Of an index, only names and sizes are queried.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .. import matrix
from ..errors import EnvironmentProblem
from . import slots

if TYPE_CHECKING:
    from ..wheelfile.facts import WheelFacts

NEWEST = "newest"
MIB = 2**20


@dataclass(frozen=True)
class Earlier:
    """The sizes of an earlier release."""

    name: str
    sizes: Mapping[slots.Slot, int]


def table(wheels: Sequence[WheelFacts], earlier: Earlier | None) -> str:
    """The Markdown."""
    budget = matrix.load().size_budget_mib
    since = f"since {earlier.name}" if earlier else "change"
    rows = [f"| platform | tag | MiB | {since} | native code | of {budget} MiB |", "|---|---|---:|---:|---|---:|"]
    sizes = {slots.of(wheel.file): wheel.size for wheel in wheels}
    before: dict[slots.Slot | None, int] = dict(earlier.sizes.items()) if earlier else {}
    for wheel in wheels:
        slot = slots.of(wheel.file)
        code = {Path(module.member).name.partition(".")[0]: module.size for module in wheel.modules}
        code |= {"device": wheel.device.size} if wheel.device.size else {}
        cells = (
            slot.platform if slot else "?",
            "<br>".join(f"`{tag}`" for tag in wheel.tags),
            f"{wheel.size / MIB:.2f}",
            change(wheel.size, before.get(slot)),
            ", ".join(f"`{name}` {size / MIB:.2f}" for name, size in code.items()) or "none",
            f"{wheel.size / MIB / budget:.0%}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    # Where the two are not of the same slots, the sums say nothing.
    together = change(sum(sizes.values()), sum(before.values())) if before.keys() == sizes.keys() else ""
    rows.append(f"| **together** | {len(wheels)} | **{sum(sizes.values()) / MIB:.2f}** | {together} | | |")
    title = " and ".join(dict.fromkeys(f"{wheel.project} {wheel.version}" for wheel in wheels))
    remark = "" if earlier else "\nThere is no earlier release to compare with.\n"
    return "\n".join([f"### {title}", "", *rows, remark])


def change(now: int, before: int | None) -> str:
    if not before:
        return "new"
    return f"{(now - before) / 1024:+.1f} KiB ({(now - before) / before:+.1%})" if now != before else "same"


def in_folder(folder: Path) -> Earlier | None:
    known, found = slots.declared(), {slots.of(path.name): path.stat().st_size for path in sorted(folder.rglob("*.whl"))}
    return Earlier(folder.name, {slot: found[slot] for slot in known if slot in found}) if found.keys() & known else None


def releases(files: Iterable[tuple[str, int]]) -> dict[Version, Earlier]:
    """The releases that files of an index, by name and size, make up. A former owner's files are of no declared slot."""
    found: dict[Version, dict[slots.Slot, int]] = {}
    for name, size in files:
        if (slot := slots.of(name)) and slot in slots.declared():
            found.setdefault(parse_wheel_filename(name)[1], {})[slot] = size
    return {version: Earlier(str(version), sizes) for version, sizes in found.items()}


def last(found: Mapping[Version, Earlier], version: str) -> Earlier | None:
    """The newest release before this version, if there is one."""
    earlier = [each for each in found if each < Version(version)]
    return found[max(earlier)] if earlier else None


def _earlier(wanted: str, wheel: WheelFacts) -> Earlier | None:
    from ..index import named

    if Path(wanted).is_dir():
        return in_folder(Path(wanted))
    try:
        version = None if wanted == NEWEST else Version(wanted)
    except InvalidVersion:
        raise EnvironmentProblem(f"{wanted!r} is neither a folder nor a version", fix=f"give one of these, or `{NEWEST}`") from None
    found = releases((remote.name, remote.size) for remote in named("pypi").files(wheel.project))
    if version is None:
        return last(found, wheel.version)
    if version not in found:
        raise EnvironmentProblem(f"{wheel.project} {version} is not on the index", fix=f"give a folder of wheels, or `{NEWEST}`")
    return found[version]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("wheels", metavar="WHEEL", nargs="+", type=Path, help="a repaired wheel")
    add("--against", metavar="RELEASE", help="a directory of earlier wheels, a version on the index, or `newest`: the one before this")
    add("--output", type=Path, metavar="FILE", help="output file, such as GITHUB_STEP_SUMMARY (default: stdout)")


def run(args: argparse.Namespace) -> int:
    from ..audit import describe

    wheels = sorted((describe(path) for path in args.wheels), key=lambda wheel: slots.position(wheel.file))
    text = table(wheels, _earlier(args.against, wheels[0]) if args.against else None)
    if not args.output:
        print(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {args.output}: {error.strerror}", fix="give another --output") from error
    return 0
