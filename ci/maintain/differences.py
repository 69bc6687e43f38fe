"""Where two wheels differ: which member, and in it which section, GPU architecture or line.

Whether they differ is decided by their bytes alone. This module explains: it names the smallest part that a reader can act on, and
leaves out what only follows from it, such as the RECORD rows of members that differ anyway.
"""

from __future__ import annotations

import csv
import stat
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from operator import ne
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..audit.binary.fatbin import Entry

EXCERPT = 24  # bytes shown of each side
LINE = 160  # characters shown of a line

# What the archive says of a member besides its contents.
ATTRIBUTES: Mapping[str, Callable[[zipfile.ZipInfo], str]] = {
    "date": lambda entry: "{:04}-{:02}-{:02} {:02}:{:02}:{:02}".format(*entry.date_time),
    "mode": lambda entry: f"{stat.filemode(entry.external_attr >> 16)} ({entry.external_attr:#x})",
    "compression": lambda entry: zipfile.compressor_names.get(entry.compress_type, str(entry.compress_type)),  # type: ignore[attr-defined]
    "made by": lambda entry: f"system {entry.create_system}, version {entry.create_version}, for version {entry.extract_version}",
    "flags": lambda entry: f"{entry.flag_bits:#x}",
    "extra field": lambda entry: entry.extra.hex(" ") or "none",
    "comment": lambda entry: repr(entry.comment),
}


@dataclass(frozen=True)
class Difference:
    member: str  # "" for the archive as a whole
    place: str  # "date", "line 12", "section .rodata", "sass 90"
    sides: tuple[str, str]  # what the first and the second have there
    extent: str = ""  # how much of the place differs
    offset: int | None = None  # in the first wheel's member

    def __str__(self) -> str:
        where = self.place if self.offset is None else f"{self.place} at {self.offset:#x}"
        extent = f" ({self.extent})" if self.extent else ""
        return f"{self.member or 'the archive'}: {where}{extent}: {' against '.join(self.sides)}"


def lines(found: Iterable[Difference]) -> Iterator[str]:
    """One line for each difference, and one for all members that differ in the same way."""
    alike: dict[tuple[object, ...], list[Difference]] = {}
    for each in found:
        alike.setdefault((each.place, each.sides, each.extent, each.offset), []).append(each)
    for first, *others in alike.values():
        yield f"{first}, and so in {len(others)} more" if others else str(first)


def summary(found: Iterable[Difference]) -> Iterator[str]:
    """One line for each member, with the places that differ."""
    places: dict[str, list[str]] = {}
    for each in found:
        places.setdefault(each.member, []).append(each.place)
    for member, differing in places.items():
        yield f"{member or 'the archive'}: {', '.join(dict.fromkeys(differing))}"


def differences(first: Path, second: Path) -> list[Difference]:
    """Every difference of two wheels; none exactly when the files are the same to the byte."""
    left, right = _read(first), _read(second)
    if left == right:
        return []
    try:
        with zipfile.ZipFile(BytesIO(left)) as one, zipfile.ZipFile(BytesIO(right)) as other:
            found = [*_archive(one, other), *_contents(one, other)]
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise EnvironmentProblem(f"{first} or {second} is not a readable wheel: {error}", cure="build or fetch it again") from error
    return found or [_bytes("", "outside the members", left, right)]


def environment(path: Path) -> dict[str, str]:
    """What a wheel says of where it was built: two builds can be expected to be equal only where this is."""
    from ..audit.wheel import read

    wheel = read(path)
    generators = [line.partition(": ")[2] for line in wheel.information("WHEEL").splitlines() if line.startswith("Generator: ")]
    compilers = {text for name, binary in wheel.binaries.items() for text in _compilers(binary.format, wheel.members[name])}
    return {
        "tags": " ".join(sorted(map(str, wheel.tags))),
        "generators": ", ".join(generators) or "unknown",
        "compilers": ", ".join(sorted(compilers)) or "unknown",
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}", cure="check the path") from error


