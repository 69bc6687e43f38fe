"""Windows DLLs and extension modules, by pefile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pefile

from .model import Binary

if TYPE_CHECKING:
    from collections.abc import Iterator

MACHINES = {0x8664: "amd64", 0xAA64: "arm64", 0x14C: "win32"}
DIRECTORIES = ("IMPORT", "DELAY_IMPORT", "DEBUG", "RESOURCE")
COFF_SYMBOL_SIZE = 18


def read(data: bytes) -> Binary:
    # Not the exports: those of a large DLL take pefile a minute.
    image = pefile.PE(data=data, fast_load=True)
    image.parse_data_directories([pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"] for name in DIRECTORIES])
    imports = [*getattr(image, "DIRECTORY_ENTRY_IMPORT", ()), *getattr(image, "DIRECTORY_ENTRY_DELAY_IMPORT", ())]
    return Binary(
        format="pe",
        machine=MACHINES.get(image.FILE_HEADER.Machine, hex(image.FILE_HEADER.Machine)),
        soname=None,
        needed=tuple(dict.fromkeys(_text(entry.dll) for entry in imports)),
        used=frozenset(_text(each.name) for entry in imports for each in entry.imports if each.name),
        debug=_debug_sections(image, data),
        pdb=next((_text(entry.entry.PdbFileName) for entry in getattr(image, "DIRECTORY_ENTRY_DEBUG", ()) if _names_pdb(entry)), None),
        company=_company(image),
        faults=tuple(_faults(image, data)),
    )


# Optional header and sections, as the linkers of MSVC and of GNU write them into a module.
DLL, PE32_PLUS, SUBSYSTEMS = 0x2000, 0x20B, {2, 3}  # of windows and of consoles; others are of drivers and firmware
REQUIRED = {0x40: "DYNAMIC_BASE (ASLR)", 0x100: "NX_COMPAT"}
ALLOWED = 0x20 | sum(REQUIRED) | 0x4000  # and HIGH_ENTROPY_VA, GUARD_CF; with FORCE_INTEGRITY Windows refuses what is not signed
WRITABLE, EXECUTABLE, SHARED = 0x80000000, 0x20000000, 0x10000000
SECTIONS = 0xE0 | 0xF00000 | 0x02000000 | 0x40000000 | WRITABLE | EXECUTABLE | SHARED  # what it holds, alignment, DISCARDABLE, READ
EMPTY = ("SECURITY", "COM_DESCRIPTOR", "COPYRIGHT", "GLOBALPTR", "BOUND_IMPORT")  # certificates, .NET, and what no linker writes today


def _faults(image: Any, data: bytes) -> Iterator[str]:
    """What Windows does not load, or no linker of ours makes."""
    header, optional = image.FILE_HEADER, image.OPTIONAL_HEADER
    if not header.Characteristics & DLL or optional.Magic != PE32_PLUS or optional.Subsystem not in SUBSYSTEMS:
        kind = f"characteristics {header.Characteristics:#x}, magic {optional.Magic:#x}, subsystem {optional.Subsystem}"
        yield f"is not a DLL of 64 bits ({kind}), expected one"
    flags = optional.DllCharacteristics
    for flag, name in REQUIRED.items():
        if not flags & flag:
            yield f"has the DLL characteristics {flags:#x}, expected {name} among them"
    if flags & ~ALLOWED:
        yield f"has the DLL characteristics {flags:#x}, expected none but {flags & ALLOWED:#x} of them"
    for name in EMPTY:
        directory = optional.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"]]
        if directory.VirtualAddress or directory.Size:
            yield f"has a {name} directory, expected none"
    end = max(optional.SizeOfHeaders, header.PointerToSymbolTable and _end_of_symbols(header, data))
    for section in image.sections:
        name, flags = _text(section.Name), section.Characteristics
        if flags & WRITABLE and flags & EXECUTABLE:
            yield f"has the section {name} that is writable and executable, expected never both"
        if flags & ~SECTIONS:
            yield f"has the section {name} of the flags {flags:#x}, expected only those of code and data"
        if flags & SHARED:
            yield f"has the section {name} that all processes share, expected none"
        if section.PointerToRawData + section.SizeOfRawData > len(data):
            yield f"has the section {name} that ends behind the file of {len(data)} bytes, expected it inside"
        end = max(end, section.PointerToRawData + section.SizeOfRawData)
    if len(data) > end:
        yield f"has {len(data)} bytes, expected {end}: nothing belongs behind the file's own"


def _end_of_symbols(header: Any, data: bytes) -> int:
    """Where the COFF symbols that `stripped` tells of, and their strings, end."""
    strings = int(header.PointerToSymbolTable + COFF_SYMBOL_SIZE * header.NumberOfSymbols)
    return strings + int.from_bytes(data[strings : strings + 4], "little")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _names_pdb(entry: Any) -> bool:
    return bool(getattr(entry.entry, "PdbFileName", None))


def _debug_sections(image: Any, data: bytes) -> tuple[str, ...]:
    """DWARF sections and the COFF symbol table, as GNU tools leave them; a long name is an offset into the string table behind."""
    header = image.FILE_HEADER
    strings = header.PointerToSymbolTable + COFF_SYMBOL_SIZE * header.NumberOfSymbols
    names = [_text(section.Name) for section in image.sections]
    long_names = [data[strings + int(name[1:]) :].split(b"\0", 1)[0] for name in names if name.startswith("/") and name[1:].isdigit()]
    symbol_table = ["COFF symbol table"] if header.NumberOfSymbols else []
    return (*symbol_table, *(_text(name) for name in long_names if name.startswith((b".debug", b".zdebug", b".stab"))))


def _company(image: Any) -> str | None:
    for information in getattr(image, "FileInfo", ()):
        for entry in information:
            for table in getattr(entry, "StringTable", ()):
                if b"CompanyName" in table.entries:
                    return _text(table.entries[b"CompanyName"])
    return None
