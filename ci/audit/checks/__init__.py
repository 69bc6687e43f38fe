"""The checks, each a small function ``(wheel, policy) -> (member, what is wrong)…``. docs/audit.md lists them."""

from __future__ import annotations

from . import binaries, contents, device, libraries, metadata, sbom  # noqa: F401  (they register their checks, in this order)
from .registry import ACROSS, CHECKS

__all__ = ["ACROSS", "CHECKS", "SAME_DEVICE", "SAME_METADATA"]

SAME_METADATA, SAME_DEVICE = "same-metadata", "same-device"
