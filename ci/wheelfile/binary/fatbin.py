"""CUDA fatbins: containers of SASS and PTX for several GPU architectures, as files and inside binaries.

A container is a 16-byte header (magic, version, header size, size of the body) and a body of entries, each a header that names the
kind of code and the architecture, followed by the code itself, compressed or not. NVIDIA documents none of it; the layout agrees with
`cuobjdump --list-elf --list-ptx` on MLX's own libraries. There is no tool for Windows binaries, which is one reason for this reader.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...matrix import Targets, architecture_order
from .model import BinaryError

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, body size
# Kind, header size, padded size of the code, its size as stored, architecture, place and length of the name, flags, size unpacked.
ENTRY = struct.Struct("<H2xIQI8x3IQ8xQ")
VERSION, HEADER_SIZE = 1, CONTAINER.size
KINDS = {1: "ptx", 2: "sass"}
VARIANTS = {0x100000: "a", 0x200000: "f"}  # architecture-specific and family-specific code


@dataclass(frozen=True)
class Entry:
    kind: str  # "sass", "ptx" or "kind N"
    architecture: str  # "90", "90a", "100f"
    offset: int = field(default=0, compare=False)  # of its header in the data
    size: int = field(default=0, compare=False)  # header and payload, as stored


@dataclass(frozen=True)
class Fatbin:
    offset: int
    entries: tuple[Entry, ...]

    @property
    def end(self) -> int:
        return self.entries[-1].offset + self.entries[-1].size

    def architectures(self, kind: str) -> frozenset[str]:
        return frozenset(entry.architecture for entry in self.entries if entry.kind == kind)


def find(data: bytes) -> Iterator[Fatbin]:
    """Every fatbin container in `data`.

    The four bytes of the magic also occur by chance and in code that looks for them: only a header that is right in every field counts.
    A container whose header is right but whose entries do not add up raises :class:`BinaryError`, because skipping it would hide code.
    """
    position = data.find(MAGIC)
    while position >= 0:
        body = _body_size(data, position)
        if body is None:
            position = data.find(MAGIC, position + 1)
            continue
        start = position + HEADER_SIZE
        if start + body > len(data):
            raise BinaryError(f"fatbin at offset {position}: its {body} bytes run past the end of the file")
        yield Fatbin(position, tuple(_entries(data, position, start, start + body)))
        position = data.find(MAGIC, start + body)


def only(data: bytes) -> Fatbin:
    """The one container that `data` is, from the first byte to the last; BinaryError if it is anything else."""
    fatbins = list(find(data))
    if not fatbins or fatbins[0].offset:
        raise BinaryError("start: there is no fatbin")
    if fatbins[0].end != len(data):
        raise BinaryError(f"end: {len(data) - fatbins[0].end} bytes behind the fatbin")
    return fatbins[0]


def readable(data: bytes) -> list[Fatbin]:
    """As `find`, but none at all where one is damaged: for those who describe, and leave it to the audit to judge."""
    try:
        return list(find(data))
    except BinaryError:
        return []


def _body_size(data: bytes, position: int) -> int | None:
    if position + CONTAINER.size > len(data):
        return None
    _, version, header_size, body = CONTAINER.unpack_from(data, position)
    return int(body) if (version, header_size) == (VERSION, HEADER_SIZE) and body > 0 else None


def _entries(data: bytes, container: int, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        if position + ENTRY.size > end:
            raise BinaryError(f"fatbin at offset {container}: the entry at {position} is cut off")
        kind, header_size, payload_size, _, architecture, _, _, flags, _ = ENTRY.unpack_from(data, position)
        if header_size < ENTRY.size or position + header_size + payload_size > end:
            raise BinaryError(f"fatbin at offset {container}: the entry at {position} runs past the end of its container")
        variant = "".join(letter for flag, letter in VARIANTS.items() if flags & flag)
        size = header_size + payload_size
        yield Entry(KINDS.get(kind, f"kind {kind}"), f"{architecture}{variant}", position, size)
        position += size


ORDINARY, FROM_BLACKWELL = 0x11, 0x1000000  # for 64-bit hosts and by nvFatbin; of SASS of the newest ABI
CUBIN = struct.Struct("<7s2B7x2H28xI")  # ELF: identification, system, ABI version, type, machine, flags
EXECUTABLE, CUDA = 2, 190
TARGET = re.compile(rb"^\.target sm_(\w+)$", re.MULTILINE)


def misplaced(data: bytes, entry: Entry, source: str) -> str:
    """The problem of an entry's code, as nvFatbin writes it uncompressed; empty if it is of the source and for the architecture it says."""
    _, header_size, _, stored, _, place, length, flags, unpacked = ENTRY.unpack_from(data, entry.offset)
    number = int(entry.architecture.rstrip("af"))
    variant = sum(flag for flag, letter in VARIANTS.items() if entry.architecture.endswith(letter))
    expected = ORDINARY | variant | (FROM_BLACKWELL if entry.kind == "sass" and number >= 100 else 0)
    if flags != expected:
        return f"the flags {flags:#x}, expected {expected:#x}"
    name = data[entry.offset + place : entry.offset + place + length]
    if name != source.encode() or place + length > header_size:
        return f"code of {name[:80].decode(errors='backslashreplace') or 'no source'}, expected that of {source}"
    if stored or unpacked:
        return f"sizes of compressed code, {stored} and {unpacked} bytes, expected none"
    code = data[entry.offset + header_size : entry.offset + entry.size]
    found = _target_of_ptx(code) if entry.kind == "ptx" else _target_of_cubin(code)
    return "" if found == entry.architecture else f"code for {found or 'no architecture'}, expected it for {entry.architecture}"


def _target_of_ptx(code: bytes) -> str:
    """By its directive; the text ends with a NUL, and up to seven more fill the entry up."""
    found, text = TARGET.findall(code), code.rstrip(b"\0")
    return found[0].decode() if len(found) == 1 and 1 <= len(code) - len(text) <= 8 and b"\0" not in text else ""


def _target_of_cubin(code: bytes) -> str:
    """By the flags of its ELF header: of ABI version 7, where 0x800 marks 9.0a, or of 8, which CUDA 12.8 writes for Blackwell."""
    if len(code) < CUBIN.size:
        return ""
    ident, _, abi, kind, machine, flags = CUBIN.unpack_from(code)
    if ident != b"\x7fELF\2\1\1" or (kind, machine) != (EXECUTABLE, CUDA) or abi not in {7, 8}:
        return ""
    return f"{flags & 0xFF}{'a' if flags & 0x800 else ''}" if abi == 7 else str(flags >> 8 & 0xFF)


def unlike(found: Fatbin, expected: Targets) -> Iterator[str]:
    """The code of a fatbin that differs from what is expected."""
    for kind, wanted in (("sass", expected.sass), ("ptx", expected.ptx)):
        if (held := found.architectures(kind)) != set(wanted):
            yield f"{kind.upper()} for {_spell(held)}, expected {_spell(wanted)}"
    for kind in sorted({entry.kind for entry in found.entries} - {"sass", "ptx"}):
        yield f"entries of {kind}, expected SASS and PTX only"
    if len(set(found.entries)) != len(found.entries):
        yield "two entries of one architecture, expected one of each"


def _spell(architectures: Iterable[str]) -> str:
    return ", ".join(sorted(architectures, key=architecture_order)) or "no architecture"
