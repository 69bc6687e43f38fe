"""What a target is, and what a run says to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..cells import duration, markdown, memory_share, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..record import CaseResult, Results

State = Literal["met", "within the noise", "missed", "not measured"]


@dataclass(frozen=True)
class Select:
    """Cases of a group whose parameters are as said; a collection stands for any of its values."""

    group: str
    where: tuple[tuple[str, Any], ...] = ()

    def takes(self, group: str, parameters: dict[str, Any]) -> bool:
        return group == self.group and all(_fits(parameters.get(name), wanted) for name, wanted in self.where)

    def of(self, results: Results) -> list[CaseResult]:
        return [case for case in results.cases if self.takes(case.group, case.parameters)]


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, Collection) and not isinstance(wanted, str) else value == wanted


def cases(group: str, **where: Any) -> Select:
    return Select(group, tuple(where.items()))


@dataclass(frozen=True)
class Value:
    """One number of a case; ``best`` is what the noise leaves open."""

    number: float
    best: float
    text: str


class Measure(Protocol):
    """How a target is read off a case."""

    def __call__(self, case: CaseResult, results: Results) -> Value | None: ...
    @property
    def others(self) -> Sequence[Select]:
        """Cases that it needs besides the one asked about."""


@dataclass(frozen=True)
class Speedup:
    """How many times faster ours is than another side of the case."""

    over: str
    others: Sequence[Select] = ()

    def __call__(self, case: CaseResult, results: Results) -> Value | None:  # noqa: ARG002
        value, best = case.speedup(self.over), case.best_speedup(self.over)
        return None if value is None or best is None else Value(value, max(value, best), f"{value:.2f}x")


@dataclass(frozen=True)
class TimeOver:
    """Ours as a multiple of the time of another side, or of ours in another case; ``per_work``: of the time for the same work."""

    side: str = "ours"
    base: Select | None = None
    per_work: bool = False

    @property
    def others(self) -> Sequence[Select]:
        return [self.base] if self.base else []

    def __call__(self, case: CaseResult, results: Results) -> Value | None:
        found = self.base.of(results) if self.base else [case]
        if not found or case.error or found[0].error:
            return None
        ours, base = case.median(), found[0].median(self.side)
        if ours is None or base is None:
            return None
        mine, theirs = case.sides["ours"].quartiles or (ours, ours), found[0].sides[self.side].quartiles or (base, base)
        scale = found[0].work / case.work if self.per_work else 1.0
        value, best = scale * ours / base, scale * mine[0] / theirs[1]
        return Value(value, min(value, best), f"{value:.2f}x ({duration(ours)} to {duration(base)})")


@dataclass(frozen=True)
class Share:
    """The part of the memory's bandwidth."""

    others: Sequence[Select] = ()

    def __call__(self, case: CaseResult, results: Results) -> Value | None:
        value = memory_share(case, results.provenance["device"])
        if value is None or (quartiles := case.sides["ours"].quartiles) is None:
            return None
        return Value(value, value * (case.median() or 0) / quartiles[0], f"{100 * value:.0f} %")


@dataclass(frozen=True)
class Number:
    """A count beside the times."""

    name: str
    others: Sequence[Select] = ()

    def __call__(self, case: CaseResult, results: Results) -> Value | None:  # noqa: ARG002
        value = case.numbers.get(self.name)
        return None if value is None else Value(value, value, f"{value:g}")


@dataclass(frozen=True)
class Target:
    """Every case that is selected has to reach the limit."""

    row: str
    text: str
    select: Select
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None
    why: str = ""  # what stands in its way, as far as it is known

    def reached(self, number: float) -> bool:
        return (self.at_least is None or number >= self.at_least) and (self.at_most is None or number <= self.at_most)


@dataclass(frozen=True)
class Outcome:
    target: Target
    state: State
    points: tuple[tuple[CaseResult, Value], ...]  # the worst first
    missing: int


def judge(target: Target, results: Results) -> Outcome:
    """The worst point decides; what has no time on either side cannot be met."""
    points, missing = [], 0
    for case in target.select.of(results):
        value = None if case.error else target.measure(case, results)
        if value is None:
            missing += 1
        else:
            points.append((case, value))
    points.sort(key=lambda point: point[1].number, reverse=target.at_least is None)
    short = [value for _, value in points if not target.reached(value.number)]
    state: State = "met"
    if any(not target.reached(value.best) for value in short):
        state = "missed"
    elif missing or not points:
        state = "not measured"
    elif short:
        state = "within the noise"
    return Outcome(target, state, tuple(points), missing)


def targets_table(targets: Sequence[Target], results: Results) -> str:
    """The measured numbers beside the targets; the worst point is named, and how many others miss too."""
    rows = [["cases (bf16)", "target", "measured, worst to best", "worst point", "state"]]
    for target in targets:
        outcome = judge(target, results)
        texts = [value.text for _, value in outcome.points]
        missing = f"{outcome.missing} without a number" if outcome.missing else ""
        measured = texts[0] if len(set(texts)) == 1 else f"{texts[0]} to {texts[-1]}" if texts else ""
        short = sum(not target.reached(value.best) for _, value in outcome.points)
        state = f"missed ({short} of {len(texts)})" if outcome.state == "missed" and len(texts) > 1 else outcome.state
        worst = shown(outcome.points[0][0].name) if outcome.points else ""
        rows.append(
            [target.row, target.text, ", ".join(filter(None, [measured, missing])), worst, f"**{state}**" if state != "met" else state]
        )
    return markdown(rows)


def behind_table(targets: Sequence[Target], results: Results) -> str:
    """The targets that are missed: the worst point, how far it is off, and why."""
    rows = [["case", "measured", "target", "known cause"]]
    for target in targets:
        outcome = judge(target, results)
        if outcome.state == "missed":
            case, value = outcome.points[0]
            rows.append([f"{case.group}: {shown(case.name)}", value.text, target.text, target.why])
    return markdown(rows)
