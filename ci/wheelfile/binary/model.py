"""A native binary, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Format = Literal["elf", "pe"]


class BinaryError(Exception):
    """A file that carries the magic number of a binary but cannot be read as one."""


@dataclass(frozen=True)
class Binary:
    """The properties of a binary for the loader and the audit, in the same words for ELF and PE."""

    format: Format
    machine: str  # as platform tags spell it: x86_64, aarch64, amd64
    soname: str | None
    needed: tuple[str, ...]  # DT_NEEDED, or the imported DLLs, delay-loaded ones included
    rpath: tuple[str, ...] = ()  # DT_RPATH and DT_RUNPATH entries
    versions: Mapping[str, frozenset[str]] = field(default_factory=dict)  # needed symbol versions, by the library they are asked of
    undefined: frozenset[str] = frozenset()  # undefined symbols, weak ones left out
    asked_of: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # those of them with a version: its library and its name
    exports: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()  # the names of all symbols that others can see, weak ones and exports included; of a PE the imports
    debug: tuple[str, ...] = ()  # what stripping would have removed
    pdb: str | None = None  # path of the debug database that a PE names
    company: str | None = None  # CompanyName of a PE's version resource
    signed: bool = False  # a PE that ends with a signature of what it is
    executable_stack: bool = False
    faults: tuple[str, ...] = ()  # loaders refuse it, or mlx-cuda's linkers never write it
