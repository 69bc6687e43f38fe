"""From a download (a wheel, a folder, an artifact's zip) to the wheel of this project that fits an interpreter.

Everything here may come from a stranger's pull request: names and sizes are judged before a byte is unpacked, and only wheels are.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from ..audit import audit_wheel
from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import load
from ..wheelfile import archive
from . import actions


def obtain(target: str, folder: Path, *, repository: str | None = None) -> list[Path]:
    """The checked wheels of a target: a wheel, a folder, an artifact's zip, or a workflow run's id or address.

    Downloaded and unpacked files go into ``folder``, a temporary one.
    """
    try:
        found = _find(target, folder, repository)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot unpack {target}: {error.strerror or error}", fix="free space, or set TMPDIR to a folder on a larger disk"
        ) from error
    if not found:
        raise EnvironmentProblem(
            f"{target} holds no wheel", fix="give a .whl file, a folder with some, the zip of an artifact, or the id of a workflow run"
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
        raise EnvironmentProblem(f"there is no {target}", fix="check the path; a workflow run is given by its id or its page's address")
    return [wheel for zipped in actions.download(run, folder) for wheel in unpack(zipped, zipped.with_suffix(""))]


def unpack(path: Path, folder: Path) -> list[Path]:
    """Unpack the wheels of an artifact's zip into a temporary folder, side by side, and nothing else of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with archive.opened(path) as zipped:
        entries = {}
        for entry in archive.judged(path, zipped):
            name = PurePosixPath(entry.filename).name
            if name.lower().endswith(".zip"):
                raise CheckFailed(f"{path.name} holds another zip, {name!r}\n  fix: look at it, and give the inner one")
            if name in entries:
                raise CheckFailed(f"{path.name} holds {name!r} more than once")
            if name.endswith(".whl"):
                entries[name] = entry
        try:
            for name, entry in entries.items():
                with zipped.open(entry) as source, (folder / name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)  # zipfile reads no more than the declared size, and checks the sum
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise archive.damaged(path, error) from error
    return [folder / name for name in sorted(entries)]


def check(wheel: Path) -> None:
    """Refuse a wheel that is damaged, escapes its folder, or is not what its RECORD says."""
    if violations := audit_wheel(wheel, checks={"record"}):
        raise CheckFailed("\n".join(["the wheel is not what its RECORD says:", *map(str, violations)]))


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
