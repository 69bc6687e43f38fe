"""The lists and the limits of the ELF rules (ci/wheelfile/binary/rules.py), value by value."""

from __future__ import annotations

import struct

import pytest

from ci.wheelfile.binary.elf import LOAD, NOTE, RELRO, TLS, Elf

from .damage_support import NUMBERS, header, segment, tag
from .elf_support import fixed, linked, note, relocation, renamed, symbol, told


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return linked(tmp_path_factory.mktemp("elf"), "gnu")


def test_every_relocation(module: bytes) -> None:
    taken = {62: {1, 6, 7, 8, 16, 17, 18, 36}, 183: {257, *range(1025, 1032)}}
    for machine, kinds in taken.items():
        for kind in (*range(48), *range(250, 260), *range(1020, 1040)):
            changed = header(18, "<H", machine)(relocation(16, 0, 8, fixed(kind))(module))
            assert told(changed, f"has relocations of type {kind}, ") == (kind not in kinds)


def test_every_symbol(module: bytes) -> None:
    for info in range(256):
        words = f"has the symbol 'data' of binding {info >> 4} and type {info & 15}, expected only data, functions and TLS"
        assert told(symbol("data", 4, "<B", info)(module), words) == (info >> 4 not in {0, 1, 2, 10} or info & 15 not in {0, 1, 2, 6})
    for machine, taken in ((62, {0, 3}), (183, {0, 3, 0x80, 0x83})):
        for other in range(256):
            changed = header(18, "<H", machine)(symbol("data", 5, "<B", other)(module))
            assert told(changed, f"has the symbol 'data' of visibility {other:#x}, expected that others see it") == (other not in taken)


def test_every_flag(module: bytes) -> None:
    for name, taken, names in (("FLAGS", {0, 3}, "ORIGIN and BIND_NOW"), ("FLAGS_1", {0, 7}, "NOW and ORIGIN")):
        for bit in range(64):
            changed = tag(NUMBERS[name], 1 << bit)(module)
            assert told(changed, f"has DT_{name} {1 << bit:#x}, expected only {names}, without ") == (bit not in taken)
    for name, flag, word in (
        *(("FLAGS", 2, "SYMBOLIC"), ("FLAGS", 4, "TEXTREL"), ("FLAGS", 16, "STATIC_TLS"), ("FLAGS_1", 8, "NODELETE")),
        *(("FLAGS_1", 0x40, "NOOPEN"), ("FLAGS_1", 0x400, "INTERPOSE"), ("FLAGS_1", 0x800, "NODEFLIB"), ("FLAGS_1", 0x8000000, "PIE")),
    ):
        assert told(tag(NUMBERS[name], flag)(module), f", without {word}")
    for flags in range(16):
        words = f"has a LOAD segment at 0x0 with the flags {flags:#x}, expected it readable, and writable or executable but never both"
        assert told(segment(LOAD, 0, 1, fixed(flags))(module), words) == (flags not in {4, 5, 6})


def test_every_tag(module: bytes) -> None:
    refused = {16: "DT_SYMBOLIC", 17: "DT_REL", 21: "DT_DEBUG", 22: "DT_TEXTREL", 32: "DT_PREINIT_ARRAY", 36: "DT_RELR"} | {
        0x7FFFFFFD: "DT_AUXILIARY",
        0x7FFFFFFF: "DT_FILTER",
        0x6FFFFEFB: "DT_DEPAUDIT",
        0x6FFFFEFC: "DT_AUDIT",
    }
    taken = {*range(1, 16), 20, *range(23, 31), 0x6FFFFEF5, 0x6FFFFEF6, 0x6FFFFEF7, 0x6FFFFFF0, 0x6FFFFFF9, *range(0x6FFFFFFB, 0x70000000)}
    taken |= {0x70000001, 0x70000003, 0x70000005}
    several = (*range(1, 50), *range(0x6FFFFEF0, 0x6FFFFF10), *range(0x6FFFFFF0, 0x70000010), 0x7FFFFFFD, 0x7FFFFFFF)
    for number in several:
        words = f"has the dynamic tag {refused.get(number, hex(number))} ("
        assert told(renamed("FINI", number)(module), words) == (number not in taken)


def test_every_segment(module: bytes) -> None:
    taken = {1, 2, 4, 7, 0x6474E550, 0x6474E551, 0x6474E552, 0x6474E553}
    for number in (*range(10), *range(0x6474E550, 0x6474E558), 0x70000003):
        words = (
            f"has a segment of type {number:#x}, expected only LOAD, DYNAMIC, NOTE, TLS, GNU_EH_FRAME, GNU_STACK, GNU_RELRO, GNU_PROPERTY"
        )
        assert told(segment(NOTE, 0, 0, fixed(number))(module), words) == (number not in taken)
    for system in range(20):
        assert told(header(7, "<B", system)(module), "expected that of System V or GNU, version 0, and zeros") == (system not in {0, 3})


