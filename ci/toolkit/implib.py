"""Windows import libraries, made from what a DLL exports.

The index ships cuBLAS, cuDNN and NVRTC for Windows as DLLs only. This writes the archive that LIB.EXE would, as the PE/COFF
specification describes it ("Archive (Library) File Format", "Import Library Format"); it needs no tools and runs on any system.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pefile

_AMD64 = 0x8664
_ADDR32NB = 3  # relocation: 32 bit address relative to the image base
_INITIALIZED, _READ, _WRITE, _EXECUTE = 0x40, 0x40000000, 0x80000000, 0x20000000
_EXTERNAL, _STATIC, _SECTION = 2, 3, 104  # storage classes of symbols


@dataclass(frozen=True)
class Export:
    """A name that a DLL exports: a function, or data (which has no thunk, so that only ``__imp_NAME`` is defined)."""

    name: str
    data: bool = False


def exports(dll: Path) -> list[Export]:
    """The named exports of a DLL."""
    with pefile.PE(str(dll), fast_load=True) as pe:
        if pe.FILE_HEADER.Machine != _AMD64:
            raise ValueError(f"{dll} is not a 64 bit x86 library")
        pe.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"]])
        found = []
        for symbol in pe.DIRECTORY_ENTRY_EXPORT.symbols if hasattr(pe, "DIRECTORY_ENTRY_EXPORT") else ():
            if symbol.name:
                section = pe.get_section_by_rva(symbol.address)
                executable = symbol.forwarder or (section is not None and section.Characteristics & _EXECUTE)
                found.append(Export(symbol.name.decode("ascii"), data=not executable))
        return found


def library_name(dll: str) -> str | None:
    """``cublasLt64_12.dll`` -> ``cublasLt.lib``, as CUDA's own import libraries are named; None for a DLL that is not linked."""
    match = re.fullmatch(r"([A-Za-z]\w*?)(?:64)?_\d+(?:_\d+)*\.dll", dll)
    return f"{match[1]}.lib" if match else None


def write(path: Path, dll: str, symbols: Iterable[Export]) -> None:
    """Write the import library of ``dll`` to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive(dll, sorted(symbols, key=lambda symbol: symbol.name)))


def archive(dll: str, symbols: list[Export]) -> bytes:
    """The import library as bytes: equal input gives equal bytes."""
    stem = dll.rsplit(".", 1)[0]
    descriptor, end_of_thunks = f"__IMPORT_DESCRIPTOR_{stem}", f"\x7f{stem}_NULL_THUNK_DATA"
    end_of_descriptors = "__NULL_IMPORT_DESCRIPTOR"
    members: list[tuple[list[str], bytes]] = [
        ([descriptor], _descriptor(dll, descriptor, end_of_descriptors, end_of_thunks)),
        ([end_of_descriptors], _coff([_Part(".idata$3", b"\0" * 20)], [_Symbol(end_of_descriptors, 1, _EXTERNAL)])),
        ([end_of_thunks], _coff([_Part(".idata$5", b"\0" * 8), _Part(".idata$4", b"\0" * 8)], [_Symbol(end_of_thunks, 1, _EXTERNAL)])),
        *(_short_import(dll, symbol, hint) for hint, symbol in enumerate(symbols)),
    ]
    return _archive(dll, members)


def _short_import(dll: str, symbol: Export, hint: int) -> tuple[list[str], bytes]:
    names = [f"__imp_{symbol.name}"] if symbol.data else [symbol.name, f"__imp_{symbol.name}"]
    strings = symbol.name.encode() + b"\0" + dll.encode() + b"\0"
    kind = int(symbol.data) | 1 << 2  # imported by name
    return names, struct.pack("<HHHHIIHH", 0, 0xFFFF, 0, _AMD64, 0, len(strings), hint & 0xFFFF, kind) + strings


@dataclass(frozen=True)
class _Part:
    """A section of an object file; ``relocations`` are (offset, symbol index)."""

    name: str
    data: bytes
    relocations: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int  # 1-based; 0 is undefined
    storage: int


def _descriptor(dll: str, descriptor: str, end_of_descriptors: str, end_of_thunks: str) -> bytes:
    """The object with the DLL's entry in the import table. Its undefined symbols pull in the two terminators."""
    symbols = [
        _Symbol(descriptor, 1, _EXTERNAL),
        _Symbol(".idata$2", 1, _SECTION),
        _Symbol(".idata$6", 2, _STATIC),
        _Symbol(".idata$4", 0, _SECTION),
        _Symbol(".idata$5", 0, _SECTION),
        _Symbol(end_of_descriptors, 0, _EXTERNAL),
        _Symbol(end_of_thunks, 0, _EXTERNAL),
    ]
    name = dll.encode() + b"\0"
    name += b"\0" * (len(name) % 2)
    # IMAGE_IMPORT_DESCRIPTOR: the lookup table is at 0, the DLL's name at 12, the address table at 16.
    return _coff([_Part(".idata$2", b"\0" * 20, ((12, 2), (0, 3), (16, 4))), _Part(".idata$6", name)], symbols)


