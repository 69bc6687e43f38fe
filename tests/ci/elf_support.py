"""What the tests of the ELF rules share: a module, and changes of single fields of one."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from ci.wheelfile.binary import rules
from ci.wheelfile.binary.elf import DYNAMIC, ENTRY, NOTE, SECTION, SYMBOL, Elf

from .audit_support import require
from .damage_support import NUMBERS, later, put, segment, tag

Change = Callable[[bytes], bytes]
SOURCE = """
int cuInit(void); void *PyModule_Create2(void *, int); int weak(void) __attribute__((weak));
__thread int t; int data = 5; int *pointer = &data;
__attribute__((constructor)) static void up(void) { data += t; }
int call(void) { return weak ? weak() : cuInit(); }
void *PyInit_module(void) { return PyModule_Create2(&pointer, 3); }
"""


def linked(folder: Path, hashes: str, more: str = "", *arguments: str) -> bytes:
    require("x86_64-linux-gnu-gcc")
    (folder / "module.c").write_text(SOURCE + more)
    command = ["x86_64-linux-gnu-gcc", "-shared", "-fPIC", "-O1", "-s", "-Wl,-rpath,$ORIGIN/x", "-Wl,-z,noseparate-code", "-Wl,-z,lazy"]
    subprocess.run([*command, f"-Wl,--hash-style={hashes}", "-o", "module.so", "module.c", *arguments], cwd=folder, check=True)
    return (folder / "module.so").read_bytes()


def faults(data: bytes) -> tuple[str, ...]:
    return tuple(rules.faults(Elf(data)))


def moved(name: str, by: int = 8) -> Change:
    """Another value of a dynamic entry."""
    return lambda data: tag(NUMBERS[name], Elf(data).tags[name] + by)(data)


@later
def renamed(data: bytes, name: str, number: int) -> bytes:
    """Another tag of a dynamic entry."""
    elf = Elf(data)
    ((place, _),) = [(each.offset, each.stored) for each in elf.of(DYNAMIC)]
    index = [each for each, _ in elf.entries].index(NUMBERS[name])
    return put(data, place + index * ENTRY.size, "<Q", number)


@later
def symbol(data: bytes, name: str, place: int, layout: str, value: int) -> bytes:
    """Another field of a symbol: its name is at 0, its binding and type at 4, visibility at 5, section at 6, value at 8."""
    elf = Elf(data)
    index = [each.name for each in elf.symbols].index(name)
    return put(data, elf.place(elf.tags["SYMTAB"]) + SYMBOL.size * index + place, layout, value)


@later
def relocation(data: bytes, kind: int, which: int, place: int, value: Callable[[Elf], int]) -> bytes:
    """Another field of one of a type: its place is at 0, its type at 8, its symbol at 12, its addend at 16."""
    elf = Elf(data)
    index = [number for number, (_, info, _) in enumerate(elf.relocations) if info & 0xFFFFFFFF == kind][which]
    count = elf.tags["RELASZ"] // 24
    start = elf.place(elf.tags["RELA"]) + 24 * index if index < count else elf.place(elf.tags["JMPREL"]) + 24 * (index - count)
    return put(data, start + place, "<Q" if place in {0, 16} else "<I", value(elf))


def number_of(elf: Elf, name: str) -> int:
    return [each.name for each in elf.symbols].index(name)


def in_hash(place: int, value: int) -> Change:
    return lambda data: put(data, Elf(data).place(Elf(data).tags["GNU_HASH"]) + place, "<I", value)


def in_needs(place: int, layout: str, value: int) -> Change:
    return lambda data: put(data, Elf(data).place(Elf(data).tags["VERNEED"]) + place, layout, value)


@later
def section(data: bytes, name: str, field: int, value: int) -> bytes:
    """Another number of a section's header: 1 is the type, 2 the flags, 3 the address, 5 the size."""
    elf = Elf(data)
    place = elf.header.sections_at + SECTION.size * [each.name for each in elf.sections].index(name)
    fields = list(SECTION.unpack_from(data, place))
    fields[field] = value
    return put(data, place, "<IIQQQQIIQQ", *fields)


@later
def note(data: bytes, owner: bytes, kind: int, described: bytes) -> bytes:
    """In the place of the build id."""
    there = Elf(data).of(NOTE)[0]
    new = struct.pack("<3I", len(owner), len(described), kind) + owner.ljust(-(-len(owner) // 4) * 4, b"\0") + described
    assert len(new) <= there.stored
    changed = data[: there.offset] + new + data[there.offset + len(new) :]
    return segment(NOTE, 0, 5, lambda _, __: len(new))(segment(NOTE, 0, 6, lambda _, __: len(new))(changed))


def fixed(value: int) -> Callable[..., int]:
    return lambda *_: value


def changed_by(function: Callable[[int], int]) -> Callable[[int, bytes], int]:
    return lambda old, _: function(old)


def told(data: bytes, words: str) -> bool:
    return any(words in each for each in faults(data))
