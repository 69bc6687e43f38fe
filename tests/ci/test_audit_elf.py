"""The rules for ELF modules (ci/wheelfile/binary/rules.py): each takes a good module, and names what is wrong with a changed one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ci.wheelfile.binary import BinaryError, parse
from ci.wheelfile.binary.elf import DYNAMIC, EH_FRAME, HEADER, LOAD, NOTE, PROPERTY, RELRO, STACK, TLS, Elf
from ci.wheelfile.binary.rules import PLACES, SIZES
from ci.wheelfile.binary.symbols import elf_hash

from .damage_support import NUMBERS, header, put, segment, tag, versions_of
from .elf_support import (
    Change,
    changed_by,
    faults,
    fixed,
    in_hash,
    in_needs,
    linked,
    moved,
    note,
    number_of,
    relocation,
    renamed,
    section,
    symbol,
    told,
)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return linked(tmp_path_factory.mktemp("elf"), "gnu")


CASES: dict[str, tuple[Change, str]] = {
    "EI_CLASS": (header(4, "<B", 1), "is damaged: it is not of 64 bits"),
    "EI_DATA": (header(5, "<B", 2), "is damaged: it is not of 64 bits with the least significant byte first"),
    "1001 sections": (header(60, "<H", 1001), "is damaged: it has too many sections or segments"),
    "1001 segments": (header(56, "<H", 1001), "is damaged: it has too many sections or segments"),
    "size of a program header": (header(54, "<H", 57), "is damaged: its program headers have 57 bytes, expected 56"),
    "names of sections": (header(62, "<H", 999), "is damaged: its section headers have no names"),
    "segments behind the file": (header(32, "<Q", 2**40), "is damaged: its table at 0x10000000000 is outside the file"),
    "a string behind the table": (symbol("data", 0, "<I", 9999), "is damaged: its string at 0x270f is outside the table of"),
    "RELASZ of a half": (moved("RELASZ", 4), "bytes is no number of relocations"),
    "a bucket of no chain": (in_hash(24, 1), "is damaged: its hash table leads to a symbol that it does not have"),
    "a million buckets": (in_hash(0, 1_000_001), "is damaged: its hash table has too many parts"),
    "a format of versions": (in_needs(0, "<H", 2), "is damaged: its needed symbol versions are of the format 2, expected 1"),
    "fewer versions": (in_needs(2, "<H", 0), "are not the 0 that it counts"),
    "type": (header(16, "<H", 2), "has the ELF type 0x2, expected 0x3"),
    "place of program headers": (header(32, "<Q", 0), "has the ELF offset of program headers 0x0, expected 0x40"),
    "version": (header(20, "<I", 2), "has the ELF version 0x2, expected 0x1"),
    "flags": (header(48, "<I", 1), "has the ELF flags 0x1, expected 0x0"),
    "header size": (header(52, "<H", 63), "has the ELF header size 0x3f, expected 0x40"),
    "GNU's system": (header(7, "<B", 3), ""),
    "size of a section header": (header(58, "<H", 63), "has no section headers"),
    "flags of a segment": (segment(TLS, 0, 1, fixed(8)), "has a TLS segment with the flags 0x8"),
    "an executable note": (segment(NOTE, 0, 1, fixed(5)), "has a NOTE segment with the flags 0x5"),
    "physical address": (segment(NOTE, 0, 4, changed_by(lambda old: old + 1)), "has a segment of the physical address"),
    "two stacks": (segment(RELRO, 0, 0, fixed(STACK)), "has 2 GNU_STACK segments, expected 1 to 1"),
    "no stack": (segment(STACK, 0, 0, fixed(NOTE)), "has 0 GNU_STACK segments, expected 1 to 1"),
    "no RELRO": (segment(RELRO, 0, 0, fixed(NOTE)), "has 0 GNU_RELRO segments, expected 1 to 1"),
    "no frames": (segment(EH_FRAME, 0, 0, fixed(NOTE)), "has 0 GNU_EH_FRAME segments, expected 1 to 1"),
    "a stack with a size": (segment(STACK, 0, 6, fixed(8)), "has a GNU_STACK segment with a place or a size"),
    "alignment that is no power": (segment(LOAD, 0, 7, fixed(0x1800)), "that is aligned to 0x1800"),
    "more in the file than in memory": (segment(LOAD, -1, 6, fixed(8)), "expected a little more in memory"),
    "LOAD without READ": (segment(LOAD, 0, 1, fixed(1)), "with the flags 0x1, expected it readable"),
    "LOAD segments in one page": (segment(LOAD, 0, 6, changed_by(lambda old: old + 0x2000)), "has LOAD segments that overlap"),
    "LOAD not from the beginning": (segment(LOAD, 0, 2, fixed(0x1000)), "loads its first segment from 0x1000 to 0x0"),
    "a segment outside": (segment(EH_FRAME, 0, 3, changed_by(lambda old: old + 2**20)), "that is not a part of a loaded one"),
    "alignment of a part": (segment(EH_FRAME, 0, 7, fixed(3)), "has a GNU_EH_FRAME segment that is aligned to 0x3"),
    "size of a part": (segment(EH_FRAME, 0, 6, changed_by(lambda old: old + 4)), "in memory, expected the same"),
    "TLS without end": (segment(TLS, 0, 6, fixed(2**40)), "has a TLS segment (address, p_filesz, p_memsz, p_align) "),
    "no end of the dynamic section": (
        lambda data: segment(DYNAMIC, 0, 5, fixed(16 * len(Elf(data).entries)))(data),
        "is damaged: its dynamic section has no end",
    ),
    "behind the end of the dynamic section": (
        lambda data: put(data, Elf(data).of(DYNAMIC)[0].offset + 16 * len(Elf(data).entries) + 16, "<Q", 1),
        "has data behind the end of its dynamic section",
    ),
    "a tag twice": (renamed("FINI", NUMBERS["INIT"]), "has the dynamic tag DT_INIT twice"),
    "an unknown tag": (renamed("FINI", 0x12345), "has the dynamic tag 0x12345"),
    "SYMENT": (moved("SYMENT"), "has DT_SYMENT 32, expected 24"),
    "RELAENT": (moved("RELAENT"), "has DT_RELAENT 32, expected 24"),
    "PLTREL": (moved("PLTREL", 10), "has DT_PLTREL 17, expected 7"),
    "FINI in data": (lambda data: tag(NUMBERS["FINI"], Elf(data).loads[-1].address)(data), "has DT_FINI at "),
    "DT_SYMBOLIC": (tag(NUMBERS["FLAGS"], 2), "without SYMBOLIC"),
    "DF_1_INTERPOSE and another": (tag(NUMBERS["FLAGS_1"], 0x400 | 2**40), "without INTERPOSE, 0x10000000000"),
    "RELA without RELAENT": (renamed("RELAENT", NUMBERS["BIND_NOW"]), "has DT_RELA without DT_RELAENT, expected both"),
    "RELA without RELASZ": (renamed("RELASZ", NUMBERS["BIND_NOW"]), "has DT_RELA without DT_RELASZ, expected both"),
    "no hash": (renamed("GNU_HASH", NUMBERS["BIND_NOW"]), "has no GNU hash table"),
    "no symbols": (renamed("SYMTAB", NUMBERS["BIND_NOW"]), "has no table of symbols (DT_SYMTAB)"),
    "INIT in data": (lambda data: tag(NUMBERS["INIT"], Elf(data).loads[-1].address)(data), "expected it in a segment that is executable"),
    "PLTGOT in code": (tag(NUMBERS["PLTGOT"], 0), "has DT_PLTGOT at 0x0, expected it in a segment that is writable"),
    "INIT_ARRAY without end": (moved("INIT_ARRAYSZ", 2**20), "has DT_INIT_ARRAY at "),
    "INIT_ARRAY in code": (tag(NUMBERS["INIT_ARRAY"], 0), "expected it in a segment that is writable"),
    "INIT_ARRAYSZ": (moved("INIT_ARRAYSZ", 1), "expected whole addresses"),
    **{
        f"{name} and its section": (moved(name, -8), f"the address of its section {place}")
        for name, place in PLACES.items()
        if name != "HASH"
    },
    **{
        f"{name} and its section": (moved(name, -8), f"the size of its section {place}")
        for name, place in SIZES.items()
        if name != "PLTRELSZ"
    },
    "PLTGOT": (moved("PLTGOT", 16), "expected the address of its section .got or .got.plt"),
    "PLTGOT in .got": (
        lambda data: tag(NUMBERS["PLTGOT"], next(each.address for each in Elf(data).sections if each.name == ".got"))(data),
        "",
    ),
    "no section .init": (section(".init", 0, 0), "has DT_INIT alone, expected DT_INIT and a section .init"),
    "no tag FINI": (renamed("FINI", NUMBERS["BIND_NOW"]), "has a section .fini alone, expected DT_FINI and a section .fini"),
    "another section .dynamic": (section(".dynamic", 5, 16), "the address of its section .dynamic"),
    "more symbols by their section": (section(".dynsym", 5, 2400), "expected 100 by its section .dynsym"),
    "a relocation of code": (relocation(6, 0, 0, lambda _: 8), "has 1 relocations of what is not writable, such as 0x8"),
    "STT_GNU_IFUNC's relocation": (relocation(6, 0, 8, lambda _: 37), "has relocations of type 37"),
    "RELACOUNT": (moved("RELACOUNT", 1), "expected that many relative relocations first"),
    "a symbol bound twice": (
        relocation(6, 1, 12, lambda elf: number_of(elf, "pointer")),
        "in two places, expected them together",
    ),
    "a call twice": (relocation(7, 0, 12, lambda elf: elf.relocations[-1][1] >> 32), "in two places, expected them together"),
    "a relative relocation out of the module": (relocation(8, 0, 16, lambda _: 2**40), "that leads out of the module"),
    "one before it": (relocation(8, 0, 16, lambda _: 2**64 - 1), "that leads out of the module"),
    "another symbol of a call": (
        relocation(7, 0, 12, lambda elf: number_of(elf, "weak")),
        "has the symbol 'cuInit' of elsewhere and no use for it, expected a relocation",
    ),
    "GLOB_DAT of nothing": (
        relocation(6, 0, 12, fixed(0)),
        "with the symbol 0 and the addend 0x0, expected a symbol that is no thread-local",
    ),
    "JUMP_SLOT of nothing": (
        relocation(7, 0, 12, fixed(0)),
        "with the symbol 0 and the addend 0x0, expected a symbol that is no thread-local",
    ),
    "JUMP_SLOT and more": (relocation(7, 0, 16, fixed(8)), "and the addend 0x8, expected a symbol that is no thread-local one, and 0"),
    "GLOB_DAT of thread-local data": (
        relocation(6, 0, 12, lambda elf: number_of(elf, "t")),
        "expected a symbol that is no thread-local one",
    ),
    "DTPMOD64 of data": (relocation(16, 0, 12, lambda elf: number_of(elf, "data")), "expected none or a thread-local one"),
    "GLOB_DAT becomes DTPOFF64": (relocation(6, 0, 8, fixed(17)), "expected none or a thread-local one"),
    "64 of nothing": (relocation(1, 0, 12, fixed(0)), "a relocation of an address at "),
    "64 far from a symbol": (relocation(1, 0, 16, fixed(2**31)), "and the addend 0x80000000, expected a symbol that"),
    "RELATIVE with a symbol": (relocation(8, 0, 12, fixed(1)), "that leads out of the module, expected an address inside and no symbol"),
    "a relocation of no symbol that there is": (relocation(7, 0, 12, fixed(999_999)), "is damaged: "),
    "an export that is local": (symbol("PyInit_module", 4, "<B", 2), "leads to 'PyInit_module', which it does not export"),
    "an export of elsewhere": (symbol("PyInit_module", 6, "<H", 0), "leads to 'PyInit_module', which it does not export"),
    "a version for no symbol": (versions_of("__tls_get_addr", 1), "for no symbol, expected one that uses it"),
    "the first symbol": (lambda data: put(data, Elf(data).place(Elf(data).tags["SYMTAB"]) + 8, "<Q", 1), "begins its symbols with ''"),
    "the binding of a symbol": (symbol("data", 4, "<B", 0x31), "of binding 3 and type 1, expected only data"),
    "STT_GNU_IFUNC": (symbol("call", 4, "<B", 0x1A), "of binding 1 and type 10, expected only data"),
    "STV_HIDDEN": (symbol("data", 5, "<B", 2), "has the symbol 'data' of visibility 0x2"),
    "STV_PROTECTED": (symbol("data", 5, "<B", 3), ""),
    "STV_PROTECTED elsewhere": (symbol("cuInit", 5, "<B", 3), "has the symbol 'cuInit' of visibility 0x3"),
    "STO_AARCH64_VARIANT_PCS": (symbol("data", 5, "<B", 0x80), "has the symbol 'data' of visibility 0x80"),
    "a value of an undefined symbol": (symbol("cuInit", 8, "<Q", 1), "has the symbol 'cuInit' at 0x1 and of nowhere"),
    "a local undefined symbol": (symbol("cuInit", 4, "<B", 0), "has the symbol 'cuInit' at 0x0 and of nowhere"),
    "a symbol behind its section": (symbol("call", 8, "<Q", 2**30), "has the symbol 'call' at 0x40000000, expected it inside its section"),
    "TLS outside its section": (symbol("call", 4, "<B", 0x16), "has the symbol 'call' at "),
    "data inside of TLS": (symbol("t", 4, "<B", 0x11), "has the symbol 't' at 0x0, expected it inside its section"),
    "a LOAD segment of other flags": (segment(LOAD, 0, 1, fixed(6)), "with the flags 0x6, expected 0x5, those of its sections"),
    "more in memory than its sections": (segment(LOAD, 0, 6, changed_by(lambda old: old + 8)), "in memory, expected 0x"),
    "fewer bytes than its sections": (segment(LOAD, 0, 5, changed_by(lambda old: old - 8)), "those of its sections"),
    "no section of a segment": (segment(LOAD, 0, 3, fixed(2**40)), "expected 0x0 and 0x0, those of its sections"),
    "no TLS": (segment(TLS, 0, 0, fixed(NOTE)), "has a TLS segment (address, p_filesz, p_memsz, p_align) none, expected 0x"),
    "data that cannot be written": (segment(LOAD, -1, 1, fixed(4)), "with the flags 0x4, expected 0x6, those of its sections"),
    "a symbol of no section": (symbol("call", 6, "<H", 999), "expected it inside its section, 999"),
    "a symbol behind the last section": (
        lambda data: symbol("call", 6, "<H", len(Elf(data).sections))(data),
        "has the symbol 'call' at 0x",
    ),
    "a symbol of what is not loaded": (symbol("cuInit", 6, "<H", 1), "has the symbol 'cuInit' at 0x0, expected it inside its section, 1"),
    "a name that is another's end": (symbol("cuInit", 0, "<I", 3), "that nothing names"),
    "a filter of too many words": (in_hash(8, 3), "outside the file"),
    "a wrong shift": (in_hash(12, 40), "has a hash table with a filter of"),
    "a wrong filter": (in_hash(16, 0), "has a hash table that does not lead to"),
    "the hash of a version": (in_needs(16, "<I", 7), f"by the hash 0x7, expected {elf_hash('GLIBC_2.3'):#x}: loaders compare it first"),
    "a version of number 1": (in_needs(16 + 6, "<H", 1), "by the number 1, expected another: these two mean no version"),
    "a version of another library": (
        lambda data: in_needs(4, "<I", struct.unpack_from("<I", data, Elf(data).place(Elf(data).tags["VERNEED"]) + 24)[0])(data),
        "expected it among the libraries that it needs",
    ),
    "VERNEEDNUM": (moved("VERNEEDNUM", 1), "expected 1, the libraries that it has versions of"),
    "an unknown version number": (versions_of("cuInit", 9), "has the symbol 'cuInit' of version number 9"),
    "VERNEED without VERSYM": (renamed("VERSYM", NUMBERS["BIND_NOW"]), "has DT_VERNEED without DT_VERSYM"),
    "symbol versions of its own": (
        lambda data: renamed("FINI", NUMBERS["VERDEF"])(renamed("INIT", NUMBERS["VERDEFNUM"])(data)),
        "has symbol versions of its own",
    ),
    "a note of another": (note(b"Evil\0", 3, bytes(8)), "has a note of Evil, type 0x3"),
    "a note of nobody": (note(b"", 3, bytes(8)), "has a note of nobody, type 0x3"),
    "an ABI tag": (note(b"GNU\0", 1, bytes(16)), "has a note of GNU, type 0x1"),
    "an unknown property without a value": (note(b"GNU\0", 5, struct.pack("<2I", 0xC0001234, 0)), "has the GNU property 0xc0001234"),
    "an unknown property": (note(b"GNU\0", 5, struct.pack("<3I", 0xC0001234, 4, 1)), "has the GNU property 0xc0001234"),
    "the baseline of x86-64": (note(b"GNU\0", 5, struct.pack("<3I", 0xC0008002, 4, 1)), ""),
    "x86-64-v3": (note(b"GNU\0", 5, struct.pack("<3I", 0xC0008002, 4, 4)), "needs a processor of x86-64-v3"),
    "a section of another name": (
        lambda data: data.replace(b".comment\0", b".evilish\0"),
        "has the section '.evilish', expected none but .annobin.notes, .comment, .gnu.build.attributes, .shstrtab beside what is loaded",
    ),
    "strings without symbols": (
        lambda data: data.replace(b".comment\0", b".strtab\0\0"),
        "has the section '.strtab', expected none but .annobin.notes, .comment, .gnu.build.attributes, .shstrtab beside what is loaded",
    ),
    "bytes of nothing": (
        lambda data: put(section(".comment", 5, 1)(data), Elf(data).loads[-1].offset + Elf(data).loads[-1].stored + 1, "<I", 0x6C697665),
        "that belong to nothing",
    ),
    "bytes behind": (lambda data: data + b"x", "nothing belongs behind the file's own"),
}


def test_a_good_module(module: bytes) -> None:
    binary = parse(module)
    assert binary
    assert binary.faults == ()


@pytest.mark.parametrize(("change", "message"), CASES.values(), ids=CASES)
def test_a_rule(module: bytes, change: Change, message: str) -> None:
    changed = change(module)
    assert changed != module
    found = faults(changed)
    print("\n".join(found))
    assert any(message in each for each in found) if message else not found


def test_the_largest_page(module: bytes) -> None:
    """Kernels for aarch64 have pages of up to 64 KiB; what the processor is for is said once."""
    found = faults(header(18, "<H", 183)(module))
    assert (
        "has a LOAD segment at 0x0 that is aligned to 0x1000, expected a power of two from 0x10000, as kernels have pages, to 0x200000"
        in found
    )
    assert "has relocations of type 6, expected only those that modules of aarch64 have" in found
    assert "has relocations of type 6, expected only those that modules of machine 243 have" in faults(header(18, "<H", 243)(module))


def test_a_module_of_the_older_hash_table(tmp_path: Path) -> None:
    """Beside GNU's, which loaders then take, and alone."""
    both, alone = (linked(tmp_path, hashes) for hashes in ("both", "sysv"))
    assert faults(both) == ()
    assert told(moved("HASH", -8)(both), "the address of its section .hash")
    assert told(alone, "has no GNU hash table (DT_GNU_HASH), expected one")


