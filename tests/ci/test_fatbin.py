"""The fatbin reader, on made containers and, where it is installed, on MLX's own library."""

from __future__ import annotations

import importlib.util
import random
import struct
from pathlib import Path

import pytest

from ci.matrix import Targets
from ci.wheelfile.binary import BinaryError
from ci.wheelfile.binary.fatbin import CONTAINER, ENTRY, MAGIC, find, misplaced, only, readable, unlike

from .audit_support import code, container, entry, fatbin


def test_reads_kinds_architectures_and_variants() -> None:
    data = b"\x7fELF...." + container([entry(2, "90"), entry(2, "90a"), entry(2, "100f"), entry(1, "120")]) + b"tail"
    (found,) = find(data)
    assert found.offset == 8
    assert found.architectures("sass") == {"90", "90a", "100f"}
    assert found.architectures("ptx") == {"120"}


def test_one_architecture_twice() -> None:
    (found,) = find(fatbin([80, 80], []))
    assert list(unlike(found, Targets(("80",), ()))) == ["two entries of one architecture, expected one of each"]


def test_other_code_than_expected() -> None:
    (found,) = find(container([entry(2, "120"), entry(2, "80"), entry(2, "90a"), entry(1, "80"), entry(8, "80"), entry(16, "80")]))
    assert list(unlike(found, Targets(("100", "80"), ()))) == [
        "SASS for 80, 90a, 120, expected 80, 100",
        "PTX for 80, expected no architecture",
        "entries of kind 16, expected SASS and PTX only",
        "entries of kind 8, expected SASS and PTX only",
    ]


def test_containers_one_after_another_and_apart() -> None:
    first, second = fatbin([80], [80]), fatbin([90], [])
    found = list(find(first + second + b"\0" * 5 + first))
    assert [each.offset for each in found] == [0, len(first), len(first) + len(second) + 5]
    assert [each.architectures("sass") for each in found] == [{"80"}, {"90"}, {"80"}]


def test_entries_say_where_they_are() -> None:
    entries = [entry(2, "90", b"\x5a" * 8), entry(1, "120", b"\x5a" * 40)]
    data = b"head" + container(entries)
    (found,) = find(data)
    assert [data[each.offset : each.offset + each.size] for each in found.entries] == entries


def test_only_one_and_nothing_else() -> None:
    data = fatbin([80], [80])
    assert only(data) == next(find(data))
    assert only(data).end == len(data)
    for wrong in (b"", b"\0" + data, data + b"\0", data + data, data[:-1]):
        with pytest.raises(BinaryError):
            only(wrong)


def test_who_only_describes_sees_none_where_one_is_damaged() -> None:
    data = fatbin([80], [80])
    assert readable(data + data) == list(find(data + data))
    assert readable(data + data[:-1]) == []


def test_other_kinds_are_named() -> None:
    (found,) = find(container([entry(2, "80"), entry(8, "80")]))
    assert [each.kind for each in found.entries] == ["sass", "kind 8"]


@pytest.mark.parametrize(
    "chance",
    [
        MAGIC,
        MAGIC + b"\0" * 40,
        MAGIC + struct.pack("<HHQ", 2, 16, 64) + b"\0" * 64,
        MAGIC + struct.pack("<HHQ", 1, 24, 64) + b"\0" * 64,
        MAGIC + struct.pack("<HHQ", 1, 16, 0),
        MAGIC * 7,
    ],
    ids=["cut off", "zeros", "version", "header size", "empty", "repeated"],
)
def test_the_magic_by_chance_is_no_container(chance: bytes) -> None:
    (found,) = find(chance + fatbin([75], []))
    assert found.architectures("sass") == {"75"}
    assert list(find(chance)) == []


def test_magic_inside_a_payload_is_no_container() -> None:
    (found,) = find(container([entry(2, "80", fatbin([75], []))]))
    assert found.architectures("sass") == {"80"}


def test_random_bytes_hold_no_container() -> None:
    noise = random.Random(7).randbytes(1 << 20)  # noqa: S311
    assert list(find(noise + MAGIC + noise[:99])) == []


@pytest.mark.parametrize("size", [17, 70, 100, 130])
def test_a_cut_off_container_is_an_error(size: int) -> None:
    with pytest.raises(BinaryError, match="fatbin at offset 3"):
        list(find(b"abc" + container([entry(2, "80"), entry(1, "80")])[:size]))


@pytest.mark.parametrize("size", [2**63, 2**64 - 1])
def test_numbers_have_no_sign(size: int) -> None:
    """Or such a container would be none, and its code hidden."""
    broken = bytearray(container([entry(2, "80")]))
    struct.pack_into("<Q", broken, 8, size)
    with pytest.raises(BinaryError, match=rf"^fatbin at offset 0: its {size} bytes run past the end of the file$"):
        list(find(bytes(broken)))
    for layout in (CONTAINER, ENTRY):
        assert min(layout.unpack(b"\xff" * layout.size)) > 0


def test_an_entry_that_overruns_its_container_is_an_error() -> None:
    broken = bytearray(container([entry(2, "80"), entry(1, "80")]))
    struct.pack_into("<Q", broken, 16 + 8, 1 << 40)
    with pytest.raises(BinaryError, match="runs past the end of its container"):
        list(find(bytes(broken)))


@pytest.mark.parametrize("size", [20, 63])
@pytest.mark.parametrize("behind", [b"", b"\0" * 99, entry(2, "80") * 3], ids=["nothing", "zeros", "code"])
def test_an_entry_whose_header_is_cut_off_is_an_error(size: int, behind: bytes) -> None:
    """Also where bytes behind the container would make it whole."""
    data = container([entry(2, "80"), entry(1, "80")[:size]]) + behind
    with pytest.raises(BinaryError) as refusal:
        list(find(data))
    assert str(refusal.value) == f"fatbin at offset 0: the entry at {16 + len(entry(2, '80'))} is cut off"


