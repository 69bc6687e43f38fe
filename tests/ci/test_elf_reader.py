"""The reader of ELF files (ci/wheelfile/binary/elf.py): its limits, what it does with damage, and what it tells of a module."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from ci.wheelfile.binary import BinaryError, elf, parse
from ci.wheelfile.binary.elf import HEADER, NOTE, STACK, Elf
from ci.wheelfile.binary.model import Binary

from .damage_support import header, put, segment
from .elf_support import fixed, linked, relocation


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return linked(tmp_path_factory.mktemp("elf"), "gnu")


def test_the_limits_themselves() -> None:
    assert (elf.MOST_PARTS, elf.MOST_SYMBOLS, elf.MOST_VERSIONS, elf.MOST_RELOCATIONS) == (1_000, 1_000_000, 10_000, 4_000_000)
    assert elf.LONGEST == 2**16


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("MOST_PARTS", lambda read: max(read.header.segments, read.header.sections), "it has too many sections or segments"),
        ("MOST_RELOCATIONS", lambda read: max(read.tags["RELASZ"], read.tags["PLTRELSZ"]) // 24, "it has too many relocations"),
        ("MOST_SYMBOLS", lambda read: len(read.symbols) - 1, "it has too many symbols"),
        ("MOST_VERSIONS", lambda read: len(read.needs), "it has too many symbol versions"),
    ],
)
def test_limits(module: bytes, name: str, what: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are taken, one more is not."""
    most = what(Elf(module))
    monkeypatch.setattr(elf, name, most)
    assert parse(module)
    monkeypatch.setattr(elf, name, most - 1)
    with pytest.raises(BinaryError, match=f"^not readable as ELF: {words}$"):
        parse(module)


@pytest.mark.parametrize("layout", [elf.SEGMENT, elf.SECTION, elf.ENTRY, elf.SYMBOL, elf.NEED, elf.AUXILIARY])
def test_numbers_have_no_sign(layout: struct.Struct) -> None:
    assert min(layout.unpack(b"\xff" * layout.size)) > 0
    assert elf.RELOCATION.unpack(b"\xff" * 24) == (2**64 - 1, 2**64 - 1, -1)
    assert min(HEADER.unpack(b"\xff" * HEADER.size)[1:]) > 0


def test_places(module: bytes) -> None:
    """Where in the file an address lies, up to the last byte that is stored."""
    read = Elf(module)
    for each in read.loads:
        assert read.place(each.address, each.stored) == each.offset
        assert read.place(each.address + each.stored - 1) == each.offset + each.stored - 1
        for address, size in ((each.address, each.stored + 1), (each.address + each.stored, 1)):
            with pytest.raises(BinaryError, match=f"^its address {address:#x} is of no byte of the file$"):
                read.place(address, size)
    with pytest.raises(BinaryError, match="is of no byte"):
        read.place(read.loads[1].address - 1)


def test_a_hash_table_without_end(tmp_path: Path) -> None:
    """The older one counts the symbols."""
    both = linked(tmp_path, "both")
    place = Elf(both).place(Elf(both).tags["HASH"]) + 4
    for count, words in ((1_000_002, "it has too many symbols"), (2**32 - 1, "it has too many symbols"), (1_000_001, "is of no byte")):
        with pytest.raises(BinaryError, match=words):
            parse(put(both, place, "<I", count))


def test_a_symbol_far_behind(module: bytes) -> None:
    """A relocation leads to it."""
    for number, words in (
        (2**32 - 1, "it has too many symbols"),
        (1_000_001, "it has too many symbols"),
        (1_000_000, "is of no byte of the file"),
    ):
        with pytest.raises(BinaryError, match=words):
            parse(relocation(7, 0, 12, fixed(number))(module))


def test_names_of_other_letters(module: bytes) -> None:
    """They are shown, not refused: what is wrong with them is for the rules to say."""
    for old in (b"cuInit\0", b".comment\0"):
        changed = module.replace(old, b"\xff" + old[1:])
        assert changed != module
        read = Elf(changed)
        assert f"\\xff{old[1:-1].decode()}" in {*(each.name for each in read.symbols), *(each.name for each in read.sections)}


def test_what_is_told(module: bytes) -> None:
    read = parse(module)
    loader, needed = "ld-linux-x86-64.so.2", {"cuInit", "PyModule_Create2", "__tls_get_addr"}
    exported = {"PyInit_module", "call", "data", "pointer", "t"}
    weak = {"weak", "__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
    assert read == Binary(
        format="elf",
        machine="x86_64",
        soname=None,
        needed=(loader,),
        rpath=("$ORIGIN/x",),
        versions={loader: frozenset({"GLIBC_2.3"})},
        undefined=frozenset(needed),
        asked_of={"__tls_get_addr": (loader, "GLIBC_2.3")},
        exports=frozenset(exported),
        used=frozenset(exported | needed | weak),
    )


def test_what_is_told_of_more(tmp_path: Path) -> None:
    """A name of its own, two places to search, and a stack that is executable."""
    read = parse(linked(tmp_path, "gnu", "", "-Wl,-soname,other.so", "-Wl,-rpath,/a:/b", "-Wl,-z,execstack"))
    assert read
    assert (read.soname, read.rpath) == ("other.so", ("$ORIGIN/x", "/a", "/b"))
    assert read.executable_stack


@pytest.mark.parametrize(
    ("number", "name", "executable"), [(62, "x86_64", True), (183, "aarch64", False), (3, "i686", False), (8, "machine 8", False)]
)
def test_processors(module: bytes, number: int, name: str, executable: bool) -> None:
    """Without a header of the stack it is executable by x86's rules."""
    read = elf.described(Elf(header(18, "<H", number)(segment(STACK, 0, 0, fixed(NOTE))(module))))
    assert (read.machine, read.executable_stack) == (name, executable)


def test_exports(tmp_path: Path) -> None:
    """Of a library whose symbols have versions, all but one."""
    (tmp_path / "map").write_text("ONE { global: call; }; TWO { global: data; } ONE;")
    (tmp_path / "module.so").write_bytes(linked(tmp_path, "gnu", "", f"-Wl,--version-script={tmp_path / 'map'}"))
    with (tmp_path / "module.so").open("rb") as stream:
        found = elf.exports(stream)
    versions = {"call": True, "data": True, "t": False, "cuInit": None, "weak": None}
    assert {name: found.get(name) for name in versions} == versions


def test_no_section_headers(module: bytes) -> None:
    """However many there are said to be."""
    assert Elf(module).sections
    assert Elf(header(40, "<Q", 0)(module)).sections == ()


def test_nothing_that_is_dynamic() -> None:
    """No section, no symbols, no versions."""
    read = Elf(HEADER.pack(b"\x7fELF\2\1\1".ljust(16, b"\0"), 3, 62, 1, 0, 64, 0, 0, 64, 56, 0, 64, 0, 0))
    assert (read.entries, read.symbols, read.needs, read.sections, read.relocations, read.hashed) == ((), (), (), (), (), {})


@pytest.mark.parametrize("name", [".debug_x", ".zdebug_", ".stabstr", ".symtab"])
def test_what_a_debugger_reads(module: bytes, name: str) -> None:
    found = parse(module.replace(b".comment\0", name.encode().ljust(8, b"\0") + b"\0"))
    assert found
    assert found.debug == (name,)