def test_chains_that_meet(tmp_path: Path) -> None:
    """Read again from each bucket, a table of n buckets and n symbols would take n * n steps."""
    module = linked(tmp_path, "gnu")
    table = Elf(module).hash_table
    assert table
    assert len(table.heads) > 1
    place = table.chains - 4 * len(table.heads)
    first = min(filter(None, table.heads))
    assert told(put(module, place, f"<{len(table.heads)}I", *[first] * len(table.heads)), "that it does not have, or twice to one")


def test_a_chain_without_its_head(module: bytes) -> None:
    """It is reached from another bucket, where nobody looks for it."""
    table = Elf(module).hash_table
    assert table
    first, second = sorted(filter(None, table.heads))[:2]
    bucket, end = table.chains - 4 * (len(table.heads) - table.heads.index(second)), table.chains + 4 * (second - 1 - table.first)
    assert first < second
    changed = put(put(module, bucket, "<I", 0), end, "<I", struct.unpack_from("<I", module, end)[0] & ~1)
    assert Elf(changed).hashed == Elf(module).hashed
    assert told(changed, f"does not lead to {Elf(module).symbols[second].name!r}, expected every symbol to be found")


def test_a_name_without_end() -> None:
    elf = Elf(b"x" * 2**17)
    elf.__dict__["string_table"] = 0, 2**17
    with pytest.raises(BinaryError, match="its string at 0x5 has no end, or a far one"):
        elf.string(5)


