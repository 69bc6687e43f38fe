"""A wheel's properties, for the summary table, ``--json`` and the SBOM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from ..matrix import architecture_order
from .binary import Binary, fatbin
from .wheel import Wheel


@dataclass(frozen=True)
class ModuleFacts:
    """One native module."""

    member: str
    size: int
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    glibc: str | None  # the highest version of these symbols that it needs
    glibcxx: str | None


@dataclass(frozen=True)
class DeviceFacts:
    """The device code. Architectures are those of all fatbins together."""

    digest: str  # of the manifest, which the native modules know it by; "" where there is none
    size: int
    fatbins: tuple[str, ...]
    sass: tuple[str, ...]
    ptx: tuple[str, ...]


@dataclass(frozen=True)
class WheelFacts:
    file: str
    project: str
    version: str
    tags: tuple[str, ...]
    size: int
    device: DeviceFacts
    modules: tuple[ModuleFacts, ...]


def facts(wheel: Wheel) -> WheelFacts:
    return WheelFacts(
        file=wheel.path.name,
        project=wheel.project,
        version=str(wheel.version),
        tags=tuple(sorted(map(str, wheel.tags))),
        size=wheel.path.stat().st_size,
        device=device(wheel),
        modules=tuple(_module(member, wheel.members[member], binary) for member, binary in sorted(wheel.binaries.items())),
    )


def device(wheel: Wheel) -> DeviceFacts:
    files = wheel.fatbins
    found = [each for data in wheel.unpacked.values() for each in fatbin.readable(data)]
    return DeviceFacts(
        digest=wheel.device_digest,
        size=sum(map(len, files.values())),
        fatbins=tuple(files),
        sass=_sorted(arch for each in found for arch in each.architectures("sass")),
        ptx=_sorted(arch for each in found for arch in each.architectures("ptx")),
    )


def _module(member: str, data: bytes, binary: Binary) -> ModuleFacts:
    return ModuleFacts(
        member=member,
        size=len(data),
        needed=binary.needed,
        rpath=binary.rpath,
        glibc=highest(binary, "GLIBC_"),
        glibcxx=highest(binary, "GLIBCXX_"),
    )


def _sorted(architectures: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(architectures), key=architecture_order))


def highest(binary: Binary, family: str) -> str | None:
    """The highest of the symbol versions of a family, such as GLIBC_, that a binary needs."""
    numbers = [version.removeprefix(family) for versions in binary.versions.values() for version in versions if version.startswith(family)]
    return newest(numbers) or None


def newest(versions: Iterable[str]) -> str:
    """The highest of the symbol versions' numbers; names such as PRIVATE sort lowest."""
    return max(versions, key=_comparable, default="")


def _comparable(version: str) -> Version:
    try:
        return Version(version)
    except ValueError:  # which all of packaging's are
        return Version("0")
