"""Mutants of a finished wheel: numbers of ELF files, text files, records of the archive.

What belongs to a changed file is made right again, as by one who forges a wheel: RECORD, the SBOM where it can be, and the digest of the
device code's manifest in the native modules. So the fault itself is to be found.
"""

from __future__ import annotations

import hashlib
import random
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ci.audit.sbom.document import render
from ci.files import record_digest
from ci.wheelfile.binary.elf import DYNAMIC, ENTRY, HEADER, LOAD, NOTE, PROPERTY, SEGMENT, TAGS, TLS, Elf
from ci.wheelfile.wheel import MANIFEST, Wheel, read

Files = dict[str, bytes]

NUMBERS = (0, 1, 2, 7, 8, 0x18, 0x40, 0xFF, 0x1000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**47, 2**63, 2**64 - 1)
OF_HEADER = ((4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 2), (18, 2), (20, 4), (32, 8), (40, 8), (48, 4), (54, 2), (56, 2), (60, 2))
OF_SEGMENT = ((0, 4), (4, 4), *((place, 8) for place in range(8, 56, 8)), (48, 8))  # the alignment twice
TEXTS = ("METADATA", "WHEEL", "RECORD", "_build.json", "manifest.json", "_libraries.json", "mlx-cuda.cdx.json")
MARKS = (b"\n", b"\r", b"\f", b"\0", b" ", b":", b",", b'"', b"\xff")
LINES = (b"Requires-Dist: evil\n", b"Root-Is-Purelib: true\n", b"Tag: py3-none-any\n", b"wheel-version: 2.0\n")
TIME = (2026, 1, 2, 3, 4, 6)
EPOCH = 1767323046  # the same


@dataclass(frozen=True)
class Mutant:
    kind: str
    files: Files  # what an installer should make of it
    path: Path


