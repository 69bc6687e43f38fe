"""Readers for native binaries: ELF, PE, and the CUDA fatbins inside either."""

from __future__ import annotations

from dataclasses import replace

from .model import Binary, BinaryError

__all__ = ["Binary", "BinaryError", "parse"]


def parse(data: bytes) -> Binary | None:
    """Read a binary by its magic number; None if `data` is neither ELF nor PE."""
    try:
        if data[:4] == b"\x7fELF":
            from . import elf, rules

            read = elf.Elf(data)
            return replace(elf.described(read), faults=tuple(rules.faults(read)))
        if data[:2] == b"MZ":
            from . import pe

            return pe.read(data)
    except Exception as error:  # pefile checks little of what it reads: a spoilt file shows as almost any
        raise BinaryError(f"not readable as {'PE' if data[:2] == b'MZ' else 'ELF'}: {error}") from error
    return None
