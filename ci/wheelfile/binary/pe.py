"""Windows DLLs and extension modules, by pefile."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import pefile

from .model import Binary, BinaryError

MACHINES = {0x8664: "amd64", 0xAA64: "arm64", 0x14C: "win32"}
READ_BY_PEFILE = ("DEBUG", "RESOURCE")
COFF_SYMBOL_SIZE = 18


def read(data: bytes) -> Binary:
    image = pefile.PE(data=data, fast_load=True)
    image.parse_data_directories([pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"] for name in READ_BY_PEFILE])
    headers = tuple(_header_faults(image))
    certificate = 0 if headers else _certificate(image, data)
    places = headers or tuple(_directory_faults(image))  # directories that are not where they should be cannot be read
    imports, exports = ([], {}) if places else (list(_imports(image)), _exports(image))
    faults = headers or (
        *_section_faults(image, data, certificate),
        *places,
        *_superfluous(image, certificate),
        *_symbol_faults(imports, exports),
    )
    return Binary(
        format="pe",
        machine=MACHINES.get(image.FILE_HEADER.Machine, hex(image.FILE_HEADER.Machine)),
        soname=None,
        needed=tuple(dict.fromkeys(dll for dll, _ in imports)),
        exports=frozenset(exports),
        used=frozenset(name for _, names in imports for name in names),
        debug=_debug_sections(image, data),
        pdb=next((_text(entry.entry.PdbFileName) for entry in getattr(image, "DIRECTORY_ENTRY_DEBUG", ()) if _names_pdb(entry)), None),
        company=_company(image),
        signed=certificate > 0,
        faults=faults or tuple(f"is strange to pefile: {each}" for each in image.get_warnings()[:1]),
    )


# The headers and sections that the linkers of MSVC and of GNU write into a DLL.
IMAGE_BASES, SECTION_ALIGNMENT, FILE_ALIGNMENT = 0x10000, 0x1000, 0x200
FIELDS = {
    "Magic": {0x20B},  # of 64 bits
    "SizeOfOptionalHeader": {0xF0},
    "NumberOfRvaAndSizes": {16},
    "Subsystem": {2, 3},  # of windows and of consoles; others are of drivers and firmware
    "MajorSubsystemVersion": {5, 6},  # the Windows that it asks for: 5.2 by GNU's linker, 6.0 by MSVC's
    "MinorSubsystemVersion": {0, 2},
    "SectionAlignment": {SECTION_ALIGNMENT},
    "FileAlignment": {FILE_ALIGNMENT},
}
FLAGS = {  # those that have to be there, and those that may
    "Characteristics": (0x2022, 0x20C),  # EXECUTABLE_IMAGE, LARGE_ADDRESS_AWARE, DLL; what was stripped, but never RELOCS_STRIPPED
    "DllCharacteristics": (0x140, 0x4020),  # DYNAMIC_BASE (ASLR), NX_COMPAT; HIGH_ENTROPY_VA, GUARD_CF
}
LONGEST_STUB = 0x200  # the program for DOS and MSVC's list of tools, before the header
WRITABLE, EXECUTABLE, SHARED = 0x80000000, 0x20000000, 0x10000000
SECTIONS = 0xE0 | 0xF00000 | 0x02000000 | 0x40000000 | WRITABLE | EXECUTABLE | SHARED  # what it holds, alignment, DISCARDABLE, READ
DIRECTORIES = tuple(name.removeprefix("IMAGE_DIRECTORY_ENTRY_") for name, _ in pefile.directory_entry_types)
FULL = ("IMPORT", "BASERELOC")  # without relocations a DLL has no ASLR
EMPTY = ("SECURITY", "COM_DESCRIPTOR", "COPYRIGHT", "GLOBALPTR", "BOUND_IMPORT", "RESERVED")  # certificates, .NET, what no linker writes
PADDING = b"PADDINGXXPADDING"  # behind resources, by Windows' own tools
MOST_SYMBOLS, LONGEST_SYMBOL = 2**16, 4096  # ordinals have 16 bits; MSVC shortens longer names
IMPORTS = {"IMPORT": (20, 12, (0, 16)), "DELAY_IMPORT": (32, 4, (16,))}  # descriptors: their size, where the DLL stands, the functions
BY_ORDINAL = 1 << 63
SIGNATURE = struct.Struct("<IHH")  # WIN_CERTIFICATE: dwLength, wRevision (2.0), wCertificateType (PKCS_SIGNED_DATA)


def _header_faults(image: Any) -> Iterator[str]:
    parts = (image.FILE_HEADER, image.OPTIONAL_HEADER)
    fields = {name: getattr(part, name) for part in parts for name in (*FIELDS, *FLAGS) if hasattr(part, name)}
    for name, allowed in FIELDS.items():
        if fields[name] not in allowed:
            yield f"has the {name} {fields[name]:#x}, expected {' or '.join(map(hex, sorted(allowed)))}"
    for name, (required, optional) in FLAGS.items():
        if fields[name] & ~optional != required:
            yield f"has the {name} {fields[name]:#x}, expected {required:#x}, and of others only those of {optional:#x}"
    if image.OPTIONAL_HEADER.ImageBase % IMAGE_BASES:
        yield f"has the ImageBase {image.OPTIONAL_HEADER.ImageBase:#x}, expected a multiple of {IMAGE_BASES:#x}"
    if image.DOS_HEADER.e_lfanew > LONGEST_STUB:
        yield f"has the e_lfanew {image.DOS_HEADER.e_lfanew:#x}, expected at most {LONGEST_STUB:#x}"


def _section_faults(image: Any, data: bytes, certificate: int) -> Iterator[str]:
    """Sections follow one another, in memory and in the file, without gaps and up to the end."""
    optional = image.OPTIONAL_HEADER
    sections = sorted(image.sections, key=lambda section: section.get_file_offset())  # pefile sorts them by their addresses
    headers = optional.get_file_offset() + image.FILE_HEADER.SizeOfOptionalHeader + sum(section.sizeof() for section in sections)
    address, end = _aligned(headers, SECTION_ALIGNMENT), _aligned(headers, FILE_ALIGNMENT)
    if optional.SizeOfHeaders != end:
        yield f"has the SizeOfHeaders {optional.SizeOfHeaders:#x}, expected {end:#x}"
    if any(data[headers:end]):
        yield "has bytes behind its headers, expected zeros"
    for section in sections:
        name, flags, size, raw = _text(section.Name), section.Characteristics, section.Misc_VirtualSize, section.SizeOfRawData
        if flags & WRITABLE and flags & EXECUTABLE:
            yield f"has the section {name} that is writable and executable, expected never both"
        if flags & ~SECTIONS:
            yield f"has the section {name} of the flags {flags:#x}, expected only those of code and data"
        if flags & SHARED:
            yield f"has the section {name} that all processes share, expected none"
        if section.VirtualAddress != address:
            yield f"has the section {name} at the VirtualAddress {section.VirtualAddress:#x}, expected {address:#x}"
        if section.PointerToRawData != (end if raw else 0):
            yield f"has the section {name} at the PointerToRawData {section.PointerToRawData:#x}, expected {end if raw else 0:#x}"
        if not size or raw % FILE_ALIGNMENT or raw > _aligned(size, FILE_ALIGNMENT):
            yield f"has the section {name} of the VirtualSize {size:#x} and the SizeOfRawData {raw:#x}, expected no more than it needs"
        elif any(gap := data[section.PointerToRawData + size : section.PointerToRawData + raw]) and gap not in PADDING * FILE_ALIGNMENT:
            yield f"has bytes behind the section {name}, expected zeros"
        address, end = _aligned(address + size, SECTION_ALIGNMENT), end + raw
    if optional.SizeOfImage != address:
        yield f"has the SizeOfImage {optional.SizeOfImage:#x}, expected {address:#x}"
    if len(data) != end + certificate:
        yield f"has {len(data)} bytes, expected {end + certificate}: nothing belongs behind the file's own"


def _directory_faults(image: Any) -> Iterator[str]:
    for name in DIRECTORIES:
        place = _directory(image, name)
        if name in FULL and not (place.VirtualAddress and place.Size):
            yield f"has no {name} directory, expected one"
        elif name not in EMPTY and (place.VirtualAddress or place.Size) and not _section(image, place.VirtualAddress, place.Size):
            yield f"has the {name} directory at {place.VirtualAddress:#x}, of {place.Size:#x} bytes, expected it inside a section"
    entry = image.OPTIONAL_HEADER.AddressOfEntryPoint
    start = _section(image, entry, 1)
    if not (start and start.Characteristics & EXECUTABLE):
        yield f"has the AddressOfEntryPoint {entry:#x}, expected it inside a section of code"


def _superfluous(image: Any, certificate: int) -> Iterator[str]:
    for name in EMPTY:
        place = _directory(image, name)
        if (place.VirtualAddress or place.Size) and not (name == "SECURITY" and certificate):
            yield f"has a {name} directory, expected none"


def _certificate(image: Any, data: bytes) -> int:
    """The size of the Authenticode signature that ends the file and names its SHA-256; 0 where none does. Who signed it is not asked."""
    place = _directory(image, "SECURITY")  # whose "address" is a place in the file
    start, size = place.VirtualAddress, place.Size
    if start + size != len(data) or data[start : start + SIGNATURE.size] != SIGNATURE.pack(size, 0x200, 2):
        return 0
    checksum, entry = image.OPTIONAL_HEADER.get_file_offset() + 64, place.get_file_offset()
    digest = hashlib.sha256(data[:checksum] + data[checksum + 4 : entry] + data[entry + 8 : start]).digest()
    return size if digest in data[start:] else 0


def _symbol_faults(imports: list[tuple[str, list[str]]], exports: dict[str, str]) -> Iterator[str]:
    """Things that hide the names of DLLs and of their functions from a reader."""
    for dll, names in imports:
        if dll.lower().startswith("python") and (numbers := dict.fromkeys(name for name in names if name.startswith("#"))):
            yield f"imports {', '.join(numbers)} of {dll} by ordinal, expected imports by name: they show what is in the stable ABI"
    for name, other in exports.items():
        if other:
            yield f"exports {name}, which {other} has, expected functions of its own"


def _imports(image: Any) -> Iterator[tuple[str, list[str]]]:
    """Each DLL and what is asked of it, by ordinal as #5. pefile skips what it does not know, and names some ordinals."""
    seen = 0
    for directory, (size, dll, tables) in IMPORTS.items():
        place = _directory(image, directory)
        address, end = place.VirtualAddress, place.VirtualAddress + (2**32 if directory == "IMPORT" else place.Size)  # Windows asks no Size
        while address < end and (text := _number(descriptor := image.get_data(address, size), dll)):
            entries = [entry for table in tables for entry in _thunks(image, _number(descriptor, table))]  # Windows may read either
            if (seen := seen + len(entries) + 1) > 2 * MOST_SYMBOLS:
                raise BinaryError(f"not readable as PE: imports more than {MOST_SYMBOLS} symbols")
            names = [f"#{entry & 0xFFFF}" if entry & BY_ORDINAL else _string(image, entry + 2) for entry in entries]
            yield _string(image, text), names
            address += size


