"""What can go wrong while a release goes out, played against a real index server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from packaging.version import Version

from ci import process
from ci.errors import CheckFailed, CiError, EnvironmentProblem
from ci.matrix import REPOSITORY, load
from ci.release import upload
from ci.release.dist import Dist, complete
from ci.release.publish import publish
from ci.release.upload import Limits

from . import index_support
from .release_support import twine_in_this_process

LIMITS = Limits(attempts=2, upload=20, listed=20, pause=0.1)
KILL_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    fault: str
    happened: str
    lost: int  # files that the server should hold when all is over, and does not, or with other bytes
    sound: bool


class Unexpected(Exception):
    """A fault had another end than it should."""


@dataclass
class Stage:
    """One release on its way to one server, with a proxy between."""

    dist: Dist
    store: Path  # the server's folder
    proxy: index_support.Proxy
    expected: dict[str, str]  # what the server should hold in the end: sha256 by name
    kills: int  # so many files go in runs that are killed, the last ones

    @property
    def folder(self) -> Path:
        return self.dist.folder

    @cached_property
    def middle(self) -> str:
        """A wheel that is neither the first nor the last to go."""
        return self.dist.entries[len(self.dist.entries) // 2].name

    def begin(self, left: int) -> None:
        """As if an earlier run had sent all files but the last `left`."""
        for entry in self.dist.entries[: len(self.dist.entries) - left]:
            shutil.copy(self.folder / entry.name, self.store)

    def publish(self, *, limits: Limits = LIMITS, tags: Collection[Version] = ()) -> int:
        """Publish, and return how many uploads the server saw."""
        before = self.proxy.uploads
        publish(complete(self.folder), index_support.index(self.proxy.url), limits=limits, tags=tags)
        return self.proxy.uploads - before

    def stopped(self, kind: type[CiError], *, limits: Limits = LIMITS, tags: Collection[Version] = ()) -> tuple[str, int]:
        """Publish, which must end with this error; returns the first thing that it finds and how many uploads the server saw."""
        before = self.proxy.uploads
        try:
            self.publish(limits=limits, tags=tags)
        except kind as error:
            lines = str(error).replace(str(self.folder), "DIST").replace(self.proxy.url, "the index").splitlines()
            return next((line.strip() for line in lines[1:] if "fix:" not in line), lines[0]), self.proxy.uploads - before
        raise Unexpected(f"it went through, expected {kind.__name__}")

    def refused(self, reason: str, *, tags: Collection[Version] = ()) -> str:
        """Publish, which must be refused for this reason and before anything is sent; the server should keep what it holds now."""
        self.expected = index_support.held(self.store)
        said, uploads = self.stopped(CheckFailed, tags=tags)
        _expect(uploads == 0, f"{uploads} uploads, expected none")
        _expect(reason in said, f"it was refused, but because {said}")
        return f"0 uploads: {said}"


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unexpected(otherwise)


def again(stage: Stage) -> str:
    stage.begin(left=0)
    uploads = stage.publish()
    _expect(uploads == 0, f"{uploads} uploads, expected none")
    return "every file passed over, 0 uploads"


def killed_after_each(stage: Stage) -> str:
    return _killed(stage, passed=0, fault=None)


def killed_during_each(stage: Stage) -> str:
    return _killed(stage, passed=1, fault="half")


def _killed(stage: Stage, *, passed: int, fault: index_support.Fault | None) -> str:
    """Kill one run after another during its first upload, or during the second where the first completes what was killed before."""
    runs, files = stage.kills, len(stage.dist.entries)
    stage.begin(left=runs)
    for run in range(runs):
        _run_and_kill(stage, uploads=passed if run else 0, fault=fault)
    held = len(index_support.held(stage.store))
    _expect(held == files - passed, f"{held} files after {runs} kills, expected {files - passed}")
    uploads = stage.publish()
    _expect(uploads == passed, f"the last run sent {uploads} files, expected {passed}")
    return f"{runs} runs killed, the next completed it with {uploads} upload{'s' * (uploads != 1)}"


def _run_and_kill(stage: Stage, *, uploads: int, fault: index_support.Fault | None) -> None:
    """Run `release publish` in a process group of its own, which is killed when the server has the upload after the first `uploads`."""
    proxy = stage.proxy
    before = proxy.uploads

    def last(method: str) -> bool:
        return method == "POST" and proxy.uploads - before == uploads + 1

    command = [sys.executable, "-m", "ci", "release", "publish", str(stage.folder), "--index", proxy.url]
    environment = {**os.environ, "TWINE_USERNAME": "rehearsal", "TWINE_PASSWORD": "rehearsal"}
    running = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    proxy.fault = lambda method: fault if last(method) else None
    proxy.then = lambda method: os.killpg(running.pid, signal.SIGKILL) if last(method) else None
    try:
        _, said = running.communicate(timeout=KILL_SECONDS)
        _expect(running.returncode == -signal.SIGKILL, f"the run ended by itself with {running.returncode}: {said}")
    finally:
        proxy.fault, proxy.then = (lambda _: None), (lambda _: None)
        running.kill()


def failing_once(stage: Stage) -> str:
    proxy = stage.proxy
    proxy.fault = lambda method: "500" if method == "POST" and proxy.uploads % 2 else None
    uploads = stage.publish()
    return f"{uploads} uploads for {len(stage.dist.entries)} files, in one run"


def failing(stage: Stage) -> str:
    return _recovers(stage, "500", bound=5 * LIMITS.attempts)


def silent(stage: Stage) -> str:
    return _recovers(stage, "silence", bound=LIMITS.attempts, limits=replace(LIMITS, upload=3))


def broken(stage: Stage) -> str:
    return _recovers(stage, "half", bound=LIMITS.attempts)


def torn(stage: Stage) -> str:
    """Indexes that check an upload's digest drop such a file. One that keeps it has a wheel that nobody may be told to install."""
    stage.begin(left=2)
    stage.proxy.fault = lambda method: "torn" if method == "POST" else None
    _, uploads = stage.stopped(CheckFailed)
    _expect(uploads == 1, f"{uploads} uploads, expected none after the torn one")
    stage.proxy.fault = lambda _: None
    _, uploads = stage.stopped(CheckFailed)
    _expect(uploads == 0, f"{uploads} uploads, expected none while it is there")
    (stage.store / stage.dist.entries[-2].name).unlink()
    return f"noticed, and nothing sent after it; when it was deleted by hand, the next run sent the last {stage.publish()}"


