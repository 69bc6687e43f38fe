"""The reader of DLLs (ci/wheelfile/binary/pe.py), on one made by mingw: its rules value by value, and what it tells of one."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pefile
import pytest

from ci.wheelfile.binary import Binary, BinaryError, parse, pe

from .audit_support import World, require
from .pe_support import directory, header, imports_of_python, section, signed, with_thunk

SOURCE = """
__declspec(dllimport) int PyModule_Create2(void *, int);
__declspec(dllexport) int PyInit_module(void *p) { return PyModule_Create2(p, 3); }
__declspec(dllexport) int other(void) { return 1; }
__declspec(dllexport) const char spare[256] = "SPARE";
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    require("x86_64-w64-mingw32-gcc")
    world = World(tmp_path_factory.mktemp("pe"), "windows")
    python = world.library(world.folder / "python3.dll", "int PyModule_Create2(void *p, int v) { return p ? v : 0; }")
    return world.compile(world.folder / "module.pyd", SOURCE, f"{python}.lib").read_bytes()


def read(data: bytes) -> Binary:
    found = parse(data)
    assert found
    return found


def told(data: bytes, words: str) -> bool:
    return any(words in each for each in read(data).faults)


def test_what_is_told(module: bytes) -> None:
    found = read(module)
    assert (found.format, found.machine, found.soname, found.rpath) == ("pe", "amd64", None, ())
    assert found.exports == {"PyInit_module", "other", "spare"}
    assert {"python3.dll", "KERNEL32.dll"} <= set(found.needed)
    assert "PyModule_Create2" in found.used
    assert (found.debug, found.pdb, found.company, found.signed, found.faults) == ((), None, None, False, ())
    assert read(signed(module)).signed


@pytest.mark.parametrize(("number", "name"), [(0x8664, "amd64"), (0xAA64, "arm64"), (0x14C, "win32"), (0x1234, "0x1234")])
def test_processors(module: bytes, number: int, name: str) -> None:
    assert read(header(Machine=number)(module)).machine == name


def test_every_field(module: bytes) -> None:
    for name, taken, several in (
        ("Subsystem", {2, 3}, range(12)),
        ("MajorSubsystemVersion", {5, 6}, range(12)),
        ("MinorSubsystemVersion", {0, 2}, range(5)),
        ("SectionAlignment", {0x1000}, (0x800, 0x2000)),
        ("FileAlignment", {0x200}, (0x100, 0x400)),
    ):
        for value in several:
            words = f"has the {name} {value:#x}, expected {' or '.join(map(hex, sorted(taken)))}"
            assert told(header(**{name: value})(module), words) == (value not in taken)
    for bit in range(16):
        flags = pefile.PE(data=module, fast_load=True).FILE_HEADER.Characteristics
        changed = header(Characteristics=flags ^ 1 << bit)(module)
        assert told(changed, f"has the Characteristics {flags ^ 1 << bit:#x}, expected 0x2022") == (1 << bit not in {0x4, 0x8, 0x200})
        flags = pefile.PE(data=module, fast_load=True).OPTIONAL_HEADER.DllCharacteristics
        changed = header(DllCharacteristics=flags ^ 1 << bit)(module)
        assert told(changed, f"has the DllCharacteristics {flags ^ 1 << bit:#x}, expected 0x140") == (1 << bit not in {0x20, 0x4000})
    for base, right in ((0x180000000, True), (0x10000, True), (0x180008000, False), (0x180000001, False)):
        assert told(header(ImageBase=base)(module), f"has the ImageBase {base:#x}, expected a multiple of 0x10000") != right


def test_every_flag_of_a_section(module: bytes) -> None:
    for bit in range(32):
        taken = bit in {5, 6, 7, 20, 21, 22, 23, 25, 28, 29, 30, 31}
        words = f"has the section .rdata of the flags {0x40000040 | 1 << bit:#x}, expected only those of code and data"
        names = [each.Name.rstrip(b"\0") for each in pefile.PE(data=module, fast_load=True).sections]
        assert told(section(names.index(b".rdata"), Characteristics=0x40000040 | 1 << bit)(module), words) != taken


def test_directories_and_the_entry_point_up_to_the_edge(module: bytes) -> None:
    """Of a section, of which each byte is in it and the next is not."""
    there = pefile.PE(data=module, fast_load=True).sections
    names = [each.Name.rstrip(b"\0") for each in there]
    data, code = there[names.index(b".rdata")], there[names.index(b".text")]
    start, end = data.VirtualAddress, data.VirtualAddress + data.Misc_VirtualSize
    for place, size, taken in ((start, 40, True), (end - 40, 40, True), (end - 39, 40, False), (start - 1, 40, False)):
        words = f"has the TLS directory at {place:#x}, of {size:#x} bytes, expected it inside a section"
        assert told(directory("TLS", place, size)(module), words) != taken
    end = code.VirtualAddress + code.Misc_VirtualSize
    for place, taken in ((code.VirtualAddress, True), (code.VirtualAddress - 1, False), (end - 1, True), (end, False), (start, False)):
        words = f"has the AddressOfEntryPoint {place:#x}, expected it inside a section of code"
        assert told(header(AddressOfEntryPoint=place)(module), words) != taken