def test_the_shortest_entry() -> None:
    """Its header has all that is read of one."""
    header = bytearray(entry(2, "80", b"")[:64])
    struct.pack_into("<IQ", header, 4, len(header), 0)
    (found,) = find(container([bytes(header)]))
    assert found.architectures("sass") == {"80"}
    struct.pack_into("<IQ", header, 4, 48, 8)
    with pytest.raises(BinaryError, match="fatbin at offset 0"):
        list(find(container([bytes(header[:56])])))


def wrong(data: bytes) -> str:
    """What is wrong with the first entry."""
    return misplaced(data, only(data).entries[0], "decode.cu")


def test_an_entry_that_says_it_is_compressed() -> None:
    for at, layout, told in ((16, "<I", "7 and 0"), (56, "<Q", "0 and 7")):
        data = bytearray(container([entry(2, "80", name="decode.cu")]))
        struct.pack_into(layout, data, 16 + at, 7)
        assert wrong(bytes(data)) == f"sizes of compressed code, {told} bytes, expected none"


PTX, CUBIN = code(1, "80"), code(2, "80")
WHOLE = PTX[:-1] + b"/" * (-len(PTX[:-1]) % 8)  # text that nothing fills up


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        (1, PTX, ""),
        (1, PTX.rstrip(b"\0") + b"\0" * 16, "code for no architecture"),
        (1, WHOLE, "code for no architecture"),
        (1, WHOLE + b"\0" * 8, ""),
        (1, PTX.replace(b"//", b"\0/"), "code for no architecture"),
        (1, PTX.replace(b"//", b".target sm_80"), "code for no architecture"),
        (1, PTX.replace(b"sm_80", b"sm_90a"), "code for 90a"),
        (2, CUBIN, ""),
        (2, CUBIN[:52], ""),
        (2, CUBIN[:48], "code for no architecture"),
        (2, b"\0" + CUBIN[1:], "code for no architecture"),
        (2, CUBIN[:8] + b"\6" + CUBIN[9:], "code for no architecture"),
        (2, CUBIN[:16] + b"\1" + CUBIN[17:], "code for no architecture"),
        (2, CUBIN[:18] + b"\1" + CUBIN[19:], "code for no architecture"),
        (2, code(2, "90"), "code for 90"),
        (2, code(2, "90a"), "code for 90a"),
        (2, code(2, "120"), "code for 120"),
    ],
)
def test_whose_code_it_is(kind: int, text: bytes, found: str) -> None:
    told = wrong(container([entry(kind, "80", text, "decode.cu")]))
    assert told == (f"{found}, expected it for 80" if found else "")


@pytest.mark.parametrize(("kind", "architecture"), [(1, "120"), *((2, each) for each in ("75", "80", "89", "90", "90a", "100", "120"))])
def test_flags(kind: int, architecture: str) -> None:
    """Those of the source's compiler, and no other."""
    good = container([entry(kind, architecture, name="decode.cu")])
    (flags,) = struct.unpack_from("<Q", good, 16 + 40)
    assert wrong(good) == ""
    for bit in (0, 1, 4, 6, 15, 24, 63):
        changed = bytearray(good)
        struct.pack_into("<Q", changed, 16 + 40, flags ^ 1 << bit)
        assert wrong(bytes(changed)) == f"the flags {flags ^ 1 << bit:#x}, expected {flags:#x}"


@pytest.mark.parametrize(("name", "told"), [("", "no source"), ("wide.cu", "wide.cu"), ("\u00e9.cu", "\u00e9.cu"), ("x" * 99, "x" * 80)])
def test_whose_source_it_is(name: str, told: str) -> None:
    good = container([entry(2, "80", name=name)])
    (length,) = struct.unpack_from("<I", good, 16 + 36)
    good = good[: 16 + 36] + struct.pack("<I", len(name.encode()) or length) + good[16 + 40 :]
    assert wrong(good) == f"code of {told}, expected that of decode.cu"


def test_a_name_behind_the_header() -> None:
    """It has to end in it."""
    for place, found in ((71, ""), (72, "code of decode.cu, expected that of decode.cu")):
        data = bytearray(entry(2, "80", name="decode.cu"))
        struct.pack_into("<II", data, 32, place, 9)
        data[place : place + 9] = b"decode.cu"
        assert struct.unpack_from("<I", data, 4) == (80,)
        assert wrong(container([bytes(data)])) == found


def test_an_entry_without_a_header_is_an_error() -> None:
    broken = bytearray(container([entry(2, "80")]))
    struct.pack_into("<I", broken, 16 + 4, 0)
    with pytest.raises(BinaryError, match="fatbin at offset 0"):
        list(find(bytes(broken)))


def test_mlx_library() -> None:
    """Upstream's list, as cuobjdump prints it."""
    specification = importlib.util.find_spec("mlx")
    places = (
        [Path(place, "lib", "libmlx.so") for place in (specification.submodule_search_locations or ()) if specification]
        if specification
        else []
    )
    found = [each for place in places if place.is_file() for each in find(place.read_bytes())]
    if not found:
        pytest.skip("no MLX with a CUDA backend is installed (pip install 'mlx[cuda13]')")
    assert {frozenset(each.architectures("sass")) for each in found} == {frozenset({"75", "80", "90a", "100a", "120a", "121a"})}
    assert {frozenset(each.architectures("ptx")) for each in found} == {frozenset({"120"})}