def _recovers(stage: Stage, fault: index_support.Fault, *, bound: int, limits: Limits = LIMITS) -> str:
    """The run gives up, within bounds. When the fault is over, the next run completes the release."""
    stage.begin(left=2)
    before = index_support.held(stage.store)
    stage.proxy.fault = lambda method: fault if method == "POST" else None
    _, uploads = stage.stopped(EnvironmentProblem, limits=limits)
    _expect(uploads <= bound, f"{uploads} vain requests, expected {bound} at most")
    _expect(index_support.held(stage.store) == before, "the server holds other files than before")
    stage.proxy.fault = lambda _: None
    rest = stage.publish()
    _expect(rest == 2, f"the next run sent {rest} files, expected 2")
    return f"gave up after {uploads} vain requests with {len(before)} files there; the next run sent the last {rest}"


def unanswered(stage: Stage) -> str:
    proxy = stage.proxy
    proxy.fault = lambda method: "no-answer" if method == "POST" else None
    uploads = stage.publish()
    _expect(uploads == len(stage.dist.entries), f"{uploads} uploads, expected none twice")
    return f"{uploads} uploads: each file was found on the index, none sent twice"


def unreadable(stage: Stage) -> str:
    stage.begin(left=1)
    stage.proxy.fault = lambda method: "500" if method == "GET" else None
    _, uploads = stage.stopped(EnvironmentProblem)
    _expect(uploads == 0, f"{uploads} uploads, expected none")
    stage.proxy.fault = lambda _: None
    return f"stopped before the first upload; the next run sent the last {stage.publish()}"


