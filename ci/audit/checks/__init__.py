"""The checks, each a small function ``(wheel, policy) -> (member, what is wrong)…``. docs/factory/audit.md lists them."""

from __future__ import annotations

# They register their checks, in this order.
# ruff: isort: off
from . import contents, device, metadata, sbom, binaries, libraries  # noqa: F401

# ruff: isort: on
from .registry import ACROSS, CHECKS, FIXES

__all__ = ["ACROSS", "CHECKS", "FIXES", "SAME_DEVICE", "SAME_METADATA"]

SAME_DEVICE, SAME_METADATA = ACROSS  # by their names
