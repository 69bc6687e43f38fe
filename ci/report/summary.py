"""``python -m ci summary``: finished wheels as a Markdown table, with what changed since an earlier release.

An earlier release is a folder of wheels or a version on the index, of which only names and sizes are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .. import matrix
from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from ..audit.facts import WheelFacts

NEWEST = "newest"
MIB = 2**20


@dataclass(frozen=True)
class Slot:
    """What a wheel of a release is for. A later wheel of the same slot is its successor, whatever glibc either earned."""

    platform: str
    abi: str

    @classmethod
    def of(cls, name: str) -> Slot | None:
        """The slot of a file, or None if it is no wheel that this project builds."""
        try:
            tags = parse_wheel_filename(name)[3]
        except (InvalidWheelFilename, InvalidVersion):
            return None
        declared = matrix.load()
        abis = {f"{tag.interpreter}-{tag.abi}" for tag in tags} & {build.abi for build in declared.builds}
        platforms = [each.name for each in declared.platforms.values() if any(each.takes(tag.platform) for tag in tags)]
        return cls(platforms[0], abis.pop()) if abis and platforms else None


@dataclass(frozen=True)
class Earlier:
    """The sizes of an earlier release."""

    name: str
    sizes: Mapping[Slot, int]


def table(wheels: Sequence[WheelFacts], earlier: Earlier | None) -> str:
    """The Markdown."""
    budget = matrix.load().size_budget_mib
    since = f"since {earlier.name}" if earlier else "change"
    rows = [f"| platform | tag | MiB | {since} | native code | of {budget} MiB |", "|---|---|---:|---:|---|---:|"]
    for wheel in wheels:
        slot = Slot.of(wheel.file)
        sizes = {Path(module.member).name.partition(".")[0]: module.size for module in wheel.modules}
        sizes |= {"device": wheel.device.size} if wheel.device.size else {}
        cells = (
            slot.platform if slot else "?",
            "<br>".join(f"`{tag}`" for tag in wheel.tags),
            f"{wheel.size / MIB:.2f}",
            change(wheel.size, earlier.sizes.get(slot) if earlier and slot else None),
            ", ".join(f"`{name}` {size / MIB:.2f}" for name, size in sizes.items()) or "none",
            f"{wheel.size / MIB / budget:.0%}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    rows.append(
        f"| **together** | {len(wheels)} | **{sum(wheel.size for wheel in wheels) / MIB:.2f}** | {_together(wheels, earlier)} | | |"
    )
    title = " and ".join(dict.fromkeys(f"{wheel.project} {wheel.version}" for wheel in wheels))
    remark = "" if earlier else "\nThere is no earlier release to compare with.\n"
    return "\n".join([f"### {title}", "", *rows, remark])


def change(now: int, before: int | None) -> str:
    if not before:
        return "new"
    return f"{(now - before) / 1024:+.1f} KiB ({(now - before) / before:+.1%})" if now != before else "same"


def _together(wheels: Sequence[WheelFacts], earlier: Earlier | None) -> str:
    """The change of the whole release; nothing where the two are not of the same slots, and the sums say nothing."""
    slots = {Slot.of(wheel.file) for wheel in wheels}
    same = earlier is not None and slots == earlier.sizes.keys()
    return change(sum(wheel.size for wheel in wheels), sum(earlier.sizes.values())) if earlier and same else ""


def in_folder(folder: Path) -> Earlier | None:
    found = {slot: path.stat().st_size for path in sorted(folder.rglob("*.whl")) if (slot := Slot.of(path.name))}
    return Earlier(folder.name, found) if found else None


def releases(files: Iterable[tuple[str, int]]) -> dict[Version, Earlier]:
    """The releases that files of an index, by name and size, make up. A former owner's files are of no slot."""
    found: dict[Version, dict[Slot, int]] = {}
    for name, size in files:
        if slot := Slot.of(name):
            found.setdefault(parse_wheel_filename(name)[1], {})[slot] = size
    return {version: Earlier(str(version), sizes) for version, sizes in found.items()}


def last(found: Mapping[Version, Earlier], version: str) -> Earlier | None:
    """The newest release before this version, if there is one."""
    earlier = [each for each in found if each < Version(version)]
    return found[max(earlier)] if earlier else None


def _earlier(wanted: str | None, wheel: WheelFacts) -> Earlier | None:
    from ..release.index import named

    if wanted is None:
        return None
    if Path(wanted).is_dir():
        return in_folder(Path(wanted))
    try:
        version = None if wanted == NEWEST else Version(wanted)
    except InvalidVersion:
        raise EnvironmentProblem(f"{wanted!r} is neither a folder nor a version", cure=f"give one of these, or `{NEWEST}`") from None
    index = named("pypi")
    found = releases((remote.name, remote.size) for remote in index.files(wheel.project) if Slot.of(remote.name))
    if version is None:
        return last(found, wheel.version)
    if version not in found:
        raise EnvironmentProblem(f"{wheel.project} {version} is not on the index", cure=f"give a folder of wheels, or `{NEWEST}`")
    return found[version]


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "summary",
        help="finished wheels and their change in size as a Markdown table",
        description="Write a Markdown table of wheels: platform, tag, size, its change since an earlier release, native modules.",
    )
    add = parser.add_argument
    add("wheels", metavar="WHEEL", nargs="+", type=Path, help="a finished wheel")
    add(
        "--against",
        metavar="RELEASE",
        help="a folder of earlier wheels, a version on the index, or `newest`: the last before this one",
    )
    add("--output", type=Path, metavar="FILE", help="where the table goes, such as GITHUB_STEP_SUMMARY (default: stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..audit import describe

    order = list(matrix.load().platforms)
    wheels = sorted((describe(path) for path in args.wheels), key=lambda wheel: _position(wheel.file, order))
    text = table(wheels, _earlier(args.against, wheels[0]))
    if not args.output:
        print(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {args.output}: {error.strerror}", cure="give another --output") from error
    return 0


def _position(name: str, order: Sequence[str]) -> tuple[int, str]:
    slot = Slot.of(name)
    return (order.index(slot.platform) if slot else len(order), name)
