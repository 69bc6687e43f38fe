"""The list of all files of a root with size and sha256. It is written last: a folder without it is not a root."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


def _hash(paths: list[Path]) -> Iterator[str]:
    """Sha256 of each path. A root holds most files under two names (hard links), so each file is read once."""
    identities = [(stat.st_dev, stat.st_ino) for stat in map(os.stat, paths)]
    unique = dict(zip(identities, paths, strict=True))

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return _file_digest(file.fileno())

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib releases the interpreter lock
        digests = dict(zip(unique, pool.map(digest, unique.values()), strict=True))
    return (digests[identity] for identity in identities)


def _file_digest(descriptor: int) -> str:
    state = hashlib.sha256()
    while block := os.read(descriptor, 1 << 20):
        state.update(block)
    return state.hexdigest()


def write(root: Path, description: dict[str, str | int]) -> None:
    """Hash every file of ``root`` and write the manifest, durably."""
    names = sorted(_walk(root))
    paths = [root / name for name in names]
    entries = {
        name: {"size": path.stat().st_size, "sha256": digest} for name, path, digest in zip(names, paths, _hash(paths), strict=True)
    }
    with (root / NAME).open("w", encoding="utf-8") as file:
        json.dump({**description, "files": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


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
    listed = sorted(present & files.keys())
    digests = zip(listed, _hash([root / name for name in listed]), strict=True)
    return [
        *(f"{name}: missing" for name in sorted(files.keys() - present)),
        *(f"{name}: changed (sha256 {digest}, installed as {files[name].sha256})" for name, digest in digests if digest != files[name].sha256),
        *(f"{name}: not part of the root" for name in sorted(present - files.keys())),
    ]