def test_limits(module: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many symbols are taken, one more is not."""
    image = pefile.PE(data=module, fast_load=True)
    seen = sum(len(names) + 1 for _, names in pe._imports(image))
    for most, taken in ((-(-seen // 2), True), ((seen - 1) // 2, False)):
        monkeypatch.setattr(pe, "MOST_SYMBOLS", most)
        if taken:
            assert parse(module)
        else:
            with pytest.raises(BinaryError, match=f"imports more than {most} symbols$"):
                parse(module)
    monkeypatch.setattr(pe, "MOST_SYMBOLS", 3)
    assert pe._exports(image) == {"PyInit_module": "", "other": "", "spare": ""}
    monkeypatch.setattr(pe, "MOST_SYMBOLS", 2)
    with pytest.raises(BinaryError, match=r"^not readable as PE: exports 3 symbols, expected at most 2$"):
        pe._exports(image)


def test_the_limits_themselves() -> None:
    assert (pe.MOST_SYMBOLS, pe.LONGEST_SYMBOL, pe.LONGEST_STUB) == (2**16, 4096, 0x200)


def test_what_linkers_leave_for_debuggers(module: bytes) -> None:
    """Sections by their long names, which stand behind the symbols."""
    names = [b".debug_info", b".zdebug_line", b".stabstr", b".other"]
    places = [4 + sum(len(each) + 1 for each in names[:number]) for number in range(len(names))]
    data = bytes(4) + b"\0".join([*names, b""])
    sections = [SimpleNamespace(Name=f"/{place}".encode().ljust(8, b"\0")) for place in places]
    for symbols in (0, 2):
        image = SimpleNamespace(
            FILE_HEADER=SimpleNamespace(PointerToSymbolTable=7, NumberOfSymbols=symbols),
            sections=[SimpleNamespace(Name=b".text\0\0\0"), SimpleNamespace(Name=b"/x\0\0\0\0\0\0"), *sections],
        )
        told = pe._debug_sections(image, bytes(7 + 18 * symbols) + data)
        assert told == (*["COFF symbol table"] * (symbols > 0), ".debug_info", ".zdebug_line", ".stabstr")


@pytest.mark.parametrize("size", [32, 63, 64, 96])
def test_what_is_loaded_late(module: bytes, size: int) -> None:
    """As many DLLs as the directory has room for."""
    place = module.index(b"SPARE")
    start = pefile.PE(data=module, fast_load=True).get_rva_from_offset(place)
    spare = b"".join(struct.pack("<8I", 1, start + name, 0, 0, start + 96, 0, 0, 0) for name in (140, 160)).ljust(96, b"\0")
    spare += (
        struct.pack("<3Q", start + 120, 1 << 63 | 5, 0) + b"\0\0first\0".ljust(20, b"\0") + b"one.dll\0".ljust(20, b"\0") + b"two.dll\0"
    )
    found = read(directory("DELAY_IMPORT", start, size)(module[:place] + spare + module[place + len(spare) :]))
    assert set(found.needed) - set(read(module).needed) == ({"one.dll"} if size == 32 else {"one.dll", "two.dll"})
    assert found.used - read(module).used == {"first", "#5"}
    assert found.faults == ()


def test_a_signature_of_a_header_that_is_wrong(module: bytes) -> None:
    found = read(signed(header(Subsystem=1)(module)))
    assert (found.signed, found.needed, found.exports) == (False, (), frozenset())


def test_what_pefile_passes_over_is_read(module: bytes) -> None:
    """A name of odd letters, and directories that have to be there."""
    odd = read(module.replace(b"PyModule_Create2\0", b"PyModule-Create2\0"))
    assert odd.faults == ()
    assert "PyModule-Create2" in odd.used
    for name in ("IMPORT", "BASERELOC"):
        assert told(directory(name, 0, 0)(module), f"has no {name} directory, expected one")


def test_the_size_of_the_file(module: bytes) -> None:
    for data, more, expected in (
        (module, 1, len(module)),
        (module[:-512], 0, len(module)),
        (signed(module + bytes(8)), 0, len(module) + 48),
    ):
        words = f"has {len(data) + more} bytes, expected {expected}: nothing belongs behind the file's own"
        assert told(data + b"x" * more, words)


def test_one_warning_is_told(module: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pefile.PE, "get_warnings", lambda _: ["one", "two"])
    assert read(module).faults == ("is strange to pefile: one",)


@pytest.mark.parametrize("table", [0, 1])
def test_functions_by_ordinal(module: bytes, table: int) -> None:
    """Windows may read either of two tables."""
    for number in (1, 0xFFFF):
        changed = with_thunk(module, imports_of_python(module)[table], 1 << 63 | number)
        assert f"#{number}" in read(changed).used
        assert told(changed, f"imports #{number} of python3.dll by ordinal, expected imports by name: they show what is in the stable ABI")


def test_a_signature_that_is_too_short(module: bytes) -> None:
    """Its form alone, or less than that."""
    for size in (0, 4, 8):
        behind = struct.pack("<IHH", size, 0x200, 2)[:size]
        assert not read(directory("SECURITY", len(module), size)(module) + behind).signed


def test_several_ordinals() -> None:
    """Each is told once, of Python alone."""
    words = "by ordinal, expected imports by name: they show what is in the stable ABI"
    imports = [("Python3.dll", ["#1", "a", "#2", "#1"]), ("other.dll", ["#3"]), ("python312.dll", ["b"])]
    assert list(pe._symbol_faults(imports, {})) == [f"imports #1, #2 of Python3.dll {words}"]


def test_a_string_that_is_not_there() -> None:
    assert pe._string(SimpleNamespace(get_string_at_rva=lambda *_: None), 5) == ""
