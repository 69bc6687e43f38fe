"""The use of each byte of a wheel: its members, the device code of each architecture, and the host code in each native binary."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import BytesIO
from typing import Any, NamedTuple

from ..device.packed import SUFFIX
from ..matrix import architecture_order
from ..wheelfile.binary import fatbin
from ..wheelfile.facts import ModuleFacts, WheelFacts, facts, highest
from ..wheelfile.wheel import DEVICE, Wheel
from . import slots
from .slots import Slot

FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")

# The purposes of a binary's sections, the first that matches; the rest is headers and padding.
SECTIONS = (
    ("code", "host code", (".text*", ".init", ".fini", ".plt*")),
    ("data", "constants", (".rodata*", ".rdata*", ".data*", ".tdata", ".*_array")),
    ("tables", "exception tables", (".eh_frame*", ".gcc_except_table*", ".pdata", ".xdata")),
    ("tables", "symbols", (".dyn*", ".gnu*", ".rel*", ".got*", ".hash", ".idata", ".edata", ".didat")),
    ("debug", "debug information", (".debug*", ".symtab", ".strtab", ".stab*")),
)

# Kinds of bytes, from the most to the least interesting, and their names in legends.
KINDS: Mapping[str, str] = {
    "sass": "SASS",
    "ptx": "PTX",
    "code": "host code",
    "data": "constants",
    "tables": "tables",
    "debug": "debug information",
    "python": "Python",
    "about": "about the wheel",
    "other": "other",
}


class Label(NamedTuple):
    """The use of some bytes: the kind, one of KINDS, decides the color; the name is shown."""

    kind: str
    name: str  # "sm_90", "compute_80", "host code"
    architecture: str = ""


PADDING = Label("other", "headers and padding")


@dataclass(frozen=True)
class Code:
    """Native code of one file or directory: the folder of device code, or a native binary."""

    name: str
    size: int
    parts: dict[Label, int]  # bytes
    fatbins: dict[str, frozenset[tuple[str, str]]]  # by source, or inside a binary by number: kinds and architectures of the code
    facts: ModuleFacts | None = None  # of a binary
    versions: Mapping[str, str] = field(default_factory=dict)  # of a binary, by symbol family: the highest version that is needed

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]

    @property
    def architectures(self) -> set[str]:
        return {architecture for held in self.fatbins.values() for _, architecture in held}


class Component(NamedTuple):
    """A line of the bill of materials."""

    name: str
    version: str
    kind: str
    license: str
    hashed: bool  # pinned by a hash


@dataclass(frozen=True)
class Bill:
    """The bill of materials that repair put into the wheel."""

    member: str
    format: str
    components: tuple[Component, ...] = ()


@dataclass(frozen=True)
class Contents:
    """A wheel, without any judgement."""

    facts: WheelFacts
    sha256: str
    slot: Slot
    members: tuple[zipfile.ZipInfo, ...]
    kinds: dict[str, int]  # every unpacked byte, by KINDS
    device: Code
    modules: tuple[Code, ...]
    requirements: tuple[str, ...]
    bills: tuple[Bill, ...]

    @property
    def size(self) -> int:
        return self.facts.size

    @property
    def unpacked(self) -> int:
        return sum(self.kinds.values())

    @property
    def code(self) -> tuple[Code, ...]:
        """All native code: the device code, if there is any, then the binaries."""
        return (self.device, *self.modules) if self.device.size else self.modules

    @property
    def platform_tags(self) -> str:
        return ", ".join(tag.removeprefix(f"{self.slot.python}-") for tag in self.facts.tags)


def examine(wheel: Wheel) -> Contents:
    """Read everything that the report shows of a wheel alone."""
    known, slot = facts(wheel), slots.of(wheel.path.name)
    assert slot  # noqa: S101  (a wheel is read by its name)
    with zipfile.ZipFile(wheel.path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist() if not entry.is_dir()}
    device, modules = _device(wheel), tuple(_module(wheel, each) for each in known.modules)
    return Contents(
        facts=known,
        sha256=hashlib.sha256(wheel.path.read_bytes()).hexdigest(),
        slot=slot,
        members=tuple(entries[name] for name in sorted(entries)),
        kinds=_kinds(wheel, (device, *modules)),
        device=device,
        modules=modules,
        requirements=tuple(sorted(wheel.metadata.get_all("Requires-Dist", []))),
        bills=tuple(_bill(name, data) for name, data in sorted(wheel.members.items()) if fnmatch(name, "*.dist-info/sboms/*.json")),
    )


def _device(wheel: Wheel) -> Code:
    unpacked = wheel.unpacked
    found = together(_packed(data, unpacked[source]) for source, data in wheel.fatbins.items())
    held = {source: frozenset[tuple[str, str]]().union(*_held(data)) for source, data in unpacked.items()}
    return Code("device code", sum(found.values()), found, held)


def _packed(data: bytes, unpacked: bytes) -> dict[Label, int]:
    """The bytes of a packed fatbin, divided as those of the fatbin are: its code is compressed in one stream."""
    sizes = Counter({label: size * len(data) // len(unpacked) for label, size in parts(unpacked).items()})
    sizes[PADDING] += len(data) - sizes.total()
    return _ordered(sizes)


def _module(wheel: Wheel, known: ModuleFacts) -> Code:
    data, binary = wheel.members[known.member], wheel.binaries[known.member]
    versions = {family: version for family in FAMILIES if (version := highest(binary, f"{family}_"))}
    held = {str(number): each for number, each in enumerate(_held(data), 1)}
    return Code(known.member.rpartition("/")[2], known.size, parts(data), held, known, versions)


def _held(data: bytes) -> list[frozenset[tuple[str, str]]]:
    """Kinds and architectures of the code in each fatbin."""
    return [
        frozenset((entry.kind, entry.architecture) for entry in each.entries if _label(entry).architecture)
        for each in fatbin.readable(data)
    ]


def _kinds(wheel: Wheel, code: Iterable[Code]) -> dict[str, int]:
    """Every unpacked byte of a wheel by kind, in the order of `KINDS`; kinds without any are left out."""
    sizes = Counter[str]()
    for each in code:
        for label, size in each.parts.items():
            sizes[label.kind] += size
    for name in wheel.members.keys() - wheel.binaries.keys() - {f"{DEVICE}{source}{SUFFIX}" for source in wheel.fatbins}:
        about, python = name.startswith(f"{wheel.dist_info}/"), name.endswith((".py", ".pyi", ".typed"))
        sizes["about" if about else "python" if python else "other"] += len(wheel.members[name])
    return {kind: sizes[kind] for kind in KINDS if sizes[kind]}


def parts(data: bytes) -> dict[Label, int]:
    """Every byte of a binary or a fatbin under one label: GPU code by architecture, then what is left of the sections, then the rest."""
    sizes = Counter[Label]()
    entries = [entry for each in fatbin.readable(data) for entry in each.entries]
    for entry in entries:
        sizes[_label(entry)] += entry.size
    reached = 0
    for start, size, name in sorted(_sections(data)):
        begin, end = max(start, reached), min(start + size, len(data))
        if begin < end:
            gpu = sum(max(0, min(end, entry.offset + entry.size) - max(begin, entry.offset)) for entry in entries)
            label = (Label(kind, about) for kind, about, patterns in SECTIONS if any(fnmatch(name, pattern) for pattern in patterns))
            sizes[next(label, PADDING)] += end - begin - gpu
            reached = end
    sizes[PADDING] += len(data) - sizes.total()
    return _ordered(sizes)


def _label(entry: fatbin.Entry) -> Label:
    names = {"sass": f"sm_{entry.architecture}", "ptx": f"compute_{entry.architecture}"}
    if entry.kind in names:
        return Label(entry.kind, names[entry.kind], entry.architecture)
    return Label("other", f"{entry.kind} for {entry.architecture}")


def together(each: Iterable[Mapping[Label, int]]) -> dict[Label, int]:
    return _ordered(sum(map(Counter, each), Counter()))


def _ordered(sizes: Mapping[Label, int]) -> dict[Label, int]:
    """GPU code by architecture first, then the host's parts, the largest first."""

    def order(label: Label) -> tuple[bool, bool, tuple[int, str], int]:
        architecture = architecture_order(label.architecture) if label.architecture else (0, "")
        return not label.architecture, label.kind == "ptx", architecture, -sizes[label]

    return {label: sizes[label] for label in sorted(sizes, key=order) if sizes[label] > 0}


