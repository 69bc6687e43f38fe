"""What is taken from a stranger at most."""

from __future__ import annotations

MAX_BYTES = 512 * 2**20  # of a zip, of a wheel, and of what either holds: five times a complete release at its size budget
MAX_ENTRIES = 10_000