def test_every_note(module: bytes) -> None:
    for kind in range(1, 8):
        words = f"has a note of GNU, type {kind:#x}, expected only GNU's build id and properties"
        assert told(note(b"GNU\0", kind, bytes(8))(module), words) == (kind not in {3, 5})
    for kind in (*range(0xC0000000, 0xC0000004), 0xC0008000, 0xC0008002, 0xC0010000, 0xC0010002):
        words = f"has the GNU property {kind:#x}, expected only those of branch protection and of the processor"
        taken = {0xC0000000, 0xC0000002, 0xC0008002, 0xC0010002}
        assert told(note(b"GNU\0", 5, struct.pack("<3I", kind, 4, 1))(module), words) == (kind not in taken)
    for bit in range(4):
        needs = f"needs a processor of x86-64-v{bit + 1}, expected the baseline (no -march): older ones are refused"
        assert told(note(b"GNU\0", 5, struct.pack("<3I", 0xC0008002, 4, 1 << bit))(module), needs) == (bit > 0)


def test_the_edges(module: bytes) -> None:
    """What is just inside is taken; what is one further is not."""
    elf = Elf(module)
    last, code = elf.loads[-1], elf.sections[next(each.section for each in elf.symbols if each.name == "call")]
    for place, taken in (
        (code.address, True),
        (code.address - 1, False),
        (code.address + code.size, True),
        (code.address + code.size + 1, False),
    ):
        assert told(symbol("call", 8, "<Q", place)(module), "expected it inside its section") != taken
    writable = "relocations of what is not writable"
    for place, taken in (
        (last.address, True),
        (last.address - 1, False),
        (last.address + last.size - 8, True),
        (last.address + last.size - 7, False),
    ):
        assert told(relocation(16, 0, 0, fixed(place))(module), writable) != taken
    end = last.address + last.size
    for place, taken in ((0, True), (end, True), (end + 1, False)):
        assert told(relocation(8, 0, 16, fixed(place))(module), "leads out of the module") != taken
    for size, taken in ((last.stored, True), (last.stored - 1, False), (last.stored + 2**26, True), (last.stored + 2**26 + 1, False)):
        assert told(segment(LOAD, -1, 6, fixed(size))(module), "expected a little more in memory") != taken
    thread = elf.of(TLS)[0]
    for field in (3, 5, 6, 7):
        words = "has a TLS segment (address, p_filesz, p_memsz, p_align) "
        assert not told(module, words)
        assert told(segment(TLS, 0, field, lambda old, _: old + 8)(module), words)
    for value, taken in ((thread.size - 1, True), (thread.size, False)):
        assert told(symbol("t", 8, "<Q", value)(module), f"has the symbol 't' at {value:#x}, expected it inside its section") != taken
    for align, taken in ((0x1000, True), (0x800, False), (0x1001, False), (0x200000, True), (0x400000, False)):
        assert told(segment(LOAD, 0, 7, fixed(align))(module), "has a LOAD segment at 0x0 that is aligned to") != taken


def test_the_edges_of_segments(module: bytes) -> None:
    """One may begin where another ends, in memory and in the file."""
    one, two = Elf(module).loads
    for field, most in ((5, two.offset - one.offset), (6, two.address - one.address)):
        for size, taken in ((most, True), (most + 1, False)):
            assert told(segment(LOAD, 0, field, fixed(size))(module), f"has LOAD segments that overlap at {two.address:#x}") != taken


def test_the_edges_of_sections(module: bytes) -> None:
    """A section is in the segment that it begins with, and not in one that it begins behind."""
    elf = Elf(module)
    loaded = sorted((each for each in elf.sections if each.flags & 2 and not each.flags & 0x400), key=lambda each: each.address)
    last, two = loaded[-1], elf.loads[-1]
    alone = segment(LOAD, -1, 6, fixed(last.size))(segment(LOAD, -1, 3, fixed(last.address))(module))
    assert told(alone, f"has a LOAD segment at {two.offset:#x} of ")
    assert not told(alone, "expected 0x0 and 0x0, those of its sections")
    inside = [each for each in loaded if each.address < two.address]
    ends = [each.address + each.size for each in inside]
    short = segment(LOAD, 0, 6, fixed(inside[-1].address))(module)
    assert told(short, f"expected {ends[-2]:#x} and {ends[-2]:#x}, those of its sections")


def test_the_edges_of_what_is_protected(module: bytes) -> None:
    """GNU_RELRO, up to its last whole page, over the place of a call that is bound late."""
    words = "has a GNU_RELRO segment over what is bound when it is called first"
    place = max(place for place, info, _ in Elf(module).relocations if info & 0xFFFFFFFF == 7)
    assert place % 0x1000
    page = place // 0x1000 * 0x1000
    for start, end, taken in (
        (place, page + 0x1000, False),
        (place + 1, page + 0x1000, True),
        (page, page + 0xFFF, True),
        (page, page + 0x1000, False),
    ):
        changed = segment(RELRO, 0, 6, fixed(end - start))(segment(RELRO, 0, 3, fixed(start))(module))
        assert told(changed, words) != taken
    at_a_page = module
    for which in range(sum(info & 0xFFFFFFFF == 7 for _, info, _ in Elf(module).relocations)):
        at_a_page = relocation(7, which, 0, fixed(page + 0x1000))(at_a_page)
    for end, taken in ((page + 0x1000, True), (page + 0x2000, False)):
        assert told(segment(RELRO, 0, 6, fixed(end - page))(segment(RELRO, 0, 3, fixed(page))(at_a_page)), words) != taken
