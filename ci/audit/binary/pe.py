"""Windows DLLs and extension modules, by pefile."""

from __future__ import annotations

from typing import Any

import pefile

from .model import Binary

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
    )


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
