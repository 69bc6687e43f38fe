"""ELF shared objects as the loader reads them: from the program headers and the dynamic section, never from section headers.

Not by LIEF, which reads damaged files without a word and weighs 12 MB, nor by pyelftools, whose segments know no symbol versions: what is
read here is also judged byte by byte (rules.py), and neither library says which bytes it trusted (docs/factory/audit.md).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, NamedTuple

from .model import Binary, BinaryError

MACHINES = {62: "x86_64", 183: "aarch64", 3: "i686"}
LOAD, DYNAMIC, NOTE, TLS, EH_FRAME, STACK, RELRO, PROPERTY = 1, 2, 4, 7, 0x6474E550, 0x6474E551, 0x6474E552, 0x6474E553
EXECUTE, WRITE, READ = 1, 2, 4
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT, SECTION, ENTRY, SYMBOL, RELOCATION = (struct.Struct(f"<{each}") for each in ("IIQQQQQQ", "IIQQQQIIQQ", "QQ", "IBBHQQ", "QQq"))
NEED, AUXILIARY = struct.Struct("<HHIII"), struct.Struct("<IHHII")
NO_BITS, ALLOCATED = 8, 2
UNDEFINED, LOCAL, WEAK = 0, 0, 2
DEBUG_SECTIONS = (".symtab", ".debug_", ".zdebug_", ".stab")
MOST_PARTS, MOST_SYMBOLS, MOST_VERSIONS, MOST_RELOCATIONS = 1_000, 1_000_000, 10_000, 4_000_000
LONGEST = 2**16  # characters of a name

# The dynamic tags that a module may have, by the names that readelf gives them.
TAGS = {
    number: name
    for start, names in (
        (1, "NEEDED PLTRELSZ PLTGOT HASH STRTAB SYMTAB RELA RELASZ RELAENT STRSZ SYMENT INIT FINI SONAME RPATH"),
        (20, "PLTREL"),
        (23, "JMPREL BIND_NOW INIT_ARRAY FINI_ARRAY INIT_ARRAYSZ FINI_ARRAYSZ RUNPATH FLAGS"),
        (0x6FFFFEF5, "GNU_HASH TLSDESC_PLT TLSDESC_GOT"),
        (0x6FFFFFF0, "VERSYM"),
        (0x6FFFFFF9, "RELACOUNT"),
        (0x6FFFFFFB, "FLAGS_1 VERDEF VERDEFNUM VERNEED VERNEEDNUM"),
        (0x70000001, "AARCH64_BTI_PLT"),
        (0x70000003, "AARCH64_PAC_PLT"),
        (0x70000005, "AARCH64_VARIANT_PCS"),
    )
    for number, name in enumerate(names.split(), start)
}


class Header(NamedTuple):
    ident: bytes
    type: int
    machine: int
    version: int
    entry: int
    segments_at: int
    sections_at: int
    flags: int
    size: int
    segment_size: int
    segments: int
    section_size: int
    sections: int
    names_in: int


class Segment(NamedTuple):
    type: int
    flags: int
    offset: int
    address: int
    physical: int
    stored: int
    size: int
    align: int


class Section(NamedTuple):
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    align: int


class Symbol(NamedTuple):
    name: str
    binding: int
    kind: int
    other: int  # its visibility, and what a processor makes of it
    section: int
    value: int
    version: int  # its entry of DT_VERSYM, without the bit that hides it


class HashTable(NamedTuple):
    """DT_GNU_HASH."""

    first: int  # the first symbol that is in it
    shift: int
    filter: tuple[int, ...]
    heads: tuple[int, ...]  # of each bucket the first symbol of its chain, 0 for none
    chains: int  # where these are in the file


class Need(NamedTuple):
    """A symbol version that is needed."""

    library: str
    name: str
    hash: int
    number: int


@dataclass(frozen=True)
class Elf:
    data: bytes | mmap.mmap

    def unpack(self, layout: struct.Struct, place: int) -> tuple[int, ...]:
        if not 0 <= place <= len(self.data) - layout.size:
            raise BinaryError(f"its table at {place:#x} is outside the file")
        return layout.unpack_from(self.data, place)

    @cached_property
    def header(self) -> Header:
        found = Header(*self.unpack(HEADER, 0))  # type: ignore[arg-type]  # the first is bytes
        if found.ident[4:6] != b"\2\1":
            raise BinaryError("it is not of 64 bits with the least significant byte first")
        if found.segment_size != SEGMENT.size:
            raise BinaryError(f"its program headers have {found.segment_size} bytes, expected {SEGMENT.size}")
        if max(found.segments, found.sections) > MOST_PARTS:
            raise BinaryError("it has too many sections or segments")
        return found

    @property
    def machine(self) -> str:
        """As platform tags spell it."""
        return MACHINES.get(self.header.machine, f"machine {self.header.machine}")

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(*self.unpack(SEGMENT, self.header.segments_at + n * SEGMENT.size)) for n in range(self.header.segments))

    @cached_property
    def loads(self) -> tuple[Segment, ...]:
        return self.of(LOAD)

    def of(self, kind: int) -> tuple[Segment, ...]:
        return tuple(each for each in self.segments if each.type == kind)

    def place(self, address: int, size: int = 1) -> int:
        """The position in the file of the bytes that are loaded to an address."""
        for each in self.loads:
            if each.address <= address and address + size <= each.address + each.stored:
                return each.offset + address - each.address
        raise BinaryError(f"its address {address:#x} is of no byte of the file")

    @cached_property
    def entries(self) -> tuple[tuple[int, int], ...]:
        """The dynamic section up to its end, as the loader counts: the last such header counts."""
        dynamic = self.of(DYNAMIC)[-1:]
        found = list[tuple[int, int]]()
        for each in dynamic:
            for place in range(each.offset, each.offset + each.stored, ENTRY.size):
                tag, value = self.unpack(ENTRY, place)
                if not tag:
                    return tuple(found)
                found.append((tag, value))
            raise BinaryError("its dynamic section has no end")
        return ()

    @cached_property
    def tags(self) -> dict[str, int]:
        return {TAGS[tag]: value for tag, value in self.entries if tag in TAGS}

    def strings(self, name: str) -> tuple[str, ...]:
        return tuple(self.string(value) for tag, value in self.entries if TAGS.get(tag) == name)

    @cached_property
    def string_table(self) -> tuple[int, int]:
        size = self.tags.get("STRSZ", 0)
        return self.place(self.tags.get("STRTAB", 0), size), size

    def string(self, offset: int) -> str:
        start, size = self.string_table
        if offset >= size:
            raise BinaryError(f"its string at {offset:#x} is outside the table of {size:#x} bytes")
        end = self.data.find(b"\0", start + offset, start + min(size, offset + LONGEST))
        if end < 0:
            raise BinaryError(f"its string at {offset:#x} has no end, or a far one")
        return bytes(self.data[start + offset : end]).decode(errors="backslashreplace")

    @cached_property
    def relocations(self) -> tuple[tuple[int, int, int], ...]:
        found: list[tuple[int, int, int]] = []
        for table, size in (("RELA", "RELASZ"), ("JMPREL", "PLTRELSZ")):
            if bytes_ := self.tags.get(size):
                if bytes_ % RELOCATION.size:
                    raise BinaryError(f"its {size} of {bytes_} bytes is no number of relocations")
                if bytes_ > MOST_RELOCATIONS * RELOCATION.size:
                    raise BinaryError("it has too many relocations")
                start = self.place(self.tags.get(table, 0), bytes_)
                found += RELOCATION.iter_unpack(self.data[start : start + bytes_])
        return tuple(found)

    @cached_property
    def hashed(self) -> dict[int, int]:
        """The symbols that a lookup by the GNU hash finds, each with the hash that the table has of it, without the last bit."""
        table, found = self.hash_table, dict[int, int]()
        for head in table.heads if table else ():
            index = head
            while table and index:
                if index < table.first or index in found or len(found) > MOST_SYMBOLS:
                    raise BinaryError("its hash table leads to a symbol that it does not have, or twice to one")
                (value,) = self.unpack(struct.Struct("<I"), table.chains + 4 * (index - table.first))
                found[index] = value | 1
                index = 0 if value & 1 else index + 1
        return found

    @cached_property
    def hash_table(self) -> HashTable | None:
        if "GNU_HASH" not in self.tags:
            return None
        start = self.place(self.tags["GNU_HASH"], 16)
        buckets, first, words, shift = self.unpack(struct.Struct("<4I"), start)
        if not 0 < buckets <= MOST_SYMBOLS or words > MOST_SYMBOLS:
            raise BinaryError("its hash table has too many parts, or no buckets")
        heads = start + 16 + 8 * words
        layouts = struct.Struct(f"<{words}Q"), struct.Struct(f"<{buckets}I")
        return HashTable(first, shift, self.unpack(layouts[0], start + 16), self.unpack(layouts[1], heads), heads + 4 * buckets)

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """All that a hash table or a relocation leads to: no header says how many there are."""
        if "SYMTAB" not in self.tags:
            return ()
        unhashed = self.hash_table.first - 1 if self.hash_table else 0
        last = max([*self.hashed, unhashed, *(info >> 32 for _, info, _ in self.relocations)], default=0)
        if "HASH" in self.tags:
            last = max(last, self.unpack(struct.Struct("<2I"), self.place(self.tags["HASH"], 8))[1] - 1)
        if last > MOST_SYMBOLS:
            raise BinaryError("it has too many symbols")
        start = self.place(self.tags["SYMTAB"], (last + 1) * SYMBOL.size)
        versions = [0] * (last + 1)
        if "VERSYM" in self.tags:
            versions = list(self.unpack(struct.Struct(f"<{last + 1}H"), self.place(self.tags["VERSYM"], 2 * (last + 1))))
        table = SYMBOL.iter_unpack(self.data[start : start + (last + 1) * SYMBOL.size])
        return tuple(
            Symbol(self.string(name), info >> 4, info & 15, other, section, value, versions[number] & 0x7FFF)
            for number, (name, info, other, section, value, _) in enumerate(table)
        )

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        return tuple(self._needs())

    def _needs(self) -> Iterator[Need]:
        place, seen = (self.place(self.tags["VERNEED"], NEED.size) if "VERNEED" in self.tags else 0), 0
        while place:
            version, count, file, first, following = self.unpack(NEED, place)
            if version != 1:
                raise BinaryError(f"its needed symbol versions are of the format {version}, expected 1")
            at, step = place + first, 1
            for _ in range(count):
                digest, _, number, name, step = self.unpack(AUXILIARY, at)
                yield Need(self.string(file), self.string(name), digest, number & 0x7FFF)
                seen += 1
                if seen > MOST_VERSIONS:
                    raise BinaryError("it has too many symbol versions")
                at += step
            if step or not count:
                raise BinaryError(f"its needed symbol versions of {self.string(file)} are not the {count} that it counts")
            place = place + following if following else 0

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """For what is in the file and never loaded, and to compare. No loader reads these headers: nothing else is taken from them."""
        at = self.header.sections_at
        found = [self.unpack(SECTION, at + number * SECTION.size) for number in range(self.header.sections if at else 0)]
        if not found:
            return ()
        if self.header.names_in >= len(found):
            raise BinaryError("its section headers have no names")
        start, size = found[self.header.names_in][4:6]
        names = bytes(self.data[start : start + min(size, LONGEST)])
        return tuple(Section(_text(names, each[0]), each[1], each[2], each[3], each[4], each[5], each[8]) for each in found)


def _text(data: bytes, start: int) -> str:
    return data[start:].partition(b"\0")[0].decode(errors="backslashreplace")


def described(elf: Elf) -> Binary:
    versions = dict[str, set[str]]()
    for need in elf.needs:
        versions.setdefault(need.library, set()).add(need.name)
    undefined = {each for each in elf.symbols if each.name and each.section == UNDEFINED and each.binding not in {LOCAL, WEAK}}
    needs = {need.number: need for need in elf.needs}
    stack = elf.of(STACK)
    return Binary(
        format="elf",
        machine=elf.machine,
        soname=next(iter(elf.strings("SONAME")), None),
        needed=elf.strings("NEEDED"),
        rpath=tuple(entry for path in (*elf.strings("RPATH"), *elf.strings("RUNPATH")) for entry in path.split(":")),
        versions={library: frozenset(names) for library, names in versions.items()},
        undefined=frozenset(each.name for each in undefined),
        asked_of={each.name: (needs[each.version].library, needs[each.version].name) for each in undefined if each.version in needs},
        exports=frozenset(each.name for each in _exported(elf)),
        used=frozenset(each.name for each in elf.symbols if each.name and each.binding != LOCAL),
        debug=tuple(each.name for each in elf.sections if each.name.startswith(DEBUG_SECTIONS)),
        # Without the header the x86 ABI's default is yes.
        executable_stack=bool(stack[-1].flags & EXECUTE) if stack else elf.header.machine == 62,
    )


def exports(stream: BinaryIO) -> dict[str, bool]:
    """The exported symbols, and whether each has a version, read from an open file: NVIDIA's libraries are too large to be read whole."""
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {each.name: each.version > 1 for each in _exported(Elf(data))}


def _exported(elf: Elf) -> Iterator[Symbol]:
    return (each for each in elf.symbols if each.name and each.binding != LOCAL and each.section != UNDEFINED)
