"""A store of compiled device code, addressed by what it was made from, that all build trees of a user share."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import EnvironmentProblem
from ..files import user_cache, whole
from ..matrix import load

VARIABLE = "MLX_CUDA_DEVICE_STORE"  # a folder, or "off"
LIMIT = 1 << 30  # bytes; a set of all device code takes about 100 MB
_DIGEST = 32


def chosen(output: Path) -> Store:
    """The user's store; where it is off, or there is no cache to write to, a folder beside the output, which only that build tree knows."""
    setting = os.environ.get(VARIABLE, "")
    own = output.absolute().with_name(f"{output.name}-objects")
    if setting:
        return Store(own if setting == "off" else Path(setting).absolute())
    if (cache := user_cache(load().name)) is None:
        return Store(own)
    folder = cache / "device"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return Store(folder if os.access(folder, os.W_OK) else own)


@dataclass(frozen=True)
class Store:
    """Entries are files: the SHA-256 of the data, then the data. Any number of processes may use it at once."""

    folder: Path
    limit: int = LIMIT

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def get(self, key: str) -> bytes | None:
        """The entry, or None where there is none, or one that is not what was put there."""
        path = self._path(key)
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        data = entry[_DIGEST:]
        if hashlib.sha256(data).digest() != entry[:_DIGEST]:
            print(f"{path} is damaged: what it held is compiled again", file=sys.stderr)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            path.touch()  # the least recently used go first
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep an entry; an interrupted process leaves none."""
        try:
            with whole(self._path(key), fix=f"{VARIABLE}=off") as part:
                part.write_bytes(hashlib.sha256(data).digest() + data)
        except EnvironmentProblem:
            if self.get(key) != data:  # Windows replaces no file that another process reads
                raise

    def prune(self) -> None:
        """Delete what was used longest ago, until the store keeps its limit."""
        entries = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process prunes too
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        size = sum(each[1] for each in entries)
        for _, bytes_, path in sorted(entries):
            if size <= self.limit:
                break
            with suppress(OSError):
                path.unlink()
            size -= bytes_