def tampered_there(stage: Stage) -> str:
    (stage.store / stage.middle).write_bytes(_tampered(stage.folder / stage.middle))
    return stage.refused("the index has other bytes")


def tampered_here(stage: Stage) -> str:
    """A run is interrupted, a wheel is built again, and the next run finds other bytes than the manifest's."""
    stage.begin(left=1)
    stage.proxy.fault = lambda method: "500" if method == "POST" else None
    stage.stopped(EnvironmentProblem)
    stage.proxy.fault = lambda _: None
    path = stage.folder / stage.dist.entries[-1].name
    path.write_bytes(_tampered(path))
    return stage.refused("the wheels are not those of DIST/release.json")


def _tampered(path: Path) -> bytes:
    """The same wheel with another comment at the end of the archive: other bytes, and nothing else."""
    data = path.read_bytes()
    return data[:-2] + b"\x01\x00!"


def platform_missing(stage: Stage) -> str:
    platform = next(iter(load().platforms))
    for entry in stage.dist.entries:
        if entry.platform == platform:
            (stage.folder / entry.name).unlink()
    return stage.refused(f"{platform} has no wheel")


def newer_there(stage: Stage) -> str:
    newer = Version(f"{load().mlx}.{stage.dist.version.release[-1] + 1}")
    _add_version(stage, newer)
    return stage.refused("does not sort above", tags=[newer])


def not_ours(stage: Stage) -> str:
    _add_version(stage, Version("0.1"))
    return stage.refused("is not ours")


def _add_version(stage: Stage, version: Version) -> None:
    shutil.copy(stage.folder / stage.middle, stage.store / f"{load().name.replace('-', '_')}-{version}-py3-none-any.whl")


FAULTS: dict[str, Callable[[Stage], str]] = {
    "the same release again": again,
    "SIGKILL after each file in turn": killed_after_each,
    "SIGKILL while each file is sent": killed_during_each,
    "500 once for each file": failing_once,
    "500 for good, with two files to go": failing,
    "no answer ever, with two files to go": silent,
    "connection closed half-way, with two files to go": broken,
    "connection closed half-way, and the index keeps the half": torn,
    "connection closed after each file, without an answer": unanswered,
    "the index page answers 500": unreadable,
    "other bytes on the index under one name": tampered_there,
    "a wheel changes between two runs": tampered_here,
    "a platform is missing": platform_missing,
    "a newer version is on the index": newer_there,
    "the name is another project's": not_ours,
}


def _twine(command: Sequence[str], *, timeout: float, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    if timeout < LIMITS.upload:
        return process.run(command, timeout=timeout, env=env)
    return twine_in_this_process(command, env=env)


def play(fault: str, dist: Dist, folder: Path, kills: int) -> Outcome:
    """Play one fault in a folder of its own, with a server of its own; twine runs in this process where nothing has to end it."""
    copy = folder / "dist"
    copy.mkdir(parents=True)
    for entry in dist.entries:
        shutil.copy(dist.folder / entry.name, copy)
    store = folder / "store"
    with index_support.server_here(store) as url, index_support.proxy(url) as proxy:
        stage = Stage(replace(dist, folder=copy), store, proxy, {entry.name: entry.sha256 for entry in dist.entries}, kills)
        try:
            with mock.patch.object(upload, "process", SimpleNamespace(run=_twine, TookTooLong=process.TookTooLong)):
                happened, sound = FAULTS[fault](stage), True
        except (CiError, Unexpected) as error:
            happened, sound = str(error), False
        held = index_support.held(store)
    lost = sum(held.get(name) != digest for name, digest in stage.expected.items())
    return Outcome(fault, happened, lost, sound and held == stage.expected)
