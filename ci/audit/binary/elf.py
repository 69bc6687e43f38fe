"""ELF shared objects, by pyelftools."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from typing import Any, BinaryIO

from elftools.elf.elffile import ELFFile

from .model import Binary, BinaryError

MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_386": "i686"}
MOST_PARTS, MOST_VERSIONS = 1_000, 10_000
DEBUG_SECTIONS = (".symtab", ".debug_", ".zdebug_", ".stab")


def read(data: bytes) -> Binary:
    elf = ELFFile(BytesIO(data))
    # These numbers are the file's own, and pyelftools counts up to them: four thousand million of nothing would take a day.
    if max(elf.num_sections(), elf.num_segments()) > MOST_PARTS:
        raise BinaryError("it has too many sections or segments")
    return _read(elf)


def exports(stream: BinaryIO) -> frozenset[str]:
    """The exported symbols alone, read from an open file: NVIDIA's libraries are too large to be read whole."""
    return _symbols(ELFFile(stream))[2]


def _read(elf: Any) -> Binary:
    tags = [tag for segment in elf.iter_segments("PT_DYNAMIC") for tag in segment.iter_tags()]
    paths = [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"] + [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    undefined, asked_of, exports = _symbols(elf)
    machine = elf["e_machine"]
    return Binary(
        format="elf",
        machine=MACHINES.get(machine, str(machine)),
        soname=next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), None),
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        rpath=tuple(entry for path in paths for entry in path.split(":")),
        versions=_versions(elf),
        undefined=undefined,
        asked_of=asked_of,
        exports=exports,
        debug=tuple(section.name for section in elf.iter_sections() if section.name.startswith(DEBUG_SECTIONS)),
        executable_stack=_executable_stack(elf),
    )


def _versions(elf: Any) -> dict[str, frozenset[str]]:
    found = dict[str, set[str]]()
    for need, version in _needs(elf):
        found.setdefault(need.name, set()).add(version.name)
    return {name: frozenset(versions) for name, versions in found.items()}


def _needs(elf: Any) -> Iterator[tuple[Any, Any]]:
    """The symbol versions, each with the library that it is needed of."""
    section = elf.get_section_by_name(".gnu.version_r")
    number = 0
    for need, versions in section.iter_versions() if section else ():
        for version in chain([None], versions):
            number += 1
            if number > MOST_VERSIONS:
                raise BinaryError("it has too many symbol versions")
            if version:
                yield need, version


def _symbols(elf: Any) -> tuple[frozenset[str], dict[str, str], frozenset[str]]:
    """The undefined symbols, the library that each versioned one of them is asked of, and the exported symbols."""
    table, versions = (elf.get_section_by_name(name) for name in (".dynsym", ".gnu.version"))
    libraries = {version["vna_other"]: need.name for need, version in _needs(elf)}
    undefined, asked_of, exports = set(), dict[str, str](), set()
    for index, symbol in enumerate(table.iter_symbols() if table else ()):
        binding = symbol["st_info"]["bind"]
        if not symbol.name or binding == "STB_LOCAL":
            continue
        if symbol["st_shndx"] != "SHN_UNDEF":
            exports.add(symbol.name)
        elif binding != "STB_WEAK":
            undefined.add(symbol.name)
            if versions and (library := libraries.get(versions.get_symbol(index)["ndx"])):
                asked_of[symbol.name] = library
    return frozenset(undefined), asked_of, frozenset(exports)


def _executable_stack(elf: Any) -> bool:
    """Whether loading asks for an executable stack; without the header the x86 ABI's default is yes."""
    for segment in elf.iter_segments("PT_GNU_STACK"):
        return bool(segment["p_flags"] & 1)
    return bool(elf["e_machine"] == "EM_X86_64")
