"""The whole report as data: what the templates show, and nothing that they would have to work out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import get_args

from ..audit.checks.libraries import Kind, Supplier, supplier
from ..audit.policy import Policy, for_wheel
from ..audit.systems import manylinux
from ..errors import EnvironmentProblem
from ..matrix import Targets
from ..wheelfile.facts import newest
from ..wheelfile.wheel import Wheel, read
from . import change, coverage, slots, verdict
from .contents import FAMILIES, Code, Contents, examine


@dataclass(frozen=True)
class Use:
    """A library that some modules of a wheel need."""

    library: str
    modules: tuple[str, ...]
    supplier: Supplier


@dataclass(frozen=True)
class Place:
    """A place that holds GPU code, or should."""

    code: Code
    promise: Mapping[str, Targets]  # what each of its fatbins should hold
    cells: tuple[coverage.Cell, ...] = ()  # its row of the matrix of architectures


@dataclass(frozen=True)
class Judged:
    """One wheel."""

    contents: Contents
    places: tuple[Place, ...]
    uses: tuple[Use, ...]
    admitted: dict[str, str]  # by symbol family: the newest version that the platform tag admits
    budget: int  # bytes

    def directories(self, module: Code) -> list[str]:
        """The directories of a module's libraries that the system does not find."""
        return list(dict.fromkeys(use.supplier.directory for use in self.uses if use.supplier.directory and module.name in use.modules))

    @property
    def filled(self) -> float:
        """Percent of the size budget."""
        return 100 * self.contents.size / self.budget


@dataclass(frozen=True)
class Report:
    wheels: tuple[Judged, ...]
    absent: tuple[slots.Slot, ...]  # that a release has and this set has not
    columns: tuple[coverage.Column, ...]
    architectures: int  # that there is or should be code for
    results: tuple[verdict.Result, ...]
    changes: change.Changes | None

    @property
    def violations(self) -> int:
        return sum(len(result.violations) for result in self.results)

    @property
    def unknown(self) -> int:
        return sum(bool(result.problems) for result in self.results)

    @property
    def covered(self) -> list[tuple[tuple[Place, ...], list[int]]]:
        """The code that GPUs get, and the numbers of the wheels that it is the same in."""
        found: list[tuple[tuple[Place, ...], list[int]]] = []
        for number, each in enumerate(self.wheels):
            alike = next((numbers for places, numbers in found if _rows(places) == _rows(each.places)), None)
            if alike is None:
                found.append((each.places, alike := []))
            alike.append(number)
        return found

    def violations_of(self, file: str) -> int:
        return sum(violation.wheel == file for result in self.results for violation in result.violations)

    @property
    def releases(self) -> list[tuple[str, str]]:
        return sorted({(each.contents.facts.project, each.contents.facts.version) for each in self.wheels})


def make(paths: Sequence[Path], *, against: Sequence[Path] = ()) -> Report:
    """Read and audit the wheels. Those to compare with are only read: they may be of a time when other things were declared."""
    results: dict[str, verdict.Result] = {}
    wheels, judged = [], []
    for path in sorted(paths, key=lambda path: slots.position(path.name)):
        wheel = read(path)
        policy = for_wheel(wheel)
        verdict.judge(wheel, policy, results)
        judged.append(_judged(wheel, policy))
        wheels.append(verdict.without_binaries(wheel))  # native modules are large: little is kept of them
    if len({wheel.path.name for wheel in wheels}) < len(wheels):
        raise EnvironmentProblem("the same wheel was given twice", fix="give each wheel once")
    verdict.compare(wheels, results)
    architectures = {
        name
        for each in judged
        for place in each.places
        for name in place.code.architectures.union(*(targets.sass + targets.ptx for targets in place.promise.values()))
    }
    columns = coverage.columns(architectures)
    there = {slots.of(wheel.path.name) for wheel in wheels}
    older = [examine(read(path)) for path in sorted(set(against), key=lambda path: path.name)]
    return Report(
        wheels=tuple(replace(each, places=tuple(_row(place, columns) for place in each.places)) for each in judged),
        absent=tuple(slot for slot in slots.declared() if slot not in there),
        columns=columns,
        architectures=len(architectures),
        results=tuple(results.values()),
        changes=change.compare([each.contents for each in judged], older) if older else None,
    )


def _judged(wheel: Wheel, policy: Policy) -> Judged:
    contents = examine(wheel)
    places = Place(contents.device, policy.device), *(Place(module, {}) for module in contents.modules if module.fatbins)
    return Judged(contents, places, _uses(wheel, policy), _admitted(wheel), policy.size_budget_mib * 2**20)


def _uses(wheel: Wheel, policy: Policy) -> tuple[Use, ...]:
    """Every needed library of every binary in the wheel, grouped by who supplies it."""
    found: dict[tuple[str, Supplier], set[str]] = {}
    for member, binary in wheel.binaries.items():
        for library in binary.needed:
            found.setdefault((library, supplier(wheel, policy, member, library)), set()).add(PurePosixPath(member).name)
    each = [Use(library, tuple(sorted(modules)), supplier) for (library, supplier), modules in found.items()]
    order = get_args(Kind)
    return tuple(sorted(each, key=lambda use: (order.index(use.supplier.kind), use.modules, use.supplier.name, use.library)))


def _row(place: Place, columns: Sequence[coverage.Column]) -> Place:
    return replace(place, cells=coverage.row(place.code, place.promise, columns))


def _rows(places: Sequence[Place]) -> list[object]:
    """The shown ones of them."""
    return [(place.code.name, len(place.code.fatbins), place.cells) for place in places]


def _admitted(wheel: Wheel) -> dict[str, str]:
    try:
        tags = [tag for platform in wheel.platforms if (tag := manylinux(platform))] if wheel.system == "linux" else []
    except EnvironmentProblem:  # auditwheel is for Linux only; the check that needs it says so
        tags = []
    # Of several tags the one that admits least: all have to hold.
    return {family: min((newest(tag.symbol_versions.get(family, ())) for tag in tags), key=_number) for family in FAMILIES if tags}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
