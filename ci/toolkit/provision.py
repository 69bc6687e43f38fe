"""Install a root: unpack the locked wheels into a staging folder, arrange them, write the manifest, rename into place.

A root's folder appears by one rename, complete. A killed process leaves only a staging directory, which the next one removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from ci import console
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import patiently
from ci.matrix import Platform

from . import layout, lock, manifest, roots, uv


@dataclass(frozen=True)
class Installed:
    """The result of installing a root. ``wheel_bytes`` is the size of the unpacked wheels, which uv downloaded or had in its cache."""

    root: str
    platform: str
    path: Path
    cached: bool
    seconds: float
    wheel_bytes: int


def install(name: str, platform: Platform) -> Installed:
    """Install one root, or find it complete."""
    started = time.monotonic()
    root = roots.find(name)
    wheels = lock.wheels_for(root, platform)
    target = roots.directory(name, platform)

    def result(*, cached: bool) -> Installed:
        size = 0 if cached else sum(wheel.size for wheel in wheels)
        return Installed(name, platform.name, target, cached, round(time.monotonic() - started, 1), size)

    if _complete(target):
        _tidy(target)
        return result(cached=True)
    with _translated(target), _exclusive(target):
        for staging in _stale(target):
            shutil.rmtree(staging, ignore_errors=True)
        if _complete(target):  # by the process that was waited for
            return result(cached=True)
        _remove_damaged(target)
        _check_space(root, target.parent)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".staging", dir=target.parent))
        try:
            console.say(f"{name} for {platform.name}: {len(wheels)} wheels, {sum(wheel.size for wheel in wheels) / 1e6:.0f} MB")
            _fill(root, platform, staging)
            staging.chmod(0o755)  # mkdtemp's is private; a cache may be shared
            patiently(staging.rename, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return result(cached=False)


def _fill(root: roots.Root, platform: Platform, staging: Path) -> None:
    """Unpack, arrange, and hash every file: uv checks a wheel when it downloads it, but not in its cache.

    Damage there would come back for ever. So the damaged packages leave the cache, and are unpacked once more.
    """
    for again in (False, True):
        _unpack(root, platform, staging)
        layout.arrange(staging, platform)
        manifest.write(staging, {"root": root.name, "platform": platform.name, "layout": roots.LAYOUT_VERSION[platform.system]})
        damaged = manifest.differences(staging, manifest.read(staging) or {})
        if not damaged:
            return
        if not again:
            packages = manifest.packages(staging, damaged)
            console.say(f"{root.name}: uv's cache is damaged ({damaged[0]}): downloading {', '.join(packages)} again")
            uv.run("cache", "clean", *packages, cwd=staging)
            shutil.rmtree(staging)
            staging.mkdir()
    raise CheckFailed(
        f"a wheel of {root.name} does not match its RECORD:\n  "
        + "\n  ".join(damaged)
        + "\n  fix: another version in ci/toolkit/locks/toolkits.toml, and a word to its publisher"
    )


def _unpack(root: roots.Root, platform: Platform, staging: Path) -> None:
    """By copies, which file systems that can make cheap: by hard links a change of one root is one of uv's cache and of all roots."""
    site = staging / "site"
    uv.run(
        "pip", "install", "--target", str(site), "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile-bytecode",
        "--link-mode", "copy",
        "--python", sys.executable, "--python-version", lock.PYTHON, "--python-platform", platform.uv,
        "--requirement", str(root.lock_file), cwd=staging,
    )  # fmt: skip
    (site / ".lock").unlink(missing_ok=True)  # uv's own


def _complete(target: Path) -> bool:
    files = manifest.read(target)
    return files is not None and not manifest.lacking(target, files)


def _stale(target: Path) -> list[Path]:
    """Remove what killed processes left of this root: to the holder of the lock, every staging directory.

    The uv of a killed process may live on for a while and write there, which makes removing fail; a later run tries again.
    """
    return sorted(target.parent.glob(f".{target.name}.*.staging"))


def _tidy(target: Path) -> None:
    """Remove what killed processes left of a complete root, where this process may and no other is at it."""
    if _stale(target):
        with suppress(OSError, filelock.Timeout), filelock.FileLock(_guard(target), blocking=False):
            for staging in _stale(target):
                shutil.rmtree(staging, ignore_errors=True)


def _guard(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


def _remove_damaged(target: Path) -> None:
    """Remove a root that lost files, or what else is in its place: out of sight first, as half of it must not be found there."""
    if os.path.lexists(target):
        condemned = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".staging", dir=target.parent))
        patiently(target.rename, condemned / "root")
        shutil.rmtree(condemned, ignore_errors=True)


def _check_space(root: roots.Root, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < root.unpacked_bytes:
        raise EnvironmentProblem(
            f"the disk is too full: {root.name} takes {root.unpacked_bytes >> 20} MiB, {folder} has {free >> 20} MiB free",
            fix="free space, or set MLX_CUDA_TOOLKITS to a folder on a larger disk",
        )


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the root's file lock. The system releases it when the process ends, however it ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    guard = filelock.FileLock(_guard(target))
    try:
        guard.acquire(blocking=False)
    except filelock.Timeout:
        console.say(f"waiting for the process that is installing {target.name}")
        guard.acquire()
    try:
        yield
    finally:
        guard.release()


@contextmanager
def _translated(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise uv.explain(os.strerror(errno.ENOSPC), error.errno) from error
        fix = "make the folder writable, or set MLX_CUDA_TOOLKITS to one that is"
        if error.errno in {errno.EEXIST, errno.ENOTDIR, errno.ELOOP}:
            fix = f"remove what is at {target.parent}, or set MLX_CUDA_TOOLKITS to another directory"
        raise EnvironmentProblem(f"{target.name} cannot be written: {error}", fix=fix) from error
