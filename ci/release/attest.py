"""Attestations (PEP 740), signed with the identity of the workflow that publishes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from ..errors import EnvironmentProblem
from .dist import ATTESTATION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

AUDIENCE = "sigstore"


def sign(paths: Sequence[Path]) -> None:
    """Leave an attestation beside every file that has none. Nothing is signed unless this process has an identity of its own."""
    from id import AmbientCredentialError, detect_credential

    unsigned = [path for path in paths if not path.with_name(path.name + ATTESTATION).is_file()]
    if not unsigned:
        return
    try:
        identity = detect_credential(AUDIENCE)
    except AmbientCredentialError as error:
        raise EnvironmentProblem(f"no identity to sign with: {error}", cure="give the job `permissions: id-token: write`") from error
    if identity is None:  # the tool would open a browser, and sign with a person's name
        raise EnvironmentProblem(
            "no identity to sign with: attestations are made in the publishing workflow", cure="leave --attestations out"
        )
    done = subprocess.run(
        [sys.executable, "-m", "pypi_attestations", "sign", *map(str, unsigned)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        for path in unsigned:  # a half-written one would be taken for a good one
            path.with_name(path.name + ATTESTATION).unlink(missing_ok=True)
        raise EnvironmentProblem(f"signing failed: {(done.stdout + done.stderr).strip()}", cure="run the same command again")
