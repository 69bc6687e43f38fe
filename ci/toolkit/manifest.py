"""The list of all files of a root with size and sha256. It is written last: a folder without it is not a root."""

from __future__ import annotations

import base64
import csv
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ci.files import sha256

NAME = "manifest.json"


@dataclass(frozen=True)
class Entry:
    size: int
    sha256: str


def _walk(root: Path) -> Iterator[str]:
    """All files below ``root`` but the manifest, relative, with forward slashes."""
    for folder, _, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        for file in files:
            if file != NAME or folder != str(root):
                yield (relative / file).as_posix()


def write(root: Path, description: dict[str, str | int]) -> None:
    """Write the manifest of ``root``, durably.

    The digest of a file that came out of a wheel is the one that the wheel's RECORD states (the wheel itself was checked against the
    lock), so that gigabytes need not be hashed once more, and ``verify`` compares with what was published. Other files are hashed.
    """
    listed = _listed(root / "site")
    entries = {}
    for name in sorted(_walk(root)):
        path = root / name
        stat = path.stat()  # the hard links in include/ and lib/ are the same file too
        entry = listed.get((stat.st_dev, stat.st_ino)) or Entry(stat.st_size, sha256(path))
        entries[name] = {"size": entry.size, "sha256": entry.sha256}
    with (root / NAME).open("w", encoding="utf-8") as file:
        json.dump({**description, "files": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _listed(site: Path) -> dict[tuple[int, int], Entry]:
    """The entries of all ``*.dist-info/RECORD`` below ``site``, by the file's identity."""
    found = {}
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as file:
            for name, digest, size in csv.reader(file):
                algorithm, _, value = digest.partition("=")
                if algorithm == "sha256" and size:
                    stat = (site / name).stat()
                    found[stat.st_dev, stat.st_ino] = Entry(int(size), base64.urlsafe_b64decode(value + "=").hex())
    return found


def packages(root: Path, lines: Iterable[str]) -> list[str]:
    """The packages whose files these lines of `differences` name; all of them where they name no package's."""
    names = {line.partition(":")[0] for line in lines}
    found = {}
    for record in sorted((root / "site").glob("*.dist-info/RECORD")):
        with record.open(encoding="utf-8", newline="") as file:
            found[record.parent.name.partition("-")[0]] = any(f"site/{row[0]}" in names for row in csv.reader(file))
    return [name for name, named in found.items() if named] or list(found)


def read(root: Path) -> dict[str, Entry] | None:
    """The manifest's files, or None where there is no whole manifest."""
    try:
        files = json.loads((root / NAME).read_text("utf-8"))["files"]
        return {name: Entry(entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def lacking(root: Path, files: dict[str, Entry]) -> list[str]:
    """The listed files that are missing or have another size: the quick check."""

    def size(name: str) -> int | None:
        try:
            return (root / name).stat().st_size
        except OSError:
            return None

    return [name for name, entry in files.items() if size(name) != entry.size]


def differences(root: Path, files: dict[str, Entry]) -> list[str]:
    """One line per file that is missing, changed or not listed: the full check, which reads everything."""
    present = set(_walk(root))
    identities = {name: (stat.st_dev, stat.st_ino) for name in sorted(files.keys() & present) for stat in [(root / name).stat()]}
    unique = {identity: root / name for name, identity in identities.items()}  # a hard-linked file is read once
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib releases the interpreter lock
        digests = dict(zip(unique, pool.map(sha256, unique.values()), strict=True))
    found = {name: digests[identity] for name, identity in identities.items()}
    return [
        *(f"{name}: missing" for name in sorted(files.keys() - present)),
        *(f"{name}: changed: sha256 {found[name]}, published {files[name].sha256}" for name in found if found[name] != files[name].sha256),
        *(f"{name}: not part of the root" for name in sorted(present - files.keys())),
    ]
