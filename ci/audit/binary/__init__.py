"""Readers for native binaries: ELF, PE, and the CUDA fatbins inside either."""

from __future__ import annotations

from .model import Binary, BinaryError

__all__ = ["Binary", "BinaryError", "parse"]


def parse(data: bytes) -> Binary | None:
    """Read a binary by its magic number; None if `data` is neither ELF nor PE."""
    if data[:4] == b"\x7fELF":
        from . import elf

        return elf.read(data)
    if data[:2] == b"MZ":
        from . import pe

        return pe.read(data)
    return None
