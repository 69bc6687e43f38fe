"""What issue 4 aims at, as data, and what a run says to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .table import duration, markdown, memory_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .record import CaseResult, Results

State = Literal["met", "within the spread", "missed", "not measured"]


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
    """One number of a case; ``best`` is what the spread leaves open."""

    number: float
    best: float
    text: str


class Measure(Protocol):
    """How an aim is read off a case."""

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
class Aim:
    """Every case that is selected has to reach the limit."""

    row: str
    text: str
    select: Select
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None

    def reached(self, number: float) -> bool:
        return (self.at_least is None or number >= self.at_least) and (self.at_most is None or number <= self.at_most)


@dataclass(frozen=True)
class Outcome:
    aim: Aim
    state: State
    points: tuple[tuple[CaseResult, Value], ...]  # the worst first
    missing: int


PREFILL = "prefill D=64/128 none and causal, 2k-32k"
WIDE = "prefill D=80, 96, 192, 256 causal 4k-32k"
MASKS = "bool mask 8k D=128"
WINDOW = "window 1024 at 8k and 32k"
EXTRAS = "softcap; sinks and lse"
DECODE = "decode B=8 and 64, H 32/8, S 1k-32k"
RAGGED = "batched decode with per-row lengths"
SHORT = "decode D=256, and query length 2-16"
BACKWARD = "fwd+bwd 4k-16k, D=128 and 256"
PAGED = "paged, 16- and 64-token pages"
SMALL = "small cases"
GROWING = "growing KV cache of 1,000 steps"

NARROW = cases("attention", head_dim=(64, 128), kv_heads=16, window=None)
CAUSAL_8K = cases("attention", head_dim=128, mask="causal", length=8192, kv_heads=16, window=None)
LONG = {"mask": "causal", "length": (4096, 8192, 32768), "window": None}
WINDOWS = cases("window", head_dim=128, length=(8192, 32768))
PLAIN = {"head_dim": 128, "queries": 1, "ragged": None}
ROWS = cases("decode", ragged=("padded", "lengths"), length=8192)
ALL_LENGTHS = cases("decode", batch=64, length=8192, **PLAIN)

AIMS = (
    Aim(PREFILL, ">= 1.0 x upstream at every point", NARROW, Speedup("upstream"), at_least=1.0),
    Aim(PREFILL, ">= 0.97 x torch cuDNN", NARROW, Speedup("torch cuDNN"), at_least=0.97),
    Aim(WIDE, ">= 0.95 x torch cuDNN", cases("attention", head_dim=(80, 96, 192, 256), **LONG), Speedup("torch cuDNN"), at_least=0.95),
    Aim(WIDE, "D=192 and 256 >= 10 x upstream", cases("attention", head_dim=(192, 256), **LONG), Speedup("upstream"), at_least=10.0),
    Aim(
        MASKS, "causal and documents: <= 2 x the causal time", cases("masks", head_dim=128, mask=("bool causal", "documents")),
        TimeOver(base=CAUSAL_8K), at_most=2.0,
    ),
    Aim(MASKS, "random: not slower than torch cuDNN", cases("masks", head_dim=128, mask="random"), Speedup("torch cuDNN"), at_least=1.0),
    Aim(MASKS, "random: >= 4.5 x upstream", cases("masks", head_dim=128, mask="random"), Speedup("upstream"), at_least=4.5),
    Aim(
        WINDOW, "time grows linearly in T: at 32k <= 1.1 x the time per key of 8k", cases("window", head_dim=128, length=32768),
        TimeOver(base=cases("window", head_dim=128, length=8192), per_work=True), at_most=1.1,
    ),
    Aim(WINDOW, "<= 0.35 x causal at 8k", cases("window", head_dim=128, length=8192), TimeOver(base=CAUSAL_8K), at_most=0.35),
    Aim(WINDOW, ">= 40 x upstream", WINDOWS, Speedup("upstream"), at_least=40.0),
    Aim(EXTRAS, "softcap >= 2 x FlexAttention", cases("softcap", flex=True), Speedup("torch flex"), at_least=2.0),
    Aim(EXTRAS, "sinks and return_lse <= 1.15 x the same case without", cases("sinks"), TimeOver("ours, without"), at_most=1.15),
    Aim(DECODE, ">= 85 % of the KV-bytes limit at B=64", cases("decode", batch=64, **PLAIN), Share(), at_least=0.85),
    Aim(DECODE, ">= 70 % at B=8 S=8192", cases("decode", batch=8, length=8192, heads=32, **PLAIN), Share(), at_least=0.70),
    Aim(DECODE, "never behind torch cuDNN", cases("decode", batch=(8, 64), **PLAIN), Speedup("torch cuDNN"), at_least=1.0),
    Aim(DECODE, "never behind torch flash", cases("decode", batch=(8, 64), **PLAIN), Speedup("torch flash"), at_least=1.0),
    Aim(RAGGED, ">= 7 x upstream", ROWS, Speedup("upstream"), at_least=7.0),
    Aim(RAGGED, "not behind torch cuDNN", ROWS, Speedup("torch cuDNN"), at_least=1.0),
    Aim(
        RAGGED, "time follows the sum of the lengths: <= 1.2 x the time per key of a full batch of 64",
        cases("decode", ragged=("padded", "lengths"), batch=64), TimeOver(base=ALL_LENGTHS, per_work=True), at_most=1.2,
    ),
    Aim(SHORT, "D=256 >= 5 x upstream", cases("decode", head_dim=256, heads=32), Speedup("upstream"), at_least=5.0),
    Aim(SHORT, "2-16 queries >= 2.5 x upstream", cases("decode", queries=(2, 4, 8, 16)), Speedup("upstream"), at_least=2.5),
    Aim(BACKWARD, ">= 1.0 x torch cuDNN", cases("backward"), Speedup("torch cuDNN"), at_least=1.0),
    Aim(BACKWARD, "T=4100 >= 10 x upstream", cases("backward", length=4100), Speedup("upstream"), at_least=10.0),
    Aim(PAGED, "<= 1.1 x contiguous decode", cases("paged"), TimeOver("ours, contiguous"), at_most=1.1),
    Aim(SMALL, "launch cost per call not above upstream's", cases("small"), Speedup("upstream"), at_least=1.0),
    Aim(GROWING, "builds a handful of plans (<= 16)", cases("growing", steps=1000), Number("ours: plans"), at_most=16),
    Aim(GROWING, "all steps were made in the time given", cases("growing", steps=1000), Number("ours: steps"), at_least=1000),
)  # fmt: skip


def judge(aim: Aim, results: Results) -> Outcome:
    """The worst point decides; what has no time on either side cannot be met."""
    points, missing = [], 0
    for case in aim.select.of(results):
        value = None if case.error else aim.measure(case, results)
        if value is None:
            missing += 1
        else:
            points.append((case, value))
    points.sort(key=lambda point: point[1].number, reverse=aim.at_least is None)
    short = [value for _, value in points if not aim.reached(value.number)]
    state: State = "met"
    if any(not aim.reached(value.best) for value in short):
        state = "missed"
    elif missing or not points:
        state = "not measured"
    elif short:
        state = "within the spread"
    return Outcome(aim, state, tuple(points), missing)


def aims_table(results: Results) -> str:
    """Issue 4's table with the measured numbers beside the aims; the worst point is named, and how many others miss too."""
    rows = [["case (bf16)", "aim", "measured, worst to best", "worst point", ""]]
    for aim in AIMS:
        outcome = judge(aim, results)
        texts = [value.text for _, value in outcome.points]
        missing = f"{outcome.missing} without a number" if outcome.missing else ""
        measured = texts[0] if len(set(texts)) == 1 else f"{texts[0]} to {texts[-1]}" if texts else ""
        short = sum(not aim.reached(value.best) for _, value in outcome.points)
        state = f"missed ({short} of {len(texts)})" if outcome.state == "missed" and len(texts) > 1 else outcome.state
        worst = outcome.points[0][0].name if outcome.points else ""
        rows.append([aim.row, aim.text, ", ".join(filter(None, [measured, missing])), worst, f"**{state}**" if state != "met" else state])
    return markdown(rows)