def _compilers(kind: str, data: bytes) -> Iterator[str]:
    if kind == "elf":
        comment = _sections(data).get(".comment")
        yield from (text.decode("utf-8", "replace") for text in (comment.data if comment else b"").split(b"\0") if text)
    else:
        header = _pe(data).OPTIONAL_HEADER
        yield f"linker {header.MajorLinkerVersion}.{header.MinorLinkerVersion}"


# ------------------------------------------------------------------------------------------------------------- the archive
def _archive(one: zipfile.ZipFile, other: zipfile.ZipFile) -> Iterator[Difference]:
    names, others = one.namelist(), other.namelist()
    yield from (Difference(name, "member", ("there", "absent")) for name in names if name not in others)
    yield from (Difference(name, "member", ("absent", "there")) for name in others if name not in names)
    # Members of one side only are named already; the order is that of those which both have.
    common, ordered = [name for name in names if name in others], [name for name in others if name in names]
    for place, (left, right) in enumerate(zip(common, ordered, strict=False), 1):
        if left != right:
            yield Difference("", f"order, member {place}", (left, right))
            break
    if one.comment != other.comment:
        yield Difference("", "comment", (repr(one.comment), repr(other.comment)))
    for name in dict.fromkeys(common):
        ours, theirs = one.getinfo(name), other.getinfo(name)
        for attribute, describe in ATTRIBUTES.items():
            if describe(ours) != describe(theirs):
                yield Difference(name, attribute, (describe(ours), describe(theirs)))
        same = (ours.CRC, ours.compress_type) == (theirs.CRC, theirs.compress_type)
        if same and ours.compress_size != theirs.compress_size:
            yield Difference(name, "compressed size", (str(ours.compress_size), str(theirs.compress_size)))


def _contents(one: zipfile.ZipFile, other: zipfile.ZipFile) -> Iterator[Difference]:
    names, others = one.namelist(), other.namelist()
    changed = set(names) ^ set(others) | {name for name in {*names} & {*others} if one.read(name) != other.read(name)}
    for name in dict.fromkeys(names):
        if name not in changed or name not in others:
            continue
        left, right = one.read(name), other.read(name)
        if not (name.endswith(".dist-info/RECORD") and _rows(left, changed) == _rows(right, changed)):
            yield from _member(name, left, right)


def _rows(record: bytes, changed: set[str]) -> list[list[str]]:
    """The rows of a RECORD, without those that only repeat that a member differs."""
    return [row for row in csv.reader(record.decode("utf-8", "replace").splitlines()) if row and row[0] not in changed]


# ------------------------------------------------------------------------------------------------------------- one member
def _member(name: str, left: bytes, right: bytes) -> Iterable[Difference]:
    for magic in (b"\x7fELF", b"MZ"):
        if left.startswith(magic) and right.startswith(magic):
            return _binary(name, left, right)
    if name.endswith(".fatbin"):
        return _fatbin(name, left, right)
    try:
        return [_text(name, left.decode("utf-8").splitlines(keepends=True), right.decode("utf-8").splitlines(keepends=True))]
    except UnicodeDecodeError:
        return [_bytes(name, "contents", left, right)]


def _fatbin(name: str, left: bytes, right: bytes) -> Iterable[Difference]:
    """The entries that differ, each by its architecture; the contents as a whole if the two do not correspond."""
    from ..audit.binary.fatbin import readable

    one, other = ([entry for each in readable(data) for entry in each.entries] for data in (left, right))
    if one != other:
        return [Difference(name, "fatbin", (_holds(one), _holds(other)))]
    found = []
    for a, b in zip(one, other, strict=True):
        code = left[a.offset : a.offset + a.size], right[b.offset : b.offset + b.size]
        if code[0] != code[1]:
            found.append(_bytes(name, f"{a.kind} {a.architecture}", *code, a.offset))
    return found or [_bytes(name, "contents", left, right)]


