"""What a wheel is made of, to the byte: its members, and in each native binary the GPU code of each architecture and the host's code."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from ..audit.checks.binaries import newest
from ..audit.facts import ModuleFacts, facts
from ..binary import fatbin
from ..matrix import architecture_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..audit.wheel import Wheel

SYSTEMS = {"manylinux": "Linux", "musllinux": "Linux", "linux": "Linux", "win": "Windows", "macosx": "macOS"}
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
class Module:
    """A native binary."""

    facts: ModuleFacts
    parts: tuple[Part, ...]
    fatbins_with: dict[tuple[str, str], int]  # by kind and architecture: how many of the fatbins have that code
    versions: dict[str, str]  # by symbol family, such as GLIBC: the highest version that is needed
    needed: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.facts.member.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]

    def size_of(self, label: Label) -> int:
        return next((part.size for part in self.parts if part.label == label), 0)

    def size_of_kind(self, *kinds: str) -> int:
        return sum(part.size for part in self.parts if part.label.kind in kinds)


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

    def size_of_kind(self, *kinds: str) -> int:
        return sum(module.size_of_kind(*kinds) for module in self.modules)


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
    fatbins_with = Counter((kind, arch) for each in fatbin.find(data) for kind in ("sass", "ptx") for arch in each.architectures(kind))
    return Module(
        facts=known,
        parts=parts(data),
        fatbins_with=dict(fatbins_with),
        versions={family: newest(numbers) for family, numbers in found.items() if numbers},
        needed=binary.needed,
    )


def parts(data: bytes) -> tuple[Part, ...]:
    """Every byte of a binary under exactly one label: GPU code by architecture, then what is left of the sections, then the rest."""
    sizes: Counter[Label] = Counter()
    entries = [entry for each in fatbin.find(data) for entry in each.entries]
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
    return ("sass", "ptx").index(label.kind) if label.architecture else 2, number, variant, -size


def _sections(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Where in the file each section lies: offset, size and name."""
    if data[:2] == b"MZ":
        import pefile

        for section in pefile.PE(data=data, fast_load=True).sections:
            yield section.PointerToRawData, section.SizeOfRawData, section.Name.rstrip(b"\0").decode("utf-8", "replace")
    else:
        from elftools.elf.elffile import ELFFile

        for section in ELFFile(BytesIO(data)).iter_sections():
            if section["sh_type"] not in {"SHT_NULL", "SHT_NOBITS"}:
                yield section["sh_offset"], section["sh_size"], section.name
