"""What an ELF module may be: allow-lists, so that what nobody thought of is refused by its name.

Each rule is of a kind that made a loader refuse or kill a module, or let a module do what the audit did not see. The limits are the
loader's (glibc's elf/dl-load.c and dl-version.c) and those of the linkers that make our modules.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from .elf import (
    ALLOCATED,
    DEBUG_SECTIONS,
    DYNAMIC,
    EH_FRAME,
    ENTRY,
    EXECUTE,
    LOAD,
    LOCAL,
    MACHINES,
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
    UNDEFINED,
    WEAK,
    WRITE,
)
from .model import BinaryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .elf import Elf, Section, Segment, Symbol

IDENT = {b"\x7fELF\2\1\1" + bytes([system]) + bytes(8) for system in (0, 3)}  # System V, or GNU where a symbol is STB_GNU_UNIQUE
SHARED = 3
SEGMENTS = {LOAD: "LOAD", DYNAMIC: "DYNAMIC", NOTE: "NOTE", TLS: "TLS", EH_FRAME: "GNU_EH_FRAME", STACK: "GNU_STACK"} | {
    RELRO: "GNU_RELRO",
    PROPERTY: "GNU_PROPERTY",
}
PAGES = {"x86_64": 0x1000}
LARGEST_PAGE = 0x10000  # of aarch64 kernels
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
RELATIVE = {"x86_64": 8, "aarch64": 1027}
RELOCATIONS = {  # of x86_64 64, GLOB_DAT, JUMP_SLOT, RELATIVE, DTPMOD64, DTPOFF64, TPOFF64, TLSDESC; of aarch64 the same. No IRELATIVE
    "x86_64": {1, 6, 7, 8, 16, 17, 18, 36},
    "aarch64": {257, 1025, 1026, 1027, 1028, 1029, 1030, 1031},
}
OTHERS = {"aarch64": {0, 3, 0x80, 0x83}}  # visible, or that and bound inside; of aarch64 also those of vector calls
SECTION_SYMBOL = 3
TLS_SYMBOL, THREAD = 6, 0x400  # a kind of symbol, and the flag of the sections that they lie in
BINDINGS, KINDS = {LOCAL, 1, WEAK, 10}, {0, 1, 2, 6}  # 10: STB_GNU_UNIQUE; no kind 10, STT_GNU_IFUNC, nor what loaders pass over
BUILD_ID, PROPERTIES = 3, 5  # notes of GNU's
FEATURE_1_AND = {0xC0000002, 0xC0000000}  # IBT and SHSTK, BTI and PAC
ISA_NEEDED, ISA_USED, ISA_BASELINE = 0xC0008002, 0xC0010002, 1
UNLOADED = {".comment", ".shstrtab"}  # sections that stay behind what is loaded


def faults(elf: Elf) -> Iterator[str]:
    """What is wrong, one sentence each; a rule that cannot read on says so, and the others are still asked."""
    for rule in (
        *(
            _header,
            _segments,
            _loads,
            _inside,
            _dynamic,
            _tables,
            _twice_told,
            _of_sections,
            _relocations,
            _symbols,
            _hash,
            _versions,
            _strings,
        ),
        *(_notes, _rest),
    ):
        yield from _asked(rule, elf)


def _asked(rule: Callable[[Elf], Iterator[str]], elf: Elf) -> Iterator[str]:
    try:
        yield from rule(elf)
    except BinaryError as error:
        yield f"is damaged: {error}"


def _machine(elf: Elf) -> str:
    return MACHINES.get(elf.header.machine, "")


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
    page = PAGES.get(_machine(elf), LARGEST_PAGE)
    for each in elf.loads:
        where = f"has a LOAD segment at {each.offset:#x}"
        if each.align < page or each.align & (each.align - 1):
            yield f"{where} that is aligned to {each.align:#x}, expected a power of two and at least {page:#x}: kernels have such pages"
        elif (each.address - each.offset) % each.align:
            yield f"{where} for the address {each.address:#x}, expected both to be alike modulo {each.align:#x}: no loader takes it"
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
        if each.type == TLS and not each.stored <= each.size <= each.stored + MOST_UNSTORED:
            yield f"has a TLS segment of {each.stored:#x} bytes and {each.size:#x} in memory, expected a little more in memory"
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
    if "SYMTAB" not in elf.tags or not elf.tags.keys() & {"GNU_HASH", "HASH"}:
        yield "has no table of symbols with its hash, expected both: no loader finds anything in it"


# What those who refuse a module call what is not on the lists.
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
    """What is loaded is what the linker put together, as it may be read, written or run."""
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


def _allows(elf: Elf, address: int, flag: int, size: int = 1) -> bool:
    return any(each.flags & flag and each.address <= address and address + size <= each.address + each.size for each in elf.loads)


def _relocations(elf: Elf) -> Iterator[str]:
    machine = _machine(elf)
    page = 0x1000  # the smallest: what the loader protects
    places = [(each.address, each.address + each.size - 8) for each in elf.loads if each.flags & WRITE]
    odd = {info & 0xFFFFFFFF for _, info, _ in elf.relocations} - RELOCATIONS.get(machine, set())
    for kind in sorted(odd):
        yield f"has relocations of type {kind}, expected only those that modules of {machine or 'a known machine'} have"
    if lost := [place for place, _, _ in elf.relocations if not any(low <= place <= high for low, high in places)]:
        yield f"has {len(lost)} relocations of what is not writable, such as {lost[0]:#x}, expected none: loaders refuse them or are killed"
    count = elf.tags.get("RELACOUNT", 0)
    size = elf.tags.get("RELASZ", 0) // RELOCATION.size
    if count > size or any(info != RELATIVE.get(machine) for _, info, _ in elf.relocations[:count]):
        yield f"has DT_RELACOUNT {count}, expected that many relative relocations first: loaders do not look at their types"
    at_once = [info >> 32 for _, info, _ in elf.relocations[:size] if info >> 32]
    for symbols in ([symbol for symbol, _ in groupby(at_once)], [info >> 32 for _, info, _ in _lazy(elf) if info >> 32]):
        if twice := [symbol for symbol, count in Counter(symbols).items() if count > 1]:
            yield f"has relocations of the symbol {min(twice)} in two places, expected them together, as linkers sort them (-z combreloc)"
    end = max((each.address + each.size for each in elf.loads), default=0)
    relro = [(each.address, (each.address + each.size) // page * page) for each in elf.of(RELRO)]
    if not elf.tags.get("FLAGS_1", 0) & 1 and any(low <= place < high for place, _, _ in _lazy(elf) for low, high in relro):
        yield "has a GNU_RELRO segment over what is bound when it is called first, expected that to stay writable"
    if any(not 0 <= addend <= end for _, info, addend in elf.relocations if info == RELATIVE.get(machine)):
        yield "has relative relocations that lead out of the module, expected them inside"


def _lazy(elf: Elf) -> tuple[tuple[int, int, int], ...]:
    return elf.relocations[elf.tags.get("RELASZ", 0) // RELOCATION.size :]


def _symbols(elf: Elf) -> Iterator[str]:
    for each in elf.symbols[:1]:
        if each.name or each.value or each.section:
            yield f"begins its symbols with {each.name!r}, expected the empty one"
    seen = OTHERS.get(_machine(elf), {0, 3})
    used = {info >> 32 for _, info, _ in elf.relocations}
    for number, each in enumerate(elf.symbols[1:], 1):
        name = f"has the symbol {each.name!r}"
        of_section = each.kind == SECTION_SYMBOL and each.binding == LOCAL and not each.name and each.section  # GNU's ld for aarch64
        if not of_section and (each.binding not in BINDINGS or each.kind not in KINDS):
            yield f"{name} of binding {each.binding} and type {each.kind}, expected only data, functions and TLS"
        if each.other not in seen or (each.section == UNDEFINED and each.other & 3):
            yield f"{name} of visibility {each.other:#x}, expected that others see it"
        if each.section == UNDEFINED:
            if each.value or each.binding == LOCAL:
                yield f"{name} at {each.value:#x} and of nowhere, expected only a name that others define"
            if number not in used:
                yield f"{name} of elsewhere and no use for it, expected a relocation"
        elif each.section >= len(elf.sections) or not _lies_in(elf.sections[each.section], each):
            yield f"{name} at {each.value:#x}, expected it inside its section, {each.section}"


def _lies_in(section: Section, symbol: Symbol) -> bool:
    if (symbol.kind == TLS_SYMBOL) != bool(section.flags & THREAD):
        return False
    return symbol.kind == TLS_SYMBOL or (section.address > 0 and section.address <= symbol.value <= section.address + section.size)


def _hash(elf: Elf) -> Iterator[str]:
    """Loaders find a symbol by its hash alone."""
    if "GNU_HASH" not in elf.tags:
        return
    exported = [number for number, each in enumerate(elf.symbols) if each.section != UNDEFINED and each.binding != LOCAL]
    lost = [elf.symbols[number] for number in exported if number not in elf.hashed]
    if lost:
        yield f"exports {lost[0].name!r} and its hash table does not lead to it, expected every export to be found"
    place = elf.place(elf.tags["GNU_HASH"], 16)
    buckets, _, words, shift = elf.unpack(struct.Struct("<4I"), place)
    bloom = elf.unpack(struct.Struct(f"<{words}Q"), place + 16)
    heads = elf.unpack(struct.Struct(f"<{buckets}I"), place + 16 + 8 * words)
    if not words or words & (words - 1) or shift > 31:
        yield f"has a hash table with a filter of {words} words and the shift {shift}, expected a power of two and less than 32"
        return
    for number, found in elf.hashed.items():
        name = elf.symbols[number].name
        value = _gnu_hash(name)
        bits = 1 << value % 64 | 1 << (value >> shift) % 64
        if found != value | 1 or bloom[value // 64 % words] & bits != bits or not 0 < heads[value % buckets] <= number:
            yield f"has a hash table that does not lead to {name!r}, expected every symbol to be found"
            return


def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def elf_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & ~(value & 0xF0000000)
    return value & 0xFFFFFFFF


def _versions(elf: Elf) -> Iterator[str]:
    needed = set(elf.strings("NEEDED"))
    for need in elf.needs:
        if need.hash != elf_hash(need.name):
            yield f"needs {need.name} by the hash {need.hash:#x}, expected {elf_hash(need.name):#x}: loaders compare it first"
        if need.library not in needed:
            yield f"needs {need.name} of {need.library}, expected it among the libraries that it needs"
    if "VERNEEDNUM" in elf.tags and (count := len({need.library for need in elf.needs})) != elf.tags["VERNEEDNUM"]:
        yield f"has DT_VERNEEDNUM {elf.tags['VERNEEDNUM']}, expected {count}, the libraries that it has versions of"
    if len(known := {need.number for need in elf.needs}) != len(elf.needs) or known & {0, 1}:
        yield "has two needed symbol versions of one number, expected a number for each"
    if "VERNEED" in elf.tags and "VERSYM" not in elf.tags:
        yield "has DT_VERNEED without DT_VERSYM, expected both"
    if "VERDEF" in elf.tags:
        yield "has symbol versions of its own, expected none of a module"
    if lost := [each for each in elf.symbols if each.version not in {0, 1} | known]:
        yield f"has the symbol {lost[0].name!r} of version number {lost[0].version}, expected one that it needs"


def _strings(elf: Elf) -> Iterator[str]:
    """Linkers write no string that nothing names: one left over has lost its name to another."""
    start, size = elf.string_table
    table = bytes(elf.data[start : start + size])
    named = {"", *(each.name for each in elf.symbols), *(name for need in elf.needs for name in (need.library, need.name))}
    named |= {name for tag in ("NEEDED", "SONAME", "RPATH", "RUNPATH") for name in elf.strings(tag)}
    if left := sorted({each.decode("utf-8", "backslashreplace") for each in table.split(b"\0")} - named):
        yield f"has the string {left[0]!r} that nothing names, expected a use of each"


def _notes(elf: Elf) -> Iterator[str]:
    """A note can make a loader refuse: of the system or the processor that a module is for."""
    for segment in (*elf.of(NOTE), *elf.of(PROPERTY)):
        align, place, end = max(4, segment.align), segment.offset, segment.offset + segment.stored
        while place < end:
            size, described, kind = elf.unpack(struct.Struct("<3I"), place)
            start = place + -(-(12 + size) // align) * align
            owner = bytes(elf.data[place + 12 : place + 12 + size]).rstrip(b"\0").decode("ascii", "replace")
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
    """What is in the file and never loaded is the linker's, byte by byte; nothing lies behind it."""
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
