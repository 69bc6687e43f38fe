"""What ``ci.maintain.differences`` says of two wheels that differ in one thing."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci.errors import EnvironmentProblem
from ci.maintain.differences import differences, environment, lines, summary

from .audit_support import CU13, DIST_INFO, METADATA, NAMES, Files, World, container, entry, fatbin, make_world, member, write_wheel

if TYPE_CHECKING:
    from collections.abc import Callable

    from ci.maintain.differences import Difference
    from ci.matrix import System

NAME = NAMES["linux"]
INIT = "mlx_cuda/__init__.py"
TEXT = b"first line\nsecond line\nthird line\n"
DATE = (2026, 1, 2, 3, 4, 6)


@pytest.fixture
def found(tmp_path: Path) -> Callable[[Files, Files], list[Difference]]:
    """The differences of two wheels with these members, RECORD added to each."""

    def compare(first: Files, second: Files) -> list[Difference]:
        one, other = (write_wheel(tmp_path / side / NAME, {METADATA: b"", **files}) for side, files in (("1", first), ("2", second)))
        return differences(one, other)

    return compare


def zipped(path: Path, entries: dict[str, bytes], *, compression: int = zipfile.ZIP_DEFLATED, level: int = 6, **attributes: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            information = zipfile.ZipInfo(name, DATE)
            for key, value in attributes.items():
                setattr(information, key, value)
            archive.writestr(information, data, compression, level)
    return path


def shown(differing: list[Difference]) -> list[str]:
    return [str(each) for each in differing]


# ------------------------------------------------------------------------------------------------------------- the archive
def test_equal_wheels_have_no_difference(found: Callable[[Files, Files], list[Difference]]) -> None:
    assert found({INIT: TEXT}, {INIT: TEXT}) == []


def test_members_of_one_side_only(found: Callable[[Files, Files], list[Difference]]) -> None:
    assert shown(found({INIT: b"", "a": b"1", "c": b""}, {"b": b"", INIT: b"", "c": b""})) == [
        "a: member: there against absent",
        "b: member: absent against there",
    ]


def test_order(found: Callable[[Files, Files], list[Difference]]) -> None:
    record = {f"{DIST_INFO}/RECORD": b""}
    a, b, c = ({name: b""} for name in "abc")
    assert shown(found(a | b | c | record, a | c | b | record)) == ["the archive: order, member 3: b against c"]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"date_time": (2026, 1, 2, 3, 4, 8)}, "date: 2026-01-02 03:04:06 against 2026-01-02 03:04:08"),
        ({"external_attr": 0o100664 << 16}, "mode: ?rw------- (0x1800000) against -rw-rw-r-- (0x81b40000)"),
        ({"create_system": 0}, "made by: system 3, version 20, for version 20 against system 0, version 20, for version 20"),
        ({"extra": b"\1\2\2\0ab"}, "extra field: none against 01 02 02 00 61 62"),
        ({"comment": b"by hand"}, "comment: b'' against b'by hand'"),
        ({"compression": zipfile.ZIP_STORED}, "compression: deflate against store"),
        ({"level": 0}, "compressed size: 12 against 39"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_archive_says_of_a_member(tmp_path: Path, attributes: dict[str, object], expected: str) -> None:
    data = {INIT: b"line\nline\n" + b"x" * 24}
    plain, other = zipped(tmp_path / "1.whl", data), zipped(tmp_path / "2.whl", data, **attributes)  # type: ignore[arg-type]
    assert shown(differences(plain, other)) == [f"{INIT}: {expected}"]


def test_bytes_that_belong_to_no_member(tmp_path: Path) -> None:
    plain = zipped(tmp_path / "1.whl", {INIT: TEXT})
    other = tmp_path / "2.whl"
    other.write_bytes(b"junk" + plain.read_bytes())
    (difference,) = differences(plain, other)
    assert (difference.member, difference.place, difference.offset) == ("", "outside the members", 0)


def test_members_that_differ_alike_share_a_line(tmp_path: Path) -> None:
    data = dict.fromkeys("abc", TEXT)
    late = zipped(tmp_path / "2.whl", data, date_time=(2026, 1, 2, 3, 4, 8))
    (line,) = lines(differences(zipped(tmp_path / "1.whl", data), late))
    assert line == "a: date: 2026-01-02 03:04:06 against 2026-01-02 03:04:08, and so in 2 more"


def test_summary_has_a_line_for_each_member(tmp_path: Path) -> None:
    first = zipped(tmp_path / "1.whl", {"a": TEXT, "b": TEXT})
    second = zipped(tmp_path / "2.whl", {"b": TEXT + b"more", "a": TEXT}, date_time=(2026, 1, 2, 3, 4, 8))
    assert list(summary(differences(first, second))) == ["the archive: order, member 1", "a: date", "b: date, line 4"]


@pytest.mark.parametrize("data", [None, b"PK no zip", b""], ids=["absent", "damaged", "empty"])
def test_what_is_no_wheel_is_refused(tmp_path: Path, data: bytes | None) -> None:
    plain, other = zipped(tmp_path / "1.whl", {INIT: TEXT}), tmp_path / "2.whl"
    if data is not None:
        other.write_bytes(data)
    with pytest.raises(EnvironmentProblem, match=r"2\.whl"):
        differences(plain, other)


# ----------------------------------------------------------------------------------------------------------------- contents
def test_the_first_differing_line_and_no_record_row_that_follows(found: Callable[[Files, Files], list[Difference]]) -> None:
    changed = TEXT.replace(b"second", b"other")
    assert shown(found({INIT: TEXT}, {INIT: changed})) == [rf"{INIT}: line 2: 'second line\n' against 'other line\n'"]


def test_a_line_more(found: Callable[[Files, Files], list[Difference]]) -> None:
    (difference,) = found({INIT: TEXT}, {INIT: TEXT + b"fourth"})
    assert (difference.place, difference.extent, difference.sides) == ("line 4", "3 lines against 4", ("the end", "'fourth'"))


def test_a_record_that_differs_by_itself(found: Callable[[Files, Files], list[Difference]]) -> None:
    (difference,) = found({INIT: TEXT}, {INIT: TEXT, f"{DIST_INFO}/RECORD": b"nothing\n"})
    assert difference.member == f"{DIST_INFO}/RECORD"
    assert difference.place == "line 1"


def test_other_bytes_with_the_text_before_them(found: Callable[[Files, Files], list[Difference]]) -> None:
    first, second = (b"\xff\0\0\0/tmp/" + folder + b"/x.cpp\0" + b"\xff" * 40 for folder in (b"one", b"two"))
    (difference,) = found({"a.bin": first}, {"a.bin": second})
    assert (difference.place, difference.extent, difference.offset) == ("contents", f"3 of {len(first)} bytes", 9)
    assert difference.sides[0].startswith(r"b'/tmp/one/x.cpp\x00")
    assert difference.sides[1].startswith(r"b'/tmp/two/x.cpp\x00")


# ---------------------------------------------------------------------------------------------------------- native binaries
@pytest.fixture(scope="module", params=["linux", "windows"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp(request.param), request.param)


def module(world: World, **changes: object) -> Files:
    name = member(world, CU13)
    return {name: world.module(Path(name).name, CU13, **changes)}  # type: ignore[arg-type]


def patched(files: Files, old: bytes, new: bytes) -> Files:
    ((name, data),) = files.items()
    assert data.count(old) == 1
    assert len(old) == len(new)
    return {name: data.replace(old, new)}


SECTIONS: dict[System, tuple[str, str]] = {"linux": (".rodata", ".text"), "windows": (".rdata", ".text")}


def test_a_changed_section(native: World, found: Callable[[Files, Files], list[Difference]]) -> None:
    marked = module(native, source='const char marker[] = "\\1\\2built in /tmp/one"; const char *mark(void) { return marker; }')
    (name,) = marked
    offset = marked[name].index(b"built in /tmp/one")
    (difference,) = found(marked, patched(marked, b"/tmp/one", b"/tmp/two"))
    assert difference.place == f"section {SECTIONS[native.system][0]}"
    assert difference.offset == offset + len("built in /tmp/")
    assert difference.sides[0].startswith("b'built in /tmp/one")
    assert difference.extent.startswith("3 of ")


FATBIN = "mlx_cuda/device/decode.fatbin"


def code(payload: bytes) -> Files:
    return {FATBIN: container([entry(2, "80"), entry(2, "90a", b"\x5a" * 40 + payload + b"\x5a" * 5), entry(1, "120")])}


def test_changed_device_code_is_named_by_its_architecture(found: Callable[[Files, Files], list[Difference]]) -> None:
    original = code(b"one")
    (difference,) = found(original, code(b"two"))
    assert (difference.member, difference.place) == (FATBIN, "sass 90a")
    assert difference.extent == "3 of 112 bytes"
    assert difference.offset == original[FATBIN].index(b"Zone") + 1


def test_device_code_for_other_architectures(found: Callable[[Files, Files], list[Difference]]) -> None:
    (difference,) = found({FATBIN: fatbin([80, 90], [90])}, {FATBIN: fatbin([80, 89], [90])})
    assert difference.place == "fatbin"
    assert difference.sides == ("sass 80, sass 90, ptx 90", "sass 80, sass 89, ptx 90")


def test_what_lies_around_device_code(found: Callable[[Files, Files], list[Difference]]) -> None:
    (difference,) = found({FATBIN: fatbin([80], []) + b"a"}, {FATBIN: fatbin([80], []) + b"b"})
    assert (difference.place, difference.extent, difference.offset) == ("contents", "1 of 105 bytes", 104)


def test_damaged_device_code(found: Callable[[Files, Files], list[Difference]]) -> None:
    (difference,) = found({FATBIN: fatbin([80], [])}, {FATBIN: fatbin([80], [])[:-1]})
    assert difference.sides == ("sass 80", "no fatbin")


def test_headers(native: World, found: Callable[[Files, Files], list[Difference]]) -> None:
    original = module(native)
    ((name, data),) = original.items()
    stamped = bytearray(data)
    if native.system == "windows":
        struct.pack_into("<I", stamped, struct.unpack_from("<I", data, 0x3C)[0] + 8, 0x12345678)
        place = "header, TimeDateStamp"
    else:
        stamped[8] = 7  # e_ident[EI_ABIVERSION]
        place = "outside the sections"
    assert [each.place for each in found(original, {name: bytes(stamped)})] == [place]


def test_a_section_of_one_side_only(tmp_path: Path, found: Callable[[Files, Files], list[Difference]]) -> None:
    world = make_world(tmp_path, "linux")
    with_section = module(world, source='__attribute__((section("more"), used)) static int extra = 1;')
    places = {each.place: each.sides for each in found(module(world), with_section)}
    assert places["section more"] == ("absent", "4 bytes")


def test_a_damaged_binary_is_refused(found: Callable[[Files, Files], list[Difference]]) -> None:
    with pytest.raises(EnvironmentProblem, match="not readable as ELF"):
        found({"a.so": b"\x7fELF" + b"\xff" * 90}, {"a.so": b"\x7fELF" + b"\xfe" * 90})


def test_a_wheel_says_where_it_was_built(native: World, tmp_path: Path) -> None:
    name = NAMES[native.system]
    wheel = write_wheel(tmp_path / name, {**module(native), f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test 1\n"})
    known = environment(wheel)
    assert known["generators"] == "test 1"
    assert known["tags"] == name.removesuffix(".whl").split("-", 2)[2]
    assert known["compilers"].startswith("GCC: " if native.system == "linux" else "linker ")
    assert shutil.which(native.compiler)