def _sections(data: bytes) -> Iterator[tuple[int, int, str]]:
    """The offset, size and name of each section in the file."""
    if data[:2] == b"MZ":
        import pefile

        for section in pefile.PE(data=data, fast_load=True).sections:
            yield section.PointerToRawData, section.SizeOfRawData, section.Name.rstrip(b"\0").decode("utf-8", "replace")
    elif data[:4] == b"\x7fELF":
        from elftools.elf.elffile import ELFFile

        for section in ELFFile(BytesIO(data)).iter_sections():
            if section["sh_type"] not in {"SHT_NULL", "SHT_NOBITS"}:
                yield section["sh_offset"], section["sh_size"], section.name


def _bill(member: str, data: bytes) -> Bill:
    """The few columns that a reader wants of an SBOM; what is wrong with it is for the audit to tell."""
    try:
        document = json.loads(data)
        components = sorted(set(map(_component, document["components"])), key=lambda each: (each.name.lower(), each))
        return Bill(member, f"{document['bomFormat']} {document['specVersion']}", tuple(components))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Bill(member, "not a readable CycloneDX document")


def _component(table: dict[str, Any]) -> Component:
    licenses = [each.get("expression") or each["license"].get("id") or each["license"]["name"] for each in table.get("licenses", [])]
    hashed = any(each.get("hashes") for each in (table, *table.get("externalReferences", [])))
    return Component(table["name"], table.get("version", ""), table["type"], ", ".join(licenses), hashed)
