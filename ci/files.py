"""Files: TOML on every Python, and output that is written completely or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from .errors import EnvironmentProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


__all__ = ["patiently", "record_digest", "sha256", "tomllib", "user_cache", "whole", "write_changed"]

WINDOWS = os.name == "nt"


def user_cache(name: str) -> Path | None:
    """A folder in the user's cache; None where the user has no home: by its version, platformdirs raises or names a folder ``~`` then."""
    try:
        folder = platformdirs.user_cache_dir(name)
    except (KeyError, RuntimeError):
        return None
    return None if folder.startswith("~") else Path(folder)


def patiently(rename: Callable[[Path], object], target: Path, pauses: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)) -> None:
    """Rename. Windows refuses that while another program has the file open, or one in the folder: a virus scanner reads what is new."""
    try:
        rename(target)
    except PermissionError:
        if not (WINDOWS and pauses):
            raise
        time.sleep(pauses[0])
        patiently(rename, target, pauses[1:])


@contextmanager
def whole(path: Path, *, fix: str = "free space, or give another folder") -> Iterator[Path]:
    """Write to the path that this gives: it is renamed to `path` once on disk, so that no reader sees half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            _sync(part, os.O_RDWR)
            patiently(part.replace, path)
        finally:
            part.unlink(missing_ok=True)
        if not WINDOWS:  # a folder cannot be opened there
            _sync(path.parent, os.O_RDONLY)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror or error}", fix=fix) from error


def write_changed(path: Path, data: bytes) -> None:
    """Write a file; one that is the same already keeps its time, so that nothing is built again for it."""
    if not path.is_file() or path.read_bytes() != data:
        with whole(path) as part:
            part.write_bytes(data)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def record_digest(data: bytes) -> str:
    """As a wheel's RECORD spells it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
