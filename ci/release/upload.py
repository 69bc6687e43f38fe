"""One wheel to an index: what of a release is there already, and twine, which sends the rest.

A connection that broke after the last byte left a whole file there: so after every failed upload the index is queried again too.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import process
from ..console import say
from ..errors import CheckFailed, EnvironmentProblem
from ..index import Index, Remote
from ..matrix import load
from .dist import ATTESTATION, Dist, Entry
from .standing import refuse_yanked

RESUME = "run the same command again: it goes on where this one stopped"
# twine reads these before its arguments, and a value of the shell would send the files elsewhere.
_DROPPED = ("TWINE_REPOSITORY", "TWINE_REPOSITORY_URL")
_SETTINGS = re.compile(r"InvalidConfiguration|NonInteractive|Credential|TrustedPublishingFailure|InvalidDistribution")


@dataclass(frozen=True)
class Limits:
    """Limits of an upload. twine itself sends a file up to five times if the answer is 5xx."""

    attempts: int = 6  # runs of twine for one file: with the pauses two and a half minutes, for an index that restarts
    file: float = 1800  # seconds after which no further attempt begins
    upload: float = 600  # seconds of one run: twine itself waits for ever
    listed: float = 300  # seconds until an uploaded file shows: pages are cached
    pause: float = 5  # seconds before the second attempt, twice that before the third, and so on


@dataclass(frozen=True)
class Plan:
    """The wheels that the index has and lacks, by their bytes."""

    present: tuple[Entry, ...]  # on the index, byte-identical
    missing: tuple[Entry, ...]  # in the order in which they go


def plan(dist: Dist, files: Sequence[Remote]) -> Plan:
    """CheckFailed where the index has other bytes under a name of this release, and foreign or yanked files of its version."""
    there = {remote.name: remote for remote in files}
    problems = [
        f"{entry.name}: the index has other bytes, sha256 {there[entry.name].sha256}, expected {entry.sha256}"
        for entry in dist.entries
        if entry.name in there and there[entry.name].sha256 != entry.sha256
    ]
    foreign = {remote.name for remote in files if remote.version == dist.version} - {entry.name for entry in dist.entries}
    problems += [f"{name}: is on the index under {dist.version}, but no file of this release" for name in sorted(foreign)]
    if problems:
        fix = "an index accepts no other bytes under a used name: find out whose files these are, and release a new version"
        raise CheckFailed("\n  ".join([f"version {dist.version} is on the index already, and differs:", *problems, f"fix: {fix}"]))
    refuse_yanked(dist.version, files)
    present, missing = (tuple(entry for entry in dist.entries if (entry.name in there) is wanted) for wanted in (True, False))
    return Plan(present, missing)


def sign(paths: Sequence[Path]) -> None:
    """Write an attestation (PEP 740) beside every file that has none, signed with the identity of this workflow run."""
    from id import AmbientCredentialError, detect_credential

    attestations = [path.with_name(path.name + ATTESTATION) for path in paths]
    unsigned = [path for path, attestation in zip(paths, attestations, strict=True) if not attestation.is_file()]
    if not unsigned:
        return
    try:
        identity = detect_credential("sigstore")
    except AmbientCredentialError as error:
        raise EnvironmentProblem(f"no identity to sign with: {error}", fix="give the job `permissions: id-token: write`") from error
    if identity is None:  # the tool would open a browser, and sign with a person's name
        raise EnvironmentProblem("no identity to sign with: attestations are made in the publishing workflow", fix="omit --attestations")
    command = [sys.executable, "-m", "pypi_attestations", "sign", *map(str, unsigned)]
    done = process.run(command)
    if done.returncode:
        for path in unsigned:  # a half-written one would be taken for a good one
            path.with_name(path.name + ATTESTATION).unlink(missing_ok=True)
        raise EnvironmentProblem(f"signing failed: {(done.stdout + done.stderr).strip()}", fix="run the same command again")


def upload(dist: Dist, entry: Entry, index: Index, attestations: bool, limits: Limits) -> None:
    """Upload one file, and return when the index shows it with its bytes."""
    path = dist.folder / entry.name
    said, started, attempt = "", time.monotonic(), 0
    while attempt < limits.attempts and time.monotonic() - started <= limits.file:
        if attempt:
            say(f"{entry.name}: {said}; once more")
            time.sleep(limits.pause * 2 ** (attempt - 1))
        attempt += 1
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
            raise CheckFailed(f"{path} was changed during the upload\n  fix: restore it, then {RESUME}")
        taken, said = _twine(path, index, attestations, limits)
        if _shown(dist, entry, index, limits.listed if taken else 0):
            return
        if taken:
            raise EnvironmentProblem(f"{index.name} took {entry.name}, but does not show it after {limits.listed:.0f} s", fix=RESUME)
        _give_up_if_refused(entry, index, said)
    raise EnvironmentProblem(f"{entry.name} could not be uploaded in {attempt} attempts: {said}", fix=RESUME)


def _twine(path: Path, index: Index, attestations: bool, limits: Limits) -> tuple[bool, str]:
    """Run twine for one file; whether the index has taken it, now or earlier, and the line that says why not.

    Credentials are twine's own matter: none is in the arguments.
    """
    command = [sys.executable, "-m", "twine", "--no-color", "upload", "--verbose", "--non-interactive", "--disable-progress-bar"]
    command += index.target
    command += ["--attestations", str(path), f"{path}{ATTESTATION}"] if attestations else [str(path)]
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED} | {"COLUMNS": "1000"}
    try:
        done = process.run(command, timeout=limits.upload, env=environment)
    except process.TookTooLong:
        return False, f"no answer in {limits.upload:.0f} s"
    output = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The line with the reason comes last, except for a hint that has none.
    reasons = [line for line in lines if re.match(r"(ERROR|[\w.]*(Error|Exception))\b", line)] or lines
    taken = done.returncode == 0 or "already exist" in output  # by an attempt whose answer was lost; the page tells which bytes
    return taken, reasons[-1] if reasons else f"twine ended with {done.returncode}"


def _shown(dist: Dist, entry: Entry, index: Index, seconds: float) -> bool:
    """Whether the index has the file. Queries until it shows or the time is over; CheckFailed if the index has other bytes."""
    deadline, pause = time.monotonic() + seconds, 0.25
    while entry not in plan(dist, index.files(load().name)).present:
        if time.monotonic() + pause > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 10)
    return True


def _give_up_if_refused(entry: Entry, index: Index, said: str) -> None:
    """Raise if the index refused the file: only 5xx, timeouts and broken connections are tried again."""
    refused = re.search(r"HTTPError: (4\d\d)\b", said)
    if refused and refused[1] in {"401", "403"}:
        raise EnvironmentProblem(f"{index.name} refuses the upload: {said}", fix=f"check the credentials, then {RESUME}")
    if refused and refused[1] not in {"408", "429"}:
        raise CheckFailed(f"{index.name} refuses {entry.name}: {said}")
    if "HTTPError" not in said and _SETTINGS.search(said):
        raise EnvironmentProblem(f"twine: {said}", fix="set TWINE_USERNAME and TWINE_PASSWORD, or publish from the trusted workflow")
