"""The rules for ELF modules: allow-lists, so that everything else is refused by its name.

Each rule is of a kind that made a loader refuse or kill a module, or let a module do what the audit did not see. The limits are the
loader's (glibc's elf/dl-load.c and dl-version.c) and those of the linkers that make our modules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

from . import symbols
from .elf import (
    ALLOCATED,
    DEBUG_SECTIONS,
    DYNAMIC,
    EH_FRAME,
    ENTRY,
    EXECUTE,
    LOAD,
    NO_BITS,
    NOTE,
    PROPERTY,
    READ,
    RELOCATION,
    RELRO,
    SECTION,
    STACK,
    SYMBOL,
    TAGS,
    TLS,
    WRITE,
    Elf,
    Segment,
)
from .model import BinaryError
from .symbols import THREAD

IDENT = {b"\x7fELF\2\1\1" + bytes([system]) + bytes(8) for system in (0, 3)}  # System V, or GNU where a symbol is STB_GNU_UNIQUE
SHARED = 3
SEGMENTS = {LOAD: "LOAD", DYNAMIC: "DYNAMIC", NOTE: "NOTE", TLS: "TLS"} | {
    EH_FRAME: "GNU_EH_FRAME",
    STACK: "GNU_STACK",
    RELRO: "GNU_RELRO",
    PROPERTY: "GNU_PROPERTY",
}
PAGES = {"x86_64": 0x1000}
LARGEST_PAGE = 0x10000  # of aarch64 kernels
LARGEST_ALIGNMENT = 0x200000  # of linkers that align to huge pages; loaders cannot map one that is much larger
MOST_UNSTORED = 2**26  # bytes of zeros behind a segment's own, which the system has to give at once
FLAGS, FLAGS_1 = {0x1: "ORIGIN", 0x8: "BIND_NOW"}, {0x1: "NOW", 0x80: "ORIGIN"}
FIXED = {"SYMENT": SYMBOL.size, "RELAENT": RELOCATION.size, "PLTREL": 7}
TOGETHER = (
    ("SYMTAB", "STRTAB", "STRSZ", "SYMENT"),
    ("RELA", "RELASZ", "RELAENT"),
    ("JMPREL", "PLTRELSZ", "PLTREL"),
    ("VERNEED", "VERNEEDNUM"),
    ("VERDEF", "VERDEFNUM"),
    ("INIT_ARRAY", "INIT_ARRAYSZ"),
    ("FINI_ARRAY", "FINI_ARRAYSZ"),
)
BUILD_ID, PROPERTIES = 3, 5  # notes of GNU's
FEATURE_1_AND = {0xC0000002, 0xC0000000}  # IBT and SHSTK, BTI and PAC
ISA_NEEDED, ISA_USED, ISA_BASELINE = 0xC0008002, 0xC0010002, 1
# Sections that stay behind what is loaded; the last two come with the start files of AlmaLinux, of which manylinux is made.
UNLOADED = {".comment", ".shstrtab", ".gnu.build.attributes", ".annobin.notes"}


def faults(elf: Elf) -> Iterator[str]:
    """The problems, one sentence each; a rule that cannot read on says so, and the others still run."""
    for rule in (
        _header,
        _segments,
        _loads,
        _inside,
        _dynamic,
        _tables,
        _twice_told,
        _of_sections,
        _thread_local,
        *symbols.RULES,
        _notes,
        _rest,
    ):
        yield from _asked(rule, elf)


def _asked(rule: Callable[[Elf], Iterator[str]], elf: Elf) -> Iterator[str]:
    try:
        yield from rule(elf)
    except (BinaryError, IndexError, struct.error) as error:
        yield f"is damaged: {error}"


def _header(elf: Elf) -> Iterator[str]:
    header = elf.header
    if header.ident not in IDENT:
        yield f"has the identification {header.ident.hex()}, expected that of System V or GNU, version 0, and zeros"
    for name, found, expected in (
        ("type", header.type, SHARED),
        ("version", header.version, 1),
        ("flags", header.flags, 0),
        ("header size", header.size, 64),
        ("offset of program headers", header.segments_at, 64),
    ):
        if found != expected:
            yield f"has the ELF {name} {found:#x}, expected {expected:#x}"
    if not header.sections_at or not header.sections or header.section_size != SECTION.size:
        yield "has no section headers, expected those of the linker: without them no tool sees what is in it"


def _segments(elf: Elf) -> Iterator[str]:
    for each in elf.segments:
        name = SEGMENTS.get(each.type)
        if name is None:
            yield f"has a segment of type {each.type:#x}, expected only {', '.join(SEGMENTS.values())}"
        elif each.flags & ~(READ | WRITE | EXECUTE) or (each.flags & EXECUTE and each.type not in {LOAD, STACK}):
            yield f"has a {name} segment with the flags {each.flags:#x}, expected it to be data that is read"
        if each.physical != each.address:
            yield f"has a segment of the physical address {each.physical:#x}, expected that of memory, {each.address:#x}"
    for kind, least, most in ((LOAD, 1, 8), (DYNAMIC, 1, 1), (STACK, 1, 1), (TLS, 0, 1), (RELRO, 1, 1), (EH_FRAME, 1, 1), (PROPERTY, 0, 1)):
        if not least <= len(elf.of(kind)) <= most:
            yield f"has {len(elf.of(kind))} {SEGMENTS[kind]} segments, expected {least} to {most}"


def _loads(elf: Elf) -> Iterator[str]:
    page = PAGES.get(elf.machine, LARGEST_PAGE)
    for each in elf.loads:
        where = f"has a LOAD segment at {each.offset:#x}"
        if not page <= each.align <= LARGEST_ALIGNMENT or each.align & (each.align - 1):
            most = f"{LARGEST_ALIGNMENT:#x}"
            yield f"{where} that is aligned to {each.align:#x}, expected a power of two from {page:#x}, as kernels have pages, to {most}"
        elif (each.address - each.offset) % each.align:
            yield f"{where} for the address {each.address:#x}, expected both to be alike modulo {each.align:#x}: no loader accepts it"
        if each.offset + each.stored > len(elf.data):
            yield f"{where} of {each.stored:#x} bytes, expected it to end in the file of {len(elf.data):#x}: it would be killed (SIGBUS)"
        if not each.stored <= each.size <= each.stored + MOST_UNSTORED:
            yield f"{where} of {each.stored:#x} bytes and {each.size:#x} in memory, expected a little more in memory than in the file"
        if each.flags not in {READ, READ | EXECUTE, READ | WRITE}:
            yield f"{where} with the flags {each.flags:#x}, expected it readable, and writable or executable but never both"
    for one, two in pairwise(elf.loads):
        if two.address < one.address + one.size or two.offset < one.offset + one.stored:
            yield f"has LOAD segments that overlap at {two.address:#x}, expected them one behind the other"
        elif two.address // page == (one.address + one.size - 1) // page:
            yield f"has two LOAD segments in the page of {two.address:#x}, expected pages of {page:#x} bytes for each"
    if elf.loads and (elf.loads[0].offset or elf.loads[0].address):
        yield f"loads its first segment from {elf.loads[0].offset:#x} to {elf.loads[0].address:#x}, expected the beginning of the file at 0"


def _inside(elf: Elf) -> Iterator[str]:
    """Every other segment is a part of one that is loaded, in the file as in memory."""
    for each in elf.segments:
        if each.type in {LOAD, STACK} or each.type not in SEGMENTS:
            continue
        # A TLS segment of zeros alone may say any place.
        if (each.stored or each.type == DYNAMIC) and not any(_holds(load, each) for load in elf.loads):
            yield f"has a {SEGMENTS[each.type]} segment at {each.address:#x} that is not a part of a loaded one, expected it inside"
        if each.align & (each.align - 1):
            yield f"has a {SEGMENTS[each.type]} segment that is aligned to {each.align:#x}, expected a power of two"
        if each.type != TLS and each.size != each.stored:
            yield f"has a {SEGMENTS[each.type]} segment of {each.stored:#x} bytes and {each.size:#x} in memory, expected the same"
    for each in elf.of(STACK):
        if each.stored or each.size or each.offset or each.address:
            yield "has a GNU_STACK segment with a place or a size, expected only its flags"


def _holds(load: Segment, part: Segment) -> bool:
    return (
        load.address <= part.address
        and part.address + part.stored <= load.address + load.stored
        and part.offset - part.address == load.offset - load.address
    )


def _dynamic(elf: Elf) -> Iterator[str]:
    for (segment,) in [elf.of(DYNAMIC)] if len(elf.of(DYNAMIC)) == 1 else []:
        behind = segment.offset + ENTRY.size * (len(elf.entries) + 1), segment.offset + segment.stored
        if any(elf.data[slice(*behind)]) or segment.stored % ENTRY.size:
            yield "has data behind the end of its dynamic section, expected zeros"
    seen = set[int]()
    for tag, value in elf.entries:
        name = TAGS.get(tag)
        if name is None:
            yield f"has the dynamic tag {_tag(tag)} ({value:#x}), expected only what a linker writes into a module"
        elif tag in seen and name != "NEEDED":
            yield f"has the dynamic tag DT_{name} twice, expected it once"
        elif name in FIXED and value != FIXED[name]:
            yield f"has DT_{name} {value}, expected {FIXED[name]}"
        seen.add(tag)
    for name, allowed in (("FLAGS", FLAGS), ("FLAGS_1", FLAGS_1)):
        if wrong := elf.tags.get(name, 0) & ~sum(allowed):
            yield f"has DT_{name} {elf.tags[name]:#x}, expected only {' and '.join(allowed.values())}, without {_flags(name, wrong)}"
    for group in TOGETHER:
        if there := [name for name in group if name in elf.tags]:
            yield from (f"has DT_{there[0]} without DT_{name}, expected both" for name in group if name not in there)
    if "SYMTAB" not in elf.tags:
        yield "has no table of symbols (DT_SYMTAB), expected one: no loader finds anything in it"


# Names of dynamic tags (DT_…) that are refused.
REFUSED = {16: "SYMBOLIC", 17: "REL", 21: "DEBUG", 22: "TEXTREL", 32: "PREINIT_ARRAY", 36: "RELR", 0x7FFFFFFD: "AUXILIARY"} | {
    0x7FFFFFFF: "FILTER",
    0x6FFFFEFB: "DEPAUDIT",
    0x6FFFFEFC: "AUDIT",
}
REFUSED_FLAGS = {
    "FLAGS": {2: "SYMBOLIC", 4: "TEXTREL", 16: "STATIC_TLS"},
    "FLAGS_1": {0x8: "NODELETE", 0x40: "NOOPEN", 0x400: "INTERPOSE", 0x800: "NODEFLIB", 0x08000000: "PIE"},
}


def _tag(tag: int) -> str:
    return f"DT_{REFUSED[tag]}" if tag in REFUSED else f"{tag:#x}"


def _flags(name: str, value: int) -> str:
    bits = [1 << number for number in range(64) if value >> number & 1]
    return ", ".join(REFUSED_FLAGS[name].get(each, f"{each:#x}") for each in bits)


def _tables(elf: Elf) -> Iterator[str]:
    """Code where code is loaded, and what the loader writes to where it can."""
    for name, needs in (("INIT", EXECUTE), ("FINI", EXECUTE), ("PLTGOT", WRITE), ("INIT_ARRAY", WRITE), ("FINI_ARRAY", WRITE)):
        if name in elf.tags and not _allows(elf, elf.tags[name], needs, max(1, elf.tags.get(f"{name}SZ", 1))):
            what = "executable" if needs == EXECUTE else "writable"
            yield f"has DT_{name} at {elf.tags[name]:#x}, expected it in a segment that is {what}"
        if elf.tags.get(f"{name}SZ", 0) % 8:
            yield f"has DT_{name}SZ {elf.tags[f'{name}SZ']}, expected whole addresses"


# Where the linker says once more, in section headers, what the dynamic section says: two witnesses, whom one wrong byte sets at odds.
PLACES = {"HASH": ".hash", "GNU_HASH": ".gnu.hash", "SYMTAB": ".dynsym", "STRTAB": ".dynstr", "VERSYM": ".gnu.version"} | {
    "VERNEED": ".gnu.version_r",
    "RELA": ".rela.dyn",
    "JMPREL": ".rela.plt",
    "INIT": ".init",
    "FINI": ".fini",
    "INIT_ARRAY": ".init_array",
    "FINI_ARRAY": ".fini_array",
}
SIZES = {"STRSZ": ".dynstr", "RELASZ": ".rela.dyn", "PLTRELSZ": ".rela.plt"} | {
    f"{each}_ARRAYSZ": f".{each.lower()}_array" for each in ("INIT", "FINI")
}


def _twice_told(elf: Elf) -> Iterator[str]:
    sections = {each.name: each for each in elf.sections}
    told = {name: (elf.tags.get(name), PLACES[name], "address") for name in PLACES} | {
        name: (elf.tags.get(name), SIZES[name], "size") for name in SIZES
    }
    for name, (value, section, field) in told.items():
        there = sections.get(section)
        if (value is None) != (there is None):
            yield f"has {f'DT_{name}' if value is not None else f'a section {section}'} alone, expected DT_{name} and a section {section}"
        elif there is not None and value != getattr(there, field):
            yield f"has DT_{name} {value:#x}, expected {getattr(there, field):#x}, the {field} of its section {section}"
    if "PLTGOT" in elf.tags and elf.tags["PLTGOT"] not in {sections[each].address for each in (".got", ".got.plt") if each in sections}:
        yield f"has DT_PLTGOT {elf.tags['PLTGOT']:#x}, expected the address of its section .got or .got.plt"
    for each in elf.of(DYNAMIC):
        if (there := sections.get(".dynamic")) and (each.address, each.stored) != (there.address, there.size):
            yield f"has a dynamic section at {each.address:#x}, expected it at {there.address:#x}, the address of its section .dynamic"
    if (there := sections.get(".dynsym")) and there.size != len(elf.symbols) * SYMBOL.size:
        yield f"has {len(elf.symbols)} symbols, expected {there.size // SYMBOL.size} by its section .dynsym"


def _of_sections(elf: Elf) -> Iterator[str]:
    """Loaded segments are what the linker put together, with its permissions to read, write or run."""
    for load in elf.loads:
        inside = [each for each in elf.sections if each.flags & ALLOCATED and 0 <= each.address - load.address < load.size]
        inside = [each for each in inside if not (each.flags & THREAD and each.type == NO_BITS)]  # which takes no place here
        flags = READ | sum(flag for flag, of_section in ((WRITE, 1), (EXECUTE, 4)) if any(each.flags & of_section for each in inside))
        if load.flags != flags:
            yield f"has a LOAD segment at {load.offset:#x} with the flags {load.flags:#x}, expected {flags:#x}, those of its sections"
        size = max((each.address + each.size - load.address for each in inside), default=0)
        stored = max((each.address + each.size - load.address for each in inside if each.type != NO_BITS), default=0)
        if (load.stored, load.size) != (stored, size):
            found = f"{load.stored:#x} bytes and {load.size:#x} in memory"
            yield f"has a LOAD segment at {load.offset:#x} of {found}, expected {stored:#x} and {size:#x}, those of its sections"


def _thread_local(elf: Elf) -> Iterator[str]:
    """Thread-local storage is what the linker put into .tdata and .tbss."""
    inside = [each for each in elf.sections if each.flags & ALLOCATED and each.flags & THREAD]
    expected = []
    if inside:
        start = min(each.address for each in inside)
        ends = [start, *(each.address + each.size for each in inside if each.type != NO_BITS)]
        size = max(each.address + each.size for each in inside) - start
        expected = [(start, max(ends) - start, size, max(each.align for each in inside))]
    if (found := [(each.address, each.stored, each.size, each.align) for each in elf.of(TLS)]) != expected:
        shown = [" ".join(f"{value:#x}" for value in each[0]) if each else "none" for each in (found, expected)]
        yield f"has a TLS segment (address, p_filesz, p_memsz, p_align) {shown[0]}, expected {shown[1]}, that of its sections"


def _allows(elf: Elf, address: int, flag: int, size: int = 1) -> bool:
    return any(each.flags & flag and each.address <= address and address + size <= each.address + each.size for each in elf.loads)


def _notes(elf: Elf) -> Iterator[str]:
    """A note can make a loader refuse: of the system or the processor that a module is for."""
    for segment in (*elf.of(NOTE), *elf.of(PROPERTY)):
        align, place, end = max(4, segment.align), segment.offset, segment.offset + segment.stored
        while place < end:
            size, described, kind = elf.unpack(struct.Struct("<3I"), place)
            start = place + -(-(12 + size) // align) * align
            owner = bytes(elf.data[place + 12 : place + 12 + size]).rstrip(b"\0").decode(errors="replace")
            if owner != "GNU" or kind not in {BUILD_ID, PROPERTIES}:
                yield f"has a note of {owner or 'nobody'}, type {kind:#x}, expected only GNU's build id and properties"
            elif kind == PROPERTIES:
                yield from _properties(bytes(elf.data[start : start + described]))
            place = start + -(-described // align) * align


def _properties(data: bytes) -> Iterator[str]:
    while len(data) >= 8:
        kind, size = struct.unpack_from("<2I", data)
        value, data = int.from_bytes(data[8 : 8 + size], "little"), data[8 + -(-size // 8) * 8 :]
        if kind == ISA_NEEDED and value & ~ISA_BASELINE:
            yield f"needs a processor of x86-64-v{value.bit_length()}, expected the baseline (no -march): older ones are refused"
        elif kind not in FEATURE_1_AND | {ISA_NEEDED, ISA_USED}:
            yield f"has the GNU property {kind:#x}, expected only those of branch protection and of the processor"


def _rest(elf: Elf) -> Iterator[str]:
    """Bytes of the file that are never loaded are the linker's; nothing comes after them."""
    behind = max((each.offset + each.stored for each in elf.loads), default=0)
    kept = (*UNLOADED, *(each for each in (".strtab",) if any(section.name == ".symtab" for section in elf.sections)))  # see `stripped`
    beside = [each for each in elf.sections if each.type and not each.flags & ALLOCATED]
    odd = [each for each in beside if each.name not in kept and not each.name.startswith(DEBUG_SECTIONS)]
    yield from (f"has the section {each.name!r}, expected none but {', '.join(sorted(UNLOADED))} beside what is loaded" for each in odd)
    parts = [(each.offset, each.offset + each.size) for each in beside if each.type != NO_BITS]
    header = elf.header
    parts.append((header.sections_at, header.sections_at + header.sections * SECTION.size))
    for start, end in sorted(parts):
        if start >= behind and any(elf.data[behind:start]):
            yield f"has {start - behind} bytes at {behind:#x} that belong to nothing, expected none"
        behind = max(behind, end)
    if len(elf.data) != behind:
        yield f"has {len(elf.data)} bytes, expected {behind}: nothing belongs behind the file's own"
