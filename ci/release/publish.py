"""``release publish``: twine uploads the wheels, one at a time, each only when the index shows the one before.

Nothing is remembered between runs but the manifest. Each run asks the index which bytes it has, passes those over, and sends the rest, so
a run that was interrupted anywhere is completed by the next. After every failed upload the index is asked again too: a connection that
broke after the last byte left a whole file there.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import process
from ..console import say
from ..errors import CheckFailed, EnvironmentProblem
from ..files import sha256
from ..matrix import load
from .dist import ATTESTATION, MANIFEST, Dist, Entry, agree, settle
from .standing import Plan, against, plan, report, unwelcome

if TYPE_CHECKING:
    from packaging.version import Version

    from ..index import Index

RESUME = "run the same command again: it goes on where this one stopped"
# twine reads these before its arguments, and a value of the shell would send the files elsewhere.
_DROPPED = ("TWINE_REPOSITORY", "TWINE_REPOSITORY_URL")
_SETTINGS = re.compile(r"InvalidConfiguration|NonInteractive|Credential|TrustedPublishingFailure|InvalidDistribution")


@dataclass(frozen=True)
class Limits:
    """What bounds an upload in time and requests. twine sends a file up to five times where the answer is 5xx."""

    attempts: int = 6  # runs of twine for one file: with the pauses two and a half minutes, for an index that restarts
    file: float = 1800  # seconds after which no further attempt begins
    upload: float = 600  # seconds of one run: twine itself waits for ever
    listed: float = 300  # seconds until an uploaded file shows: pages are cached
    pause: float = 5  # seconds before the second attempt, twice that before the third, and so on


def publish(
    dist: Dist,
    index: Index,
    *,
    manifest_path: Path | None = None,
    digest: str | None = None,
    tags: Collection[Version] | None = None,
    dry_run: bool = False,
    attestations: bool = False,
    limits: Limits | None = None,
) -> Plan:
    """Bring the index to have every wheel of the release; returns what this run found there and what it sent.

    A manifest that is named has to be there, and has the digest, if that is given: `check` wrote it, and found then that the name is ours
    and the version new; here the bytes are compared. `tags` as in `against`, for a release without one.
    """
    manifest = manifest_path or dist.folder / MANIFEST
    if manifest_path or digest is not None or manifest.exists():
        agree(dist, manifest, digest)
    files = index.files(load().name, adding=True)
    to_do = plan(dist, files)
    report([*(unwelcome(dist.version, index) if manifest_path else against(dist.version, index, files, tags=tags))])
    if not dry_run:
        settle(dist, manifest)
    for entry in to_do.present:
        say(f"{entry.name}: is on {index.name} already, the same to the byte")
    if dry_run:
        for entry in to_do.missing:
            say(f"{entry.name}: would be uploaded, {entry.size / 2**20:.2f} MiB, sha256 {entry.sha256}")
        return to_do
    if attestations:
        sign([dist.folder / entry.name for entry in to_do.missing])
    for number, entry in enumerate(to_do.missing, len(to_do.present) + 1):
        say(f"{entry.name}: uploading, {number} of {len(dist.entries)}, {entry.size / 2**20:.2f} MiB")
        _upload(dist, entry, index, attestations, limits or Limits())
    if left := plan(dist, index.files(load().name)).missing:
        raise EnvironmentProblem(f"{index.name} no longer shows {', '.join(entry.name for entry in left)}", cure=RESUME)
    return to_do


def sign(paths: Sequence[Path]) -> None:
    """Leave an attestation (PEP 740) beside every file that has none, signed with the identity of the workflow that this runs in."""
    from id import AmbientCredentialError, detect_credential

    attestations = [path.with_name(path.name + ATTESTATION) for path in paths]
    unsigned = [path for path, attestation in zip(paths, attestations, strict=True) if not attestation.is_file()]
    if not unsigned:
        return
    try:
        identity = detect_credential("sigstore")
    except AmbientCredentialError as error:
        raise EnvironmentProblem(f"no identity to sign with: {error}", cure="give the job `permissions: id-token: write`") from error
    if identity is None:  # the tool would open a browser, and sign with a person's name
        raise EnvironmentProblem(
            "no identity to sign with: attestations are made in the publishing workflow", cure="leave --attestations out"
        )
    command = [sys.executable, "-m", "pypi_attestations", "sign", *map(str, unsigned)]
    done = process.run(command)
    if done.returncode:
        for path in unsigned:  # a half-written one would be taken for a good one
            path.with_name(path.name + ATTESTATION).unlink(missing_ok=True)
        raise EnvironmentProblem(f"signing failed: {(done.stdout + done.stderr).strip()}", cure="run the same command again")


def _upload(dist: Dist, entry: Entry, index: Index, attestations: bool, limits: Limits) -> None:
    """Upload one file, and return when the index shows it with its bytes."""
    path = dist.folder / entry.name
    said, started, attempt = "", time.monotonic(), 0
    while attempt < limits.attempts and time.monotonic() - started <= limits.file:
        if attempt:
            say(f"{entry.name}: {said}; once more")
            time.sleep(limits.pause * 2 ** (attempt - 1))
        attempt += 1
        if sha256(path) != entry.sha256:
            raise CheckFailed(f"{path} was changed while the release was going out\n  cure: restore it, then {RESUME}")
        taken, said = _twine(path, index, attestations, limits)
        if _shown(dist, entry, index, limits.listed if taken else 0):
            return
        if taken:
            raise EnvironmentProblem(f"{index.name} took {entry.name}, but does not show it after {limits.listed:.0f} s", cure=RESUME)
        _give_up_if_refused(entry, index, said)
    raise EnvironmentProblem(f"{entry.name} could not be uploaded in {attempt} attempts: {said}", cure=RESUME)


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
    # The line with the reason comes last but for a hint that has none.
    reasons = [line for line in lines if re.match(r"(ERROR|[\w.]*(Error|Exception))\b", line)] or lines
    taken = done.returncode == 0 or "already exist" in output  # by an attempt whose answer was lost; the page tells which bytes
    return taken, reasons[-1] if reasons else f"twine ended with {done.returncode}"


def _shown(dist: Dist, entry: Entry, index: Index, seconds: float) -> bool:
    """Whether the index has the file, asking until it shows or the time is over; CheckFailed if it has other bytes."""
    deadline, pause = time.monotonic() + seconds, 0.25
    while entry not in plan(dist, index.files(load().name)).present:
        if time.monotonic() + pause > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 10)
    return True


def _give_up_if_refused(entry: Entry, index: Index, said: str) -> None:
    """What the index refuses it will refuse again; only 5xx, silence and a broken connection are worth another attempt."""
    refused = re.search(r"HTTPError: (4\d\d)\b", said)
    if refused and refused[1] in {"401", "403"}:
        raise EnvironmentProblem(f"{index.name} does not let us upload: {said}", cure=f"check the credentials, then {RESUME}")
    if refused and refused[1] not in {"408", "429"}:
        raise CheckFailed(f"{index.name} refuses {entry.name}: {said}")
    if "HTTPError" not in said and _SETTINGS.search(said):
        raise EnvironmentProblem(f"twine: {said}", cure="set TWINE_USERNAME and TWINE_PASSWORD, or publish from the trusted workflow")