def _thunks(image: Any, address: int) -> Iterator[int]:
    while address and (entry := int.from_bytes(image.get_data(address, 8), "little")):
        yield entry
        address += 8


def _number(data: bytes, place: int) -> int:
    return int(struct.unpack_from("<I", data, place)[0])


def _directory(image: Any, name: str) -> Any:
    return image.OPTIONAL_HEADER.DATA_DIRECTORY[pefile.DIRECTORY_ENTRY[f"IMAGE_DIRECTORY_ENTRY_{name}"]]


def _exports(image: Any) -> dict[str, str]:
    """The exported names, and where another DLL has the function, its place there. pefile takes a minute for those of a large DLL."""
    place = _directory(image, "EXPORT")
    if not place.VirtualAddress:
        return {}
    functions, names, *at = struct.unpack("<5I", image.get_data(place.VirtualAddress + 20, 20))
    if max(functions, names) > MOST_SYMBOLS:
        raise BinaryError(f"not readable as PE: exports {max(functions, names)} symbols, expected at most {MOST_SYMBOLS}")
    addresses = struct.unpack(f"<{functions}I", image.get_data(at[0], 4 * functions))
    texts = struct.unpack(f"<{names}I", image.get_data(at[1], 4 * names))
    ordinals = struct.unpack(f"<{names}H", image.get_data(at[2], 2 * names))
    found = {}
    for number, text in enumerate(texts):
        address = addresses[ordinals[number]]
        forwarded = place.VirtualAddress <= address < place.VirtualAddress + place.Size
        found[_string(image, text)] = _string(image, address) if forwarded else ""
    return found