def test_sections_that_manylinux_adds(tmp_path: Path) -> None:
    """The start files of its AlmaLinux have notes of annobin's, which strip keeps."""
    notes = '.pushsection .gnu.build.attributes,\\"\\",%note\\n.long 8, 0, 0x100\\n.asciz \\"GA$3a1\\"\\n.balign 4\\n.popsection'
    module = linked(tmp_path, "gnu", f'__asm__("{notes}");')
    assert ".gnu.build.attributes" in {each.name for each in Elf(module).sections}
    assert faults(module) == ()


def test_two_versions_of_one_number(tmp_path: Path) -> None:
    functions = "void *memcpy(void *, const void *, unsigned long); int atoi(const char *);"
    made = linked(tmp_path, "gnu", f"{functions} int two(char *a, char *b, unsigned long n) {{ memcpy(a, b, n); return atoi(a); }}")
    one, two = (each for each in Elf(made).needs if each.library == "libc.so.6")
    assert faults(made) == ()
    place = made.index(struct.pack("<IHH", two.hash, 0, two.number))
    assert told(put(made, place + 6, "<H", one.number), "has two needed symbol versions of one number, expected a number for each")


def test_nothing_is_loaded(module: bytes) -> None:
    for left in reversed(range(len(Elf(module).loads))):
        module = segment(LOAD, 0, 0, fixed(NOTE))(module)
        assert told(module, "has 0 LOAD segments, expected 1 to 8") == (left == 0)
    assert told(module, "is of no byte of the file")
    assert told(module, " bytes at 0x0 that belong to nothing")


