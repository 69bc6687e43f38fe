"""What a wheel is made of, to the byte: its members, the device code of each architecture, and the host's code in each native binary."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from ..audit.binary import fatbin
from ..audit.checks.binaries import newest
from ..audit.facts import ModuleFacts, facts
from ..matrix import architecture_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..audit.wheel import Wheel

SYSTEMS = {"manylinux": "Linux", "musllinux": "Linux", "linux": "Linux", "win": "Windows", "macosx": "macOS"}
GPU = ("sass", "ptx")  # kinds of code
FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")

# What the sections of a binary are for, the first that matches; the rest is headers and padding.
SECTIONS = (
    ("code", "host code", (".text*", ".init", ".fini", ".plt*")),
    ("data", "constants", (".rodata*", ".rdata*", ".data*", ".tdata", ".*_array")),
    ("tables", "exception tables", (".eh_frame*", ".gcc_except_table*", ".pdata", ".xdata")),
    ("tables", "symbols", (".dyn*", ".gnu*", ".rel*", ".got*", ".hash", ".idata", ".edata", ".didat")),
    ("debug", "debug information", (".debug*", ".symtab", ".strtab", ".stab*")),
)


class Label(NamedTuple):
    """What some bytes are: the kind decides the colour, the name is read."""

    kind: str  # sass, ptx, code, data, tables, debug, other; python and about for files
    name: str  # "sm_90", "compute_80", "host code"
    architecture: str = ""


@dataclass(frozen=True)
class Part:
    label: Label
    size: int


@dataclass(frozen=True)
class Code:
    """Native code that lies in one place: the folder of device code, or a native binary."""

    name: str
    size: int
    parts: tuple[Part, ...]
    fatbins: dict[str, frozenset[tuple[str, str]]]  # by source, or inside a binary by number: kinds and architectures of the code

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]

    def size_of(self, label: Label) -> int:
        return next((part.size for part in self.parts if part.label == label), 0)

    @property
    def architectures(self) -> set[str]:
        return {architecture for held in self.fatbins.values() for _, architecture in held}


@dataclass(frozen=True)
class Module(Code):
    """A native binary."""

    facts: ModuleFacts
    versions: dict[str, str]  # by symbol family, such as GLIBC: the highest version that is needed
    needed: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    name: str
    size: int
    compressed: int


@dataclass(frozen=True)
class Contents:
    """A wheel, without any judgement."""

    file: str
    sha256: str
    project: str
    version: str
    system: str  # Linux
    machine: str  # x86_64
    python: str  # the Python and ABI tags: cp310-abi3
    tags: tuple[str, ...]
    size: int
    members: tuple[Member, ...]
    device: Code
    modules: tuple[Module, ...]
    requirements: tuple[str, ...]
    dist_info: str
    sboms: dict[str, bytes] = field(repr=False)

    @property
    def platform(self) -> str:
        return f"{self.system} {self.machine}"

    @property
    def unpacked(self) -> int:
        return sum(member.size for member in self.members)

    @property
    def platform_tags(self) -> str:
        return ", ".join(tag.removeprefix(f"{self.python}-") for tag in self.tags)

    @property
    def code(self) -> tuple[Code, ...]:
        """All native code: the device code, if there is any, then the binaries."""
        return (self.device, *self.modules) if self.device.size else self.modules


def examine(wheel: Wheel) -> Contents:
    """Read everything that the report shows of a wheel alone."""
    known = facts(wheel)
    with zipfile.ZipFile(wheel.path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist() if not entry.is_dir()}
    system, machine = _platform(wheel.platforms[0])
    return Contents(
        file=wheel.path.name,
        sha256=hashlib.sha256(wheel.path.read_bytes()).hexdigest(),
        project=wheel.project,
        version=str(wheel.version),
        system=system,
        machine=machine,
        python=", ".join(sorted({f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags})),
        tags=known.tags,
        size=known.size,
        members=tuple(Member(name, len(wheel.members[name]), entries[name].compress_size) for name in sorted(entries)),
        device=_device(wheel),
        modules=tuple(_module(wheel, each) for each in known.modules),
        requirements=tuple(sorted(wheel.metadata.get_all("Requires-Dist", []))),
        dist_info=wheel.dist_info,
        sboms={name: data for name, data in sorted(wheel.members.items()) if fnmatch(name, "*.dist-info/sboms/*.json")},
    )


def _platform(tag: str) -> tuple[str, str]:
    """The system and the processor of a platform tag."""
    match = re.fullmatch(r"(manylinux|musllinux|linux|win|macosx)(?:\d+)?_(?:\d+_\d+_)?(\w+)", tag)
    return (SYSTEMS[match[1]], match[2]) if match else (tag, "")


def _module(wheel: Wheel, known: ModuleFacts) -> Module:
    data, binary = wheel.members[known.member], wheel.binaries[known.member]
    found: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for versions in binary.versions.values():
        for version in versions:
            family, _, number = version.partition("_")
            found.get(family, set()).add(number)
    return Module(
        name=known.member.rpartition("/")[2],
        size=known.size,
        parts=parts(data),
        fatbins={str(number): _held(each) for number, each in enumerate(fatbin.readable(data), 1)},
        facts=known,
        versions={family: newest(numbers) for family, numbers in found.items() if numbers},
        needed=binary.needed,
    )


def _device(wheel: Wheel) -> Code:
    sizes: Counter[Label] = Counter()
    fatbins: dict[str, frozenset[tuple[str, str]]] = {}
    for source, data in wheel.fatbins.items():
        sizes.update({part.label: part.size for part in parts(data)})
        fatbins[source] = frozenset().union(*map(_held, fatbin.readable(data)))
    found = tuple(Part(label, size) for label, size in sorted(sizes.items(), key=_order))
    return Code("device code", sum(sizes.values()), found, fatbins)


def _held(each: fatbin.Fatbin) -> frozenset[tuple[str, str]]:
    return frozenset((entry.kind, entry.architecture) for entry in each.entries if entry.kind in GPU)


def parts(data: bytes) -> tuple[Part, ...]:
    """Every byte of a binary or a fatbin under one label: GPU code by architecture, then what is left of the sections, then the rest."""
    sizes: Counter[Label] = Counter()
    entries = [entry for each in fatbin.readable(data) for entry in each.entries]
    for entry in entries:
        sizes[_gpu_label(entry)] += entry.size
    reached = 0
    for start, size, name in sorted(_sections(data)):
        begin, end = max(start, reached), min(start + size, len(data))
        if begin < end:
            sizes[_section_label(name)] += end - begin - sum(_overlap(entry, begin, end) for entry in entries)
            reached = end
    sizes[Label("other", "headers and padding")] += len(data) - sum(sizes.values())
    return tuple(Part(label, size) for label, size in sorted(sizes.items(), key=_order) if size > 0)


def _gpu_label(entry: fatbin.Entry) -> Label:
    if entry.kind == "sass":
        return Label("sass", f"sm_{entry.architecture}", entry.architecture)
    if entry.kind == "ptx":
        return Label("ptx", f"compute_{entry.architecture}", entry.architecture)
    return Label("other", f"{entry.kind} for {entry.architecture}")


def _section_label(name: str) -> Label:
    for kind, label, patterns in SECTIONS:
        if any(fnmatch(name, pattern) for pattern in patterns):
            return Label(kind, label)
    return Label("other", "headers and padding")


def _overlap(entry: fatbin.Entry, begin: int, end: int) -> int:
    return max(0, min(end, entry.offset + entry.size) - max(begin, entry.offset))


def _order(item: tuple[Label, int]) -> tuple[int, int, str, int]:
    """GPU code by architecture first, then the host's parts, the largest first."""
    label, size = item
    number, variant = architecture_order(label.architecture) if label.architecture else (0, "")
    return GPU.index(label.kind) if label.architecture else 2, number, variant, -size


def _sections(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Where in the file each section lies: offset, size and name."""
    if data[:2] == b"MZ":
        import pefile

        for section in pefile.PE(data=data, fast_load=True).sections:
            yield section.PointerToRawData, section.SizeOfRawData, section.Name.rstrip(b"\0").decode("utf-8", "replace")
    elif data[:4] == b"\x7fELF":
        from elftools.elf.elffile import ELFFile

        for section in ELFFile(BytesIO(data)).iter_sections():
            if section["sh_type"] not in {"SHT_NULL", "SHT_NOBITS"}:
                yield section["sh_offset"], section["sh_size"], section.name
