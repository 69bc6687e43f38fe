"""The rules for an ELF module's dynamic symbols, and their sources: relocations, the hash table, symbol versions, names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from .elf import LOCAL, RELOCATION, RELRO, TLS, UNDEFINED, WEAK, WRITE, Elf, Section, Symbol

# The relocations of a module, by their numbers on each machine. No IRELATIVE: it runs code before the loader is done.
ADDRESS, SYMBOLS, RELATIVE, THREADS = "an address", "GLOB_DAT or JUMP_SLOT", "RELATIVE", "thread-local data"
KINDS = {
    "x86_64": {1: ADDRESS, 6: SYMBOLS, 7: SYMBOLS, 8: RELATIVE, 16: THREADS, 17: THREADS, 18: THREADS, 36: THREADS},
    "aarch64": {257: ADDRESS, 1025: SYMBOLS, 1026: SYMBOLS, 1027: RELATIVE, 1028: THREADS, 1029: THREADS, 1030: THREADS, 1031: THREADS},
}
MOST_ADDED = 2**31  # to the address of a symbol
OTHERS = {"aarch64": {0, 3, 0x80, 0x83}}  # visible, or that and bound inside; of aarch64 also those of vector calls
SECTION_SYMBOL = 3
TLS_SYMBOL, THREAD = 6, 0x400  # a kind of symbol, and the flag of its section
BINDINGS, SYMBOL_KINDS = {LOCAL, 1, WEAK, 10}, {0, 1, 2, 6}  # 10: STB_GNU_UNIQUE; no kind 10, STT_GNU_IFUNC, nor what loaders pass over


def relocations(elf: Elf) -> Iterator[str]:
    kinds = _kinds(elf)
    page = 0x1000  # the smallest: what the loader protects
    places = [(each.address, each.address + each.size - 8) for each in elf.loads if each.flags & WRITE]
    for kind in sorted({info & 0xFFFFFFFF for _, info, _ in elf.relocations} - kinds.keys()):
        yield f"has relocations of type {kind}, expected only those that modules of {elf.machine} have"
    if lost := [place for place, _, _ in elf.relocations if not any(low <= place <= high for low, high in places)]:
        yield f"has {len(lost)} relocations of what is not writable, such as {lost[0]:#x}, expected none: loaders refuse them or are killed"
    count = elf.tags.get("RELACOUNT", 0)
    size = elf.tags.get("RELASZ", 0) // RELOCATION.size
    if count > size or any(kinds.get(info) != RELATIVE for _, info, _ in elf.relocations[:count]):
        yield f"has DT_RELACOUNT {count}, expected that many relative relocations first: loaders do not look at their types"
    at_once = [info >> 32 for _, info, _ in elf.relocations[:size] if info >> 32]
    for symbols in ([symbol for symbol, _ in groupby(at_once)], [info >> 32 for _, info, _ in _lazy(elf) if info >> 32]):
        if twice := [symbol for symbol, count in Counter(symbols).items() if count > 1]:
            yield f"has relocations of the symbol {min(twice)} in two places, expected them together, as linkers sort them (-z combreloc)"
    relro = [(each.address, (each.address + each.size) // page * page) for each in elf.of(RELRO)]
    if not elf.tags.get("FLAGS_1", 0) & 1 and any(low <= place < high for place, _, _ in _lazy(elf) for low, high in relro):
        yield "has a GNU_RELRO segment over what is bound when it is called first, expected that to stay writable"


def relocated(elf: Elf) -> Iterator[str]:
    """The kind of each relocation."""
    kinds, symbols = _kinds(elf), elf.symbols
    for place, info, addend in elf.relocations:
        kind, number = kinds.get(info & 0xFFFFFFFF), info >> 32
        thread = bool(number) and symbols[number].kind == TLS_SYMBOL
        what = f"has a relocation of {kind} at {place:#x}"
        if kind == RELATIVE and (number or not any(0 <= addend <= each.address + each.size for each in elf.loads)):
            yield f"{what} that leads out of the module, expected an address inside and no symbol"
        elif kind == SYMBOLS and (not number or thread or addend):
            yield f"{what} with the symbol {number} and the addend {addend:#x}, expected a symbol that is no thread-local one, and 0"
        elif kind == ADDRESS and (not number or thread or abs(addend) >= MOST_ADDED):
            yield f"{what} with the symbol {number} and the addend {addend:#x}, expected a symbol that is no thread-local one, and less"
        elif kind == THREADS and number and not thread:
            yield f"{what} with the symbol {number}, expected none or a thread-local one"


def _kinds(elf: Elf) -> dict[int, str]:
    return KINDS.get(elf.machine, {})


def _lazy(elf: Elf) -> tuple[tuple[int, int, int], ...]:
    return elf.relocations[elf.tags.get("RELASZ", 0) // RELOCATION.size :]


def symbols(elf: Elf) -> Iterator[str]:
    for each in elf.symbols[:1]:
        if each.name or each.value or each.section:
            yield f"begins its symbols with {each.name!r}, expected the empty one"
    seen = OTHERS.get(elf.machine, {0, 3})
    used = {info >> 32 for _, info, _ in elf.relocations}
    thread = sum(each.size for each in elf.of(TLS))
    for number, each in enumerate(elf.symbols[1:], 1):
        name = f"has the symbol {each.name!r}"
        of_section = each.kind == SECTION_SYMBOL and each.binding == LOCAL and not each.name and each.section  # GNU's ld for aarch64
        if not of_section and (each.binding not in BINDINGS or each.kind not in SYMBOL_KINDS):
            yield f"{name} of binding {each.binding} and type {each.kind}, expected only data, functions and TLS"
        if each.other not in seen or (each.section == UNDEFINED and each.other & 3):
            yield f"{name} of visibility {each.other:#x}, expected that others see it"
        if each.section == UNDEFINED:
            if each.value or each.binding == LOCAL:
                yield f"{name} at {each.value:#x} and of nowhere, expected only a name that others define"
            if number not in used:
                yield f"{name} of elsewhere and no use for it, expected a relocation"
        elif each.section >= len(elf.sections) or not _lies_in(elf.sections[each.section], each, thread):
            yield f"{name} at {each.value:#x}, expected it inside its section, {each.section}"


def _lies_in(section: Section, symbol: Symbol, thread: int) -> bool:
    """A thread-local symbol is counted from the beginning of the TLS segment, of `thread` bytes."""
    if (symbol.kind == TLS_SYMBOL) != bool(section.flags & THREAD):
        return False
    if symbol.kind == TLS_SYMBOL:
        return symbol.value < thread
    return section.address > 0 and section.address <= symbol.value <= section.address + section.size


def hashed(elf: Elf) -> Iterator[str]:
    """Loaders find a symbol by its hash alone."""
    table = elf.hash_table
    if table is None:
        yield "has no GNU hash table (DT_GNU_HASH), expected one: no loader finds anything in it"
        return
    exported = {number for number, each in enumerate(elf.symbols) if each.section != UNDEFINED and each.binding != LOCAL}
    if lost := sorted(exported - elf.hashed.keys()):
        yield f"exports {elf.symbols[lost[0]].name!r} and its hash table does not lead to it, expected every export to be found"
    if odd := sorted(elf.hashed.keys() - exported):
        yield f"has a hash table that leads to {elf.symbols[odd[0]].name!r}, which it does not export, expected exports alone"
    words, shift = len(table.filter), table.shift
    if not words or words & (words - 1) or shift > 31:
        yield f"has a hash table with a filter of {words} words and the shift {shift}, expected a power of two and less than 32"
        return
    for number, found in elf.hashed.items():
        name = elf.symbols[number].name
        value = gnu_hash(name)
        bits = 1 << value % 64 | 1 << (value >> shift) % 64
        head = table.heads[value % len(table.heads)]
        if found != value | 1 or table.filter[value // 64 % words] & bits != bits or not 0 < head <= number:
            yield f"has a hash table that does not lead to {name!r}, expected every symbol to be found"
            return


def gnu_hash(name: str) -> int:
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


def versions(elf: Elf) -> Iterator[str]:
    needed = set(elf.strings("NEEDED"))
    asked = {each.version for each in elf.symbols}
    for need in elf.needs:
        if need.hash != elf_hash(need.name):
            yield f"needs {need.name} by the hash {need.hash:#x}, expected {elf_hash(need.name):#x}: loaders compare it first"
        if need.library not in needed:
            yield f"needs {need.name} of {need.library}, expected it among the libraries that it needs"
        if need.number in {0, 1}:
            yield f"needs {need.name} by the number {need.number}, expected another: these two mean no version"
        elif need.number not in asked:
            yield f"needs {need.name} of {need.library} for no symbol, expected one that uses it"
    if "VERNEEDNUM" in elf.tags and (count := len({need.library for need in elf.needs})) != elf.tags["VERNEEDNUM"]:
        yield f"has DT_VERNEEDNUM {elf.tags['VERNEEDNUM']}, expected {count}, the libraries that it has versions of"
    if len(known := {need.number for need in elf.needs}) != len(elf.needs):
        yield "has two needed symbol versions of one number, expected a number for each"
    if "VERNEED" in elf.tags and "VERSYM" not in elf.tags:
        yield "has DT_VERNEED without DT_VERSYM, expected both"
    if "VERDEF" in elf.tags:
        yield "has symbol versions of its own, expected none of a module"
    if lost := [each for each in elf.symbols if each.version not in {0, 1} | known]:
        yield f"has the symbol {lost[0].name!r} of version number {lost[0].version}, expected one that it needs"


def strings(elf: Elf) -> Iterator[str]:
    """Linkers write no string that nothing names: one left over has lost its name to another."""
    start, size = elf.string_table
    table = bytes(elf.data[start : start + size])
    named = {"", *(each.name for each in elf.symbols), *(name for need in elf.needs for name in (need.library, need.name))}
    named |= {name for tag in ("NEEDED", "SONAME", "RPATH", "RUNPATH") for name in elf.strings(tag)}
    if left := sorted({each.decode(errors="backslashreplace") for each in table.split(b"\0")} - named):
        yield f"has the string {left[0]!r} that nothing names, expected a use of each"


RULES = (relocations, relocated, symbols, hashed, versions, strings)