def _string(image: Any, address: int) -> str:
    return _text(image.get_string_at_rva(address, LONGEST_SYMBOL) or b"")


def _section(image: Any, address: int, size: int) -> Any:
    """The section that holds these bytes."""
    return next((each for each in image.sections if 0 <= address - each.VirtualAddress <= each.Misc_VirtualSize - size), None)


def _aligned(number: int, to: int) -> int:
    return -(-number // to) * to


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _names_pdb(entry: Any) -> bool:
    return bool(getattr(entry.entry, "PdbFileName", None))


def _debug_sections(image: Any, data: bytes) -> tuple[str, ...]:
    """DWARF sections and the COFF symbol table, as GNU tools leave them; a long name is an offset into the string table behind."""
    header = image.FILE_HEADER
    strings = header.PointerToSymbolTable + COFF_SYMBOL_SIZE * header.NumberOfSymbols
    names = [_text(section.Name) for section in image.sections]
    long_names = [data[strings + int(name[1:]) :].partition(b"\0")[0] for name in names if name.startswith("/") and name[1:].isdigit()]
    symbol_table = ["COFF symbol table"] if header.NumberOfSymbols else []
    return (*symbol_table, *(_text(name) for name in long_names if name.startswith((b".debug", b".zdebug", b".stab"))))


def _company(image: Any) -> str | None:
    for information in getattr(image, "FileInfo", ()):
        for entry in information:
            for table in getattr(entry, "StringTable", ()):
                if b"CompanyName" in table.entries:
                    return _text(table.entries[b"CompanyName"])
    return None