def _coff(parts: list[_Part], symbols: list[_Symbol]) -> bytes:
    """An object file."""
    position = 20 + 40 * len(parts)
    headers, bodies = b"", b""
    for part in parts:
        relocations = b"".join(struct.pack("<IIH", offset, symbol, _ADDR32NB) for offset, symbol in part.relocations)
        align = 0x00300000 if len(part.data) % 4 == 0 else 0x00200000  # 4 or 2 bytes
        if part.name in {".idata$4", ".idata$5"}:
            align = 0x00400000  # 8 bytes: addresses
        headers += struct.pack(
            "<8sIIIIIIHHI", part.name.encode(), 0, 0, len(part.data), position, position + len(part.data) if relocations else 0, 0,
            len(part.relocations), 0, _INITIALIZED | _READ | _WRITE | align,
        )  # fmt: skip
        bodies += part.data + relocations
        position += len(part.data) + len(relocations)
    strings, table = b"", b""
    for symbol in symbols:
        name = symbol.name.encode()
        if len(name) > 8:
            strings, name = strings + name + b"\0", struct.pack("<II", 0, 4 + len(strings))
        table += struct.pack("<8sIhHBB", name, 0, symbol.section, 0, symbol.storage, 0)
    header = struct.pack("<HHIIIHH", _AMD64, len(parts), 0, position, len(symbols), 0, 0)
    return header + headers + bodies + table + struct.pack("<I", 4 + len(strings)) + strings


def _archive(dll: str, members: list[tuple[list[str], bytes]]) -> bytes:
    """The archive with both symbol directories: the first in file order, the second sorted by name."""
    count = sum(len(names) for names, _ in members)
    size_of_names = sum(len(name) + 1 for names, _ in members for name in names)
    long_name = dll.encode() + b"\0"
    first_size = 4 + 4 * count + size_of_names
    second_size = 4 + 4 * len(members) + 4 + 2 * count + size_of_names
    position = 8 + sum(60 + size + size % 2 for size in (first_size, second_size, len(long_name)))
    offsets = []
    for _, data in members:
        offsets.append(position)
        position += 60 + len(data) + len(data) % 2

    listed = [(name, index) for index, (names, _) in enumerate(members) for name in names]
    first = struct.pack(f">I{count}I", count, *(offsets[index] for _, index in listed))
    first += b"".join(name.encode() + b"\0" for name, _ in listed)
    by_name = sorted(listed, key=lambda entry: entry[0].encode())
    second = struct.pack(f"<I{len(offsets)}II", len(offsets), *offsets, count)
    second += struct.pack(f"<{count}H", *(index + 1 for _, index in by_name)) + b"".join(name.encode() + b"\0" for name, _ in by_name)
    return b"!<arch>\n" + b"".join(
        [_member("/", first), _member("/", second), _member("//", long_name), *(_member("/0", data) for _, data in members)]
    )


def _member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{'':<6}{'':<6}{0:<8}{len(data):<10}`\n"
    return header.encode() + data + b"\n" * (len(data) % 2)
