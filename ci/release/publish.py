"""``release publish``: twine uploads the wheels, one at a time, each only when the index shows the one before.

Only the manifest is kept between runs. Each run queries the index for which bytes it has, skips those, and uploads the rest, so
a run that was interrupted anywhere is completed by the next.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from packaging.version import Version

from ..console import say
from ..errors import EnvironmentProblem
from ..index import Index
from ..matrix import load
from .dist import MANIFEST, Dist, agree, settle
from .standing import against, report, unwelcome
from .upload import RESUME, Limits, Plan, plan, sign, upload


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
        say(f"{entry.name}: is on {index.name} already, byte-identical")
    if dry_run:
        for entry in to_do.missing:
            say(f"{entry.name}: would be uploaded, {entry.size / 2**20:.2f} MiB, sha256 {entry.sha256}")
        return to_do
    if attestations:
        sign([dist.folder / entry.name for entry in to_do.missing])
    for number, entry in enumerate(to_do.missing, len(to_do.present) + 1):
        say(f"{entry.name}: uploading, {number} of {len(dist.entries)}, {entry.size / 2**20:.2f} MiB")
        upload(dist, entry, index, attestations, limits or Limits())
    if left := plan(dist, index.files(load().name)).missing:
        raise EnvironmentProblem(f"{index.name} no longer shows {', '.join(entry.name for entry in left)}", fix=RESUME)
    return to_do