def test_segments_of_one_page(module: bytes) -> None:
    one, two = Elf(module).loads
    page = two.address // 0x1000 * 0x1000
    for size, taken in ((page - one.address, True), (page - one.address + 1, False)):
        assert told(segment(LOAD, 0, 6, fixed(size))(module), f"has two LOAD segments in the page of {two.address:#x}, expected") != taken


def test_two_properties(module: bytes) -> None:
    """Each is filled up to 8 bytes."""
    there = Elf(module).of(EH_FRAME)[0]
    properties = struct.pack("<3I4x3I4x", 0xC0000002, 4, 3, 0xC0008002, 4, 8)
    new = struct.pack("<3I4s", 4, len(properties), 5, b"GNU\0") + properties
    changed = module[: there.offset] + new + module[there.offset + len(new) :]
    for field, value in ((0, PROPERTY), (5, len(new)), (6, len(new)), (7, 8)):
        changed = segment(PROPERTY if field else EH_FRAME, 0, field, fixed(value))(changed)
    assert told(changed, "needs a processor of x86-64-v4")


def test_a_lazy_module_with_relro_over_what_is_bound_late(module: bytes) -> None:
    whole = segment(RELRO, 0, 6, lambda old, _: old + 0x1000)(segment(RELRO, 0, 5, lambda old, _: old + 0x1000)(module))
    late = "has a GNU_RELRO segment over what is bound when it is called first, expected that to stay writable"
    assert late in faults(whole)
    assert late not in faults(tag(NUMBERS["FLAGS_1"], 1)(whole))
    assert HEADER.size == 64


