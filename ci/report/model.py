"""The whole report as data: what the templates show, and nothing that they would have to work out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..audit.checks.binaries import newest
from ..audit.policy import OWN, for_wheel
from ..audit.systems import manylinux
from ..audit.wheel import read
from ..errors import EnvironmentProblem
from ..matrix import load
from . import change, coverage, libraries, verdict
from .bill import Bill, bills
from .contents import FAMILIES, SYSTEMS, Code, Contents, examine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ..audit.policy import Policy
    from ..audit.wheel import Wheel
    from ..matrix import Targets


@dataclass(frozen=True)
class Covered:
    """Code for GPUs that lies in one place, as a row of the matrix of architectures."""

    title: str
    fatbins: int
    cells: tuple[coverage.Cell, ...]


@dataclass(frozen=True)
class Judged:
    """One wheel."""

    contents: Contents
    covered: tuple[Covered, ...]
    uses: tuple[libraries.Use, ...]
    graph: libraries.Graph
    admitted: dict[str, str]  # by symbol family: the newest version that the platform tag admits
    bills: tuple[Bill, ...]
    budget: int  # bytes

    @property
    def filled(self) -> float:
        """Percent of the size budget."""
        return 100 * self.contents.size / self.budget

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(family for family in FAMILIES if any(family in module.versions for module in self.contents.modules))


@dataclass(frozen=True)
class Report:
    policy: str
    wheels: tuple[Judged, ...]
    absent: tuple[tuple[str, str], ...]  # platform and Python tags that a release has and this set has not
    columns: tuple[coverage.Column, ...]
    architectures: int  # that there is or should be code for
    results: tuple[verdict.Result, ...]
    changes: change.Changes | None

    @property
    def violations(self) -> int:
        return sum(len(result.violations) for result in self.results)

    @property
    def covered(self) -> list[tuple[tuple[Covered, ...], list[int]]]:
        """What GPUs get, and the numbers of the wheels that it is the same in."""
        found: dict[tuple[Covered, ...], list[int]] = {}
        for number, each in enumerate(self.wheels):
            found.setdefault(each.covered, []).append(number)
        return list(found.items())

    def violations_of(self, file: str) -> int:
        return sum(violation.wheel == file for result in self.results for violation in result.violations)

    @property
    def unknown(self) -> int:
        return sum(bool(result.problems) for result in self.results)

    @property
    def releases(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({(each.contents.project, each.contents.version) for each in self.wheels}))

    @property
    def size(self) -> int:
        return sum(each.contents.size for each in self.wheels)

    @property
    def unpacked(self) -> int:
        return sum(each.contents.unpacked for each in self.wheels)


@dataclass(frozen=True)
class _Read:
    """What is kept of a wheel while the others are read: little, because native modules are large."""

    wheel: Wheel  # its .dist-info alone
    policy: Policy
    contents: Contents
    outcomes: list[verdict.Outcome]
    uses: tuple[libraries.Use, ...]


def make(paths: Sequence[Path], *, against: Sequence[Path] = (), policy: str = OWN) -> Report:
    """Read and audit the wheels. Those to compare with are only read: they may be of a time when other things were declared."""
    found = [_read(path, policy) for path in paths]
    if len({each.contents.file for each in found}) < len(found):
        raise EnvironmentProblem("the same wheel was given twice", cure="give each wheel once")
    declared = _declared() if policy == OWN else []
    found.sort(key=lambda each: (_position(each.contents, declared), each.contents.file))
    architectures = {
        architecture
        for each in found
        for code, promise in _promises(each.contents, each.policy)
        for architecture in code.architectures.union(*(targets.sass + targets.ptx for targets in promise.values()))
    }
    columns = coverage.columns(architectures)
    there = {(each.contents.platform, each.contents.python) for each in found}
    return Report(
        policy=policy,
        wheels=tuple(_judged(each, columns) for each in found),
        absent=tuple(each for each in declared if each not in there),
        columns=columns,
        architectures=len(architectures),
        results=verdict.results([outcome for each in found for outcome in each.outcomes], [each.wheel for each in found]),
        changes=change.compare([each.contents for each in found], _examined(against)) if against else None,
    )


def _read(path: Path, policy: str) -> _Read:
    wheel = read(path)
    own = for_wheel(wheel, policy)
    return _Read(verdict.without_binaries(wheel), own, examine(wheel), verdict.judge(wheel, own), libraries.uses(wheel, own))


def _judged(each: _Read, columns: tuple[coverage.Column, ...]) -> Judged:
    return Judged(
        contents=each.contents,
        covered=tuple(
            Covered(code.name, len(code.fatbins), coverage.row(code, promise, columns))
            for code, promise in _promises(each.contents, each.policy)
        ),
        uses=each.uses,
        graph=libraries.layout(each.uses),
        admitted=_admitted(each.wheel),
        bills=bills(each.contents),
        budget=each.policy.size_budget_mib * 2**20,
    )


def _examined(paths: Sequence[Path]) -> list[Contents]:
    return [examine(read(path)) for path in sorted(set(paths), key=lambda path: path.name)]


def _promises(contents: Contents, policy: Policy) -> Iterator[tuple[Code, Mapping[str, Targets]]]:
    """The places that hold GPU code, or should, with what each of their fatbins should hold."""
    if policy.device or contents.device.size:
        yield contents.device, policy.device or {}
    for module in contents.modules:
        declared = policy.module(module.facts.member)
        embedded = declared.embedded if declared else None
        if embedded or module.fatbins:
            # A module that should hold code and holds none lacks all that is declared.
            yield module, dict.fromkeys(module.fatbins or ["1"], embedded) if embedded else {}


def _admitted(wheel: Wheel) -> dict[str, str]:
    try:
        tags = [tag for platform in wheel.platforms if (tag := manylinux(platform))] if wheel.system == "linux" else []
    except EnvironmentProblem:  # auditwheel is for Linux only; the check that needs it says so
        tags = []
    # Of several tags the one that admits least: all have to hold.
    return {family: min((newest(tag.symbol_versions.get(family, ())) for tag in tags), key=_number) for family in FAMILIES if tags}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _declared() -> list[tuple[str, str]]:
    """Platform and Python tags of every wheel of a release, as `Contents` spells them."""
    matrix = load()
    platforms = [f"{SYSTEMS[each.name.split('-')[0]]} {each.machine}" for each in matrix.platforms.values()]
    return [(platform, build.abi) for platform in platforms for build in matrix.builds]


def _position(contents: Contents, declared: Sequence[tuple[str, str]]) -> int:
    key = (contents.platform, contents.python)
    return declared.index(key) if key in declared else len(declared)
