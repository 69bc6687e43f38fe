"""From what somebody downloaded (a wheel, a folder, an artifact's zip) to the wheel of this project that fits an interpreter.

Everything here may come from a stranger's pull request: names and sizes are judged before a byte is unpacked, and only wheels are.
"""

from __future__ import annotations

import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import parse_wheel_filename

from ..audit import audit_wheel
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import load
from . import actions
from .actions import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from packaging.tags import Tag

MAX_ENTRIES = 10_000  # of a zip or a wheel


def obtain(target: str, folder: Path, *, repository: str | None = None) -> list[Path]:
    """The checked wheels of a target: a wheel, a folder, an artifact's zip, or a workflow run's id or address.

    What has to be downloaded or unpacked goes into ``folder``, a temporary one.
    """
    try:
        found = _find(target, folder, repository)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot unpack {target}: {error.strerror or error}", cure="free space, or set TMPDIR to a folder on a larger disk"
        ) from error
    if not found:
        raise EnvironmentProblem(
            f"{target} holds no wheel", cure="give a .whl file, a folder with some, the zip of an artifact, or the id of a workflow run"
        )
    own = [wheel.resolve() for wheel in found if wheel.name.startswith(f"{load().module}-")]
    if not own:
        raise CheckFailed(f"{found[0].name} is no wheel of {load().name}")
    for wheel in own:
        check(wheel)
    return own


def _find(target: str, folder: Path, repository: str | None) -> list[Path]:
    path = Path(target)
    if path.is_dir():
        return sorted((*path.glob("*.whl"), *path.glob("*/*.whl")))  # downloaders make a folder of each artifact
    if path.exists():
        return [path] if path.suffix == ".whl" else unpack(path, folder)

    run = actions.Run.parse(target, repository)
    if run is None:
        raise EnvironmentProblem(f"there is no {target}", cure="check the path; a workflow run is given by its id or its page's address")
    return [wheel for zipped in actions.download(run, folder) for wheel in unpack(zipped, zipped.with_suffix(""))]


def unpack(path: Path, folder: Path) -> list[Path]:
    """Unpack the wheels of an artifact's zip into a temporary folder, side by side, and nothing else of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with _open(path) as archive:
        entries = {}
        for entry in judged(path, archive):
            name = PurePosixPath(entry.filename).name
            if name.lower().endswith(".zip"):
                raise CheckFailed(f"{path.name} holds another zip, {name!r}\n  cure: look at it, and give the inner one")
            if name in entries:
                raise CheckFailed(f"{path.name} holds {name!r} more than once")
            if name.endswith(".whl"):
                entries[name] = entry
        try:
            for name, entry in entries.items():
                with archive.open(entry) as source, (folder / name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)  # zipfile reads no more than the declared size, and checks the sum
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise CheckFailed(f"{path.name} is damaged: {error}\n  cure: download it again") from error
    return [folder / name for name in sorted(entries)]


def judged(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of a zip, once nothing about their names, kinds and sizes is wrong."""
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise CheckFailed(f"{path.name} has {len(entries)} entries, expected at most {MAX_ENTRIES}")
    declared = sum(entry.file_size for entry in entries)
    if declared > MAX_BYTES:
        raise CheckFailed(f"{path.name} would unpack to {declared / 2**20:,.0f} MiB, expected at most {MAX_BYTES // 2**20}")
    for entry in entries:
        if wrong := _wrong(entry):
            raise CheckFailed(f"{path.name}: the entry {entry.orig_filename!r} {wrong}; nothing was unpacked")
    return [entry for entry in entries if not entry.is_dir()]


def _wrong(entry: zipfile.ZipInfo) -> str:
    name = entry.orig_filename  # as stored: `filename` has been cut at a NUL and has its separators changed on Windows
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "leads out of the folder"
    if "\\" in name or ":" in name:
        return "has a backslash or a drive letter in its name"
    if not name or not name.isprintable():
        return "has a name that cannot be printed"
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        return "is a symbolic link" if kind == stat.S_IFLNK else "is no ordinary file"
    if entry.flag_bits & 1:
        return "is encrypted"
    if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        return "is compressed in an uncommon way"
    return ""


def check(wheel: Path) -> None:
    """Refuse a wheel that is damaged, escapes its folder, or is not what its RECORD says."""
    with _open(wheel) as archive:
        judged(wheel, archive)
    if violations := audit_wheel(wheel, checks={"record"}):
        raise CheckFailed("\n".join(["the wheel is not what its RECORD says:", *map(str, violations)]))


def _open(path: Path) -> zipfile.ZipFile:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckFailed(f"{path.name} has {path.stat().st_size / 2**20:,.0f} MiB, expected at most {MAX_BYTES // 2**20}")
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        kind = "wheel" if path.suffix == ".whl" else "zip"
        raise CheckFailed(f"{path} is no {kind}: {error}\n  cure: download it again, and look at its first bytes") from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", cure="check the path") from error


def choose(wheels: Iterable[Path], tags: Sequence[Tag], python: str) -> Path:
    """The wheel that an installer would take for an interpreter that takes these tags: the newest version, then the best tag."""
    rank = {tag: number for number, tag in enumerate(tags)}
    named = [(wheel, *parse_wheel_filename(wheel.name)[1::2]) for wheel in wheels]
    fitting = [(version, -min(rank[tag] for tag in own & rank.keys()), wheel) for wheel, version, own in named if own & rank.keys()]
    if fitting:
        return max(fitting)[2]
    offered = ", ".join(sorted({str(tag) for _, _, own in named for tag in own}))
    pythons = list(dict.fromkeys(f"{tag.interpreter}-{tag.abi}" for tag in tags))
    platforms = list(dict.fromkeys(tag.platform for tag in tags))
    what = "Python" if any(tag.platform in platforms for _, _, own in named for tag in own) else "platform"
    raise CheckFailed(
        f"no wheel for this {what}\n  there is: {offered}\n"
        f"  Python {python} here takes: {', '.join(pythons[:5])}, … on {', '.join(platforms[:3])}, …"
    )