def test_thread_local_data_without_a_symbol(module: bytes) -> None:
    """GNU's ld writes TLSDESC for aarch64 among the lazy ones, each without a symbol."""
    for which in (0, 1):
        module = relocation(7, which, 12, fixed(0))(module)
    assert not told(module, "in two places")


def test_the_symbol_of_a_section(module: bytes) -> None:
    """GNU's ld writes some for aarch64: local, and without a name."""
    words = "of binding 0 and type 3, expected only data"
    local = symbol("call", 4, "<B", 3)(module)
    assert told(local, words)
    assert not told(symbol("call", 0, "<I", 0)(local), words)


@pytest.mark.parametrize(
    ("kind", "place", "value", "name"),
    [(1, 12, 0, "an address"), (6, 12, 0, "GLOB_DAT or JUMP_SLOT"), (8, 12, 1, "RELATIVE"), (16, 12, 1, "thread-local data")],
)
def test_the_names_of_relocations(module: bytes, kind: int, place: int, value: int, name: str) -> None:
    (where,) = [place for place, info, _ in Elf(module).relocations if info & 0xFFFFFFFF == kind][:1]
    assert told(relocation(kind, 0, place, fixed(value))(module), f"has a relocation of {name} at {where:#x} ")


@pytest.mark.parametrize(
    ("more", "arguments"),
    [("__thread char large[65536];", ()), ("__thread int set = 5; __thread char large[65536];", ()), ("", ("-D__thread=",))],
    ids=["zeros", "both", "none"],
)
def test_thread_local_data(tmp_path: Path, more: str, arguments: tuple[str, ...]) -> None:
    """Its zeros take no place where the others are."""
    made = linked(tmp_path, "gnu", more, *arguments)
    assert len(Elf(made).of(TLS)) == bool(more)
    assert faults(made) == ()
    if not more:
        assert told(segment(NOTE, 0, 0, fixed(TLS))(made), ", expected none, that of its sections")