class Subject:
    """The wheel that mutants are made of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wheel: Wheel = read(path)
        self.files: Files = dict(self.wheel.members)
        self.record = f"{self.wheel.dist_info}/RECORD"

    def unchanged(self, folder: Path) -> Mutant:
        """The wheel itself, packed as its mutants are."""
        files = dict(self.files)
        self._made_right(files, "")
        packed(files, folder / self.path.name)
        return Mutant("none", files, folder / self.path.name)

    def mutant(self, seed: str, folder: Path) -> Mutant:
        chance, path = random.Random(seed), folder / self.path.name  # noqa: S311  # a seed gives its mutant again
        kind = chance.choice(["elf", "elf", "elf", "text", "archive"])
        if kind == "archive":
            kind, data = archive(self.path.read_bytes(), chance)
            path.write_bytes(data)
            return Mutant(f"archive: {kind}", self.files, path)
        files = dict(self.files)
        name = chance.choice([each for each in files if each.endswith(".so" if kind == "elf" else TEXTS)])
        part, files[name] = elf(files[name], chance) if kind == "elf" else (Path(name).name, text(files[name], chance))
        self._made_right(files, name)
        packed(files, path)
        return Mutant(f"{kind}: {part}", files, path)

    def _made_right(self, files: Files, changed: str) -> None:
        old, new = (hashlib.sha256(each[MANIFEST]).hexdigest().encode() for each in (self.files, files))
        for name in (each for each in files if old != new and each.endswith(".so")):
            files[name] = files[name].replace(old, new)
        if changed != self.wheel.sbom:
            with suppress(Exception):  # of what cannot be read any more there is none; then the old one stays
                files[self.wheel.sbom] = render(replace(self.wheel, members=files), epoch=EPOCH).encode()
        if changed != self.record:
            rows = [f"{name},{record_digest(data)},{len(data)}\n" for name, data in files.items() if name != self.record]
            files[self.record] = "".join([*rows, f"{self.record},,\n"]).encode()


def packed(files: Files, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as made:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            # Device code is compressed already; the rest is, or the wheel would be too large.
            made.writestr(entry, data, zipfile.ZIP_STORED if name.endswith(".fatbin.lzma") else zipfile.ZIP_DEFLATED, compresslevel=6)


def number(chance: random.Random, old: int, size: int) -> int:
    """Another one of so many bytes: one of those that matter, a neighbour, or one bit."""
    new = chance.choice([chance.choice(NUMBERS), old + chance.choice([-8, -1, 1, 8, 0x1000]), old ^ 1 << chance.randrange(8 * size)])
    return int(new % 256**size)


def at(data: bytes, chance: random.Random, place: int, size: int) -> bytes:
    old = int.from_bytes(data[place : place + size], "little")
    return data[:place] + number(chance, old, size).to_bytes(size, "little") + data[place + size :]


def drawn(chance: random.Random, every: Sequence[int], weighty: Sequence[int]) -> int:
    """One of every, or as often one of the few that matter most."""
    return chance.choice(chance.choice([every, weighty or every]))


def elf(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A number of the header, of a segment, of a dynamic entry, or of what the dynamic section leads to."""
    good, letters = Elf(data), list[int]()
    inits = [number for number, each in enumerate(good.symbols) if each.name.startswith("PyInit_")]
    for name in (*good.strings("NEEDED"), *(good.symbols[number].name for number in inits)):
        start = data.find(f"\0{name}\0".encode(), good.string_table[0]) - good.string_table[0]
        letters += range(start + 1, start + len(name) + 2)
    tables: dict[str, tuple[str, int, int, list[int]]] = {  # tag, size and number of entries, those that matter most
        "symbol": ("SYMTAB", 24, len(good.symbols), inits),
        "versym": ("VERSYM", 2, len(good.symbols), inits),
        "string": ("STRTAB", 1, good.string_table[1], letters),
        "relocation": ("RELA", 24, good.tags.get("RELASZ", 0) // 24, []),
        "plt": ("JMPREL", 24, good.tags.get("PLTRELSZ", 0) // 24, []),
        "version": ("VERNEED", 16, len(good.needs), []),
        "hash": ("GNU_HASH", 4, len(good.symbols), []),
    }
    notes = good.of(NOTE) + good.of(PROPERTY)
    held = [kind for kind, (tag, *_) in tables.items() if tag in good.tags] + ["note"] * bool(notes)
    kind = chance.choice(["header", "segment", "segment", "dynamic", "dynamic", "end", *held])
    if kind == "end":
        return kind, chance.choice([data + b"evil", data[: -chance.randrange(1, 5000)], data[: len(data) // 2]])
    if kind == "header":
        place, size = chance.choice(OF_HEADER)
    elif kind == "segment":
        weighty = [number for number, each in enumerate(good.segments) if each.type in {LOAD, TLS}]
        start = HEADER.size + SEGMENT.size * drawn(chance, range(len(good.segments)), weighty)
        place, size = chance.choice([(start + each, size) for each, size in OF_SEGMENT])
    elif kind == "dynamic":
        weighty = [number for number, (tag, _) in enumerate(good.entries) if TAGS.get(tag) == "NEEDED"]
        start = good.of(DYNAMIC)[0].offset + ENTRY.size * drawn(chance, range(len(good.entries) + 1), weighty)
        place, size = start + chance.choice([0, 8]), 8
    elif kind == "note":
        place, size = chance.choice([each.offset + 4 * chance.randrange(each.stored // 4) for each in notes]), chance.choice([1, 4])
    else:
        tag, size, count, weighty = tables[kind]
        start = good.place(good.tags[tag]) + size * drawn(chance, range(count), weighty)
        # Of a relocation its type and its symbol: what it writes, and where to, is the program's own, as its instructions are.
        place = start + (8 + chance.randrange(8) if kind in {"relocation", "plt"} else chance.randrange(size))
        size = chance.choice([1, 1, min(size, 4)])
    return kind, at(data, chance, place, size)


def text(data: bytes, chance: random.Random) -> bytes:
    place, new = chance.randrange(len(data) + 1), chance.choice(MARKS + LINES)
    start = data.rfind(b"\n", 0, place) + 1
    return chance.choice(
        [
            data[:place] + new + data[place:],
            data[:start] + new + data[start:],
            data[:place] + data[place + 1 :],
            data[:start] + data[data.find(b"\n", place) + 1 :],
            new + data,
            data + new,
        ]
    )


def archive(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A number of an entry's header, of the directory or of the end; or bytes more, or fewer."""
    end = len(data) - 22
    start = int.from_bytes(data[end + 16 : end + 20], "little")
    kind = chance.choice(["header", "directory", "directory", "end", "bytes"])
    entry = data.find(b"PK\1\2", chance.randrange(start, end - 46))
    if kind == "bytes":
        place, new = (
            chance.choice([0, start, end, len(data), chance.randrange(len(data))]),
            chance.choice([b"", b"PK\5\6", bytes(22), b"x"]),
        )
        return kind, data[:place] + new + data[place + chance.choice([0, 0, 1, 22]) :]
    size = chance.choice([1, 2, 4])
    if kind == "end":
        return kind, at(data, chance, end + chance.randrange(22 - size), size)
    if entry < 0:
        entry = start
    place, length = (int.from_bytes(data[entry + 42 : entry + 46], "little"), 30) if kind == "header" else (entry, 46)
    return kind, at(data, chance, place + chance.randrange(length), size)