def _holds(entries: Sequence[Entry]) -> str:
    return ", ".join(f"{entry.kind} {entry.architecture}" for entry in entries) or "no fatbin"


def _text(name: str, left: Sequence[str], right: Sequence[str]) -> Difference:
    number = _first(left, right)
    extent = "" if len(left) == len(right) else f"{len(left)} lines against {len(right)}"
    return Difference(name, f"line {number + 1}", (_line(left, number), _line(right, number)), extent)


def _line(text: Sequence[str], number: int) -> str:
    return repr(text[number][:LINE]) if number < len(text) else "the end"


def _bytes(name: str, place: str, left: bytes, right: bytes, base: int = 0) -> Difference:
    at = _first(left, right)
    extent = f"{sum(map(ne, left, right))} of {len(left)} bytes" if len(left) == len(right) else f"{len(left)} bytes against {len(right)}"
    # Text before the difference says what differs: the path of a file, the name of a symbol.
    start = at
    while start > max(0, at - EXCERPT) and 32 <= left[start - 1] < 127:
        start -= 1
    end = at + EXCERPT
    return Difference(name, place, (repr(left[start:end]), repr(right[start:end])), extent, base + at)


def _first(left: Sequence[object], right: Sequence[object]) -> int:
    """The index of the first difference, which may be the end of the shorter side."""
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# --------------------------------------------------------------------------------------------------------- native binaries
@dataclass(frozen=True)
class _Section:
    offset: int
    data: bytes


def _binary(name: str, left: bytes, right: bytes) -> Iterable[Difference]:
    one, other = _sections(left), _sections(right)
    found = [each for section in {**one, **other} for each in _section(name, section, one.get(section), other.get(section))]
    if left.startswith(b"MZ"):
        stamp, stamped = (f"{_pe(data).FILE_HEADER.TimeDateStamp:#x}" for data in (left, right))
        found += [Difference(name, "header, TimeDateStamp", (stamp, stamped))] if stamp != stamped else []
    return found or [_bytes(name, "outside the sections", left, right)]


def _section(member: str, name: str, one: _Section | None, other: _Section | None) -> Iterable[Difference]:
    place = f"section {name}"
    if one is None or other is None:
        return [Difference(member, place, (_size(one), _size(other)))]
    if one.data == other.data:
        return []
    return [_bytes(member, place, one.data, other.data, one.offset)]


def _size(section: _Section | None) -> str:
    return f"{len(section.data)} bytes" if section else "absent"


def _sections(data: bytes) -> dict[str, _Section]:
    """The sections of an ELF or PE file that take room in it; of equal names, all but the first get a number."""
    from ..audit.binary import BinaryError

    try:
        entries = list(_elf_sections(data) if data.startswith(b"\x7fELF") else _pe_sections(data))
    except BinaryError as error:
        raise EnvironmentProblem(str(error), cure="build or fetch the wheel again: it is damaged") from error
    found: dict[str, _Section] = {}
    for name, offset, size in entries:
        same = sum(key.partition(" (")[0] == name for key in found)
        found[f"{name} ({same + 1})" if same else name] = _Section(offset, data[offset : offset + size])
    return found


def _elf_sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    from ..audit.binary import BinaryError

    try:
        for section in ELFFile(BytesIO(data)).iter_sections():
            if section["sh_type"] not in {"SHT_NULL", "SHT_NOBITS"}:
                yield section.name, section["sh_offset"], section["sh_size"]
    except (ELFError, AttributeError, IndexError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise BinaryError(f"not readable as ELF: {error}") from error


def _pe_sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    for section in _pe(data).sections:
        yield section.Name.rstrip(b"\0").decode("utf-8", "replace"), section.PointerToRawData, section.SizeOfRawData


def _pe(data: bytes) -> Any:
    import pefile

    from ..audit.binary import BinaryError

    try:
        return pefile.PE(data=data, fast_load=True)
    except pefile.PEFormatError as error:
        raise BinaryError(f"not readable as PE: {error}") from error
