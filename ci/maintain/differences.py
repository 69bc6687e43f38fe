"""The members in which two wheels differ. Differences inside a member are for diffoscope, which knows every format."""

from __future__ import annotations

import hashlib
import shutil
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from .. import process
from ..errors import EnvironmentProblem


@dataclass(frozen=True)
class Difference:
    member: str  # "" for the archive as a whole
    sides: tuple[str, str]  # what the first and the second have there

    def __str__(self) -> str:
        return f"{self.member or 'the archive'}: {' against '.join(self.sides)}"


def differences(first: Path, second: Path) -> list[Difference]:
    """Every member that differs in anything; none exactly if the files are byte-identical."""
    try:
        one, other = first.read_bytes(), second.read_bytes()
        if one == other:
            return []
        left, right = _members(first), _members(second)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {error.filename}: {error.strerror}", fix="check the path") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise EnvironmentProblem(f"{first} or {second} is not a readable wheel: {error}", fix="build or fetch it again") from error
    found = [Difference(name, (left.get(name, "absent"), right.get(name, "absent"))) for name in {**left, **right}]
    whole = Difference("", (_described(one), _described(other)))  # such as the members' order
    return [each for each in found if len({*each.sides}) > 1] or [whole]


def _members(path: Path) -> dict[str, str]:
    """Return a description of each member, from the archive and from its contents."""
    with zipfile.ZipFile(path) as archive:
        return {
            entry.filename: f"{_described(archive.read(entry))}, {stat.filemode(entry.external_attr >> 16)}, "
            + "{:04}-{:02}-{:02} {:02}:{:02}:{:02}".format(*entry.date_time)
            for entry in archive.infolist()
        }


def _described(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def explain(first: Path, second: Path) -> None:
    """Show what differs inside, where diffoscope is installed, and say how to see it where not."""
    if shutil.which("diffoscope"):
        process.run(["diffoscope", first, second], stdout=None, stderr=None)
    else:
        print(f"  to see what differs: diffoscope {first} {second}")
