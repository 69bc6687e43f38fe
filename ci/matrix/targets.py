"""GPU architectures, and what the device code is compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


def architecture_order(architecture: str) -> tuple[int, str]:
    """Sorts 90a after 90 and 100 after 90a; ValueError for what is no architecture's name."""
    parts = re.fullmatch(r"([0-9]+)([af]*)", architecture)
    if not parts:
        raise ValueError(f"unknown architecture {architecture!r}")
    return int(parts[1]), parts[2]


def newest_first(architectures: Iterable[str]) -> list[str]:
    """The order of SASS, and of PTX, in a fatbin: native modules take the first that a GPU runs."""
    return sorted(architectures, key=architecture_order, reverse=True)


def capability(architecture: str) -> int:
    """The compute capability of the GPUs that an architecture is for: 90 of 90a."""
    return architecture_order(architecture)[0]


@dataclass(frozen=True)
class Targets:
    """The targets of a source: SASS, such as 80 and 90a, and PTX."""

    sass: tuple[str, ...]
    ptx: tuple[str, ...]

    def front(self, architecture: str) -> str:
        """The PTX that SASS is assembled from: the newest declared one; its own if there is none or if it has a suffix."""
        number, variant = architecture_order(architecture)
        older = [each for each in self.ptx if capability(each) <= number]
        return architecture if variant or not older else max(older, key=architecture_order)

    def holds(self, architecture: str) -> bool:
        """Whether the source has code for these GPUs at all."""
        bound = [each for each in self.sass if architecture_order(each)[1]]  # to instructions that only their own GPUs have
        if architecture_order(architecture)[1] or len(bound) == len(self.sass):
            return architecture in bound
        return capability(architecture) >= min(map(capability, self.sass))


@dataclass(frozen=True)
class Device:
    """The device code: the root of its compilers, "" where the project has none, and what sources are compiled for."""

    root: str = ""
    default: Targets = Targets((), ())
    special: tuple[tuple[str, Targets], ...] = ()  # by patterns of sources' names

    def declared(self, source: str) -> Targets:
        return next((targets for pattern, targets in self.special if fnmatchcase(source, pattern)), self.default)

    @property
    def sass(self) -> tuple[str, ...]:
        """SASS of any source."""
        return _ascending(each for targets in (self.default, *dict(self.special).values()) for each in targets.sass)

    @property
    def ptx(self) -> tuple[str, ...]:
        return _ascending(each for targets in (self.default, *dict(self.special).values()) for each in targets.ptx)

    def asked(self, requested: Iterable[str]) -> Targets:
        """Return the targets of names: a number is the declared architecture, so 90 is 90a; compute_80 is PTX. ValueError for others."""
        names = {str(capability(name)): name for name in self.sass}
        asked = [name.partition("_")[::2] if name.startswith("compute_") else ("", names.get(name, name)) for name in requested]
        return Targets(*(_ascending(name for kind, name in asked if kind == wanted) for wanted in ("", "compute")))

    def native(self, capability_: int) -> tuple[str, ...]:
        """The names of what a GPU runs: the newest SASS of its family, which the compilers know, else all PTX."""
        family = [name for name in self.sass if capability(name) // 10 == capability_ // 10 and capability(name) <= capability_]
        return (max(family, key=architecture_order),) if family else tuple(f"compute_{name}" for name in self.ptx)

    def narrowed(self, source: str, requested: Iterable[str]) -> Targets:
        """The requested targets that the source has code for."""
        declared, asked = self.declared(source), self.asked(requested)
        return Targets(*(tuple(filter(declared.holds, each)) for each in (asked.sass, asked.ptx)))


def _ascending(architectures: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(architectures), key=architecture_order))
