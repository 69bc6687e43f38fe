"""``release check``: what has to hold of the wheels before the first byte of a release leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator

from .. import console, process
from ..audit import Violation, audit_wheel, disagreements
from ..audit.checks import CHECKS, SAME_METADATA
from ..matrix import load
from ..wheelfile.wheel import read
from .dist import Dist

# Checks of the audit, by their ids, that read toolkit roots of every platform.
ROOT_CHECKS = ("provider", "symbols")
WITHOUT_TOOLKITS = tuple(identifier for identifier in CHECKS if identifier not in ROOT_CHECKS)


def wheels(dist: Dist, *, checks: Collection[str] | None = None) -> Iterator[Violation]:
    """The wheels' problems, by the audit: by these checks of it, None being all, and by those across wheels."""
    opened = [read(path) for path in dist.paths]
    yield from disagreements(opened)
    # A resolver reads the METADATA of one wheel and takes it for all.
    if len({wheel.members.get(f"{wheel.dist_info}/METADATA") for wheel in opened}) > 1:
        yield Violation("", "", SAME_METADATA, "METADATA is not byte-identical in all wheels")
    for wheel in opened:
        if wheel.sbom not in wheel.members:
            yield Violation(wheel.path.name, wheel.sbom, "sbom", "is missing, expected the one that python -m ci repair writes")
        yield from audit_wheel(wheel.path, checks=checks)


def twine(dist: Dist) -> Iterator[Violation]:
    """Everything that the index would refuse, as far as twine knows."""
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, dist.paths)]
    done = process.run(command, env={**os.environ, "COLUMNS": "1000"})
    if done.returncode:
        yield Violation("", "", "twine", f"twine check --strict: {(done.stdout + done.stderr).strip()}")


def show(dist: Dist) -> None:
    """The table of a release that may go out."""
    table = console.table(title=f"{load().name} {dist.version}")
    for name in ("wheel, in the order of upload", "platform", "build", f"MiB of {load().size_budget_mib}", "sha256"):
        table.add_column(name, justify="right" if name.startswith("MiB") else "left", overflow="fold")
    for entry in dist.entries:
        table.add_row(entry.name, entry.platform, entry.build, f"{entry.size / 2**20:.2f}", entry.sha256[:16])
    console.show(table)
    print("no problem found: this release can be published")
