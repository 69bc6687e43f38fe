"""The results file: what is written while a run goes on, and read again for tables and charts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .result_file import read, write

if TYPE_CHECKING:
    from .timing import Timing

MOST_ERROR_CHARACTERS = 400  # compilers say more than one wants to keep
# Primitives that say who computed, whatever explain() was asked.
ENGINES = {"FlashAttention": "flash", "FlashVarlenAttention": "flash", "PagedAttention": "decode"}
# Engines by the names that committed results have for them.
FORMER = {
    "few": "small_m", "skinny": "small_m", "small": "gemv", "dequantised": "dequantize", "upstream": "mlx", "composed": "fallback",
}  # fmt: skip
SAME = ("device", "native", "torch", "quick")  # of runs whose results may stand beside one another
OWN = {"package", "device_code"}  # of these, what says which build it is
SCALES = {"TFLOP/s": 1e12, "TB/s": 1e12, "steps/s": 1.0}


@dataclass(frozen=True)
class SideResult:
    """Seconds per call of one side, one number per batch, or why there are none."""

    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Between them lies the middle half of the batches: the noise."""
        if not self.seconds:
            return None
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @classmethod
    def of(cls, outcome: Timing | Exception) -> SideResult:
        if isinstance(outcome, Exception):
            return cls(error=f"{type(outcome).__name__}: {str(outcome).strip()[:MOST_ERROR_CHARACTERS]}")
        details: dict[str, Any] = {"calls_per_batch": outcome.calls_per_batch, "peak_bytes": outcome.peak_bytes}
        if outcome.build:
            details["median_build"] = statistics.median(outcome.build)
        if outcome.device:
            details["median_device"] = statistics.median(outcome.device)
        if outcome.clock:
            details["clocks"] = outcome.clock
        return cls(seconds=outcome.wall, details=details)

    def to_json(self) -> dict[str, Any]:
        return {"error": self.error} if self.error else {**self.details, "seconds": self.seconds}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SideResult:
        return cls(data.get("seconds", []), data.get("error"), {name: data[name] for name in data if name not in ("seconds", "error")})


@dataclass(frozen=True)
class CaseResult:
    """One case: its sides, or the error that kept it from being measured.

    ``engine`` and ``reason`` are what :func:`mlx_cuda.explain` says of ours; ``unavailable`` is what the installed package lacks for it,
    so that only the other sides have times; ``numbers`` are counts beside the times; ``commit`` is the build's, where it is not the one of
    the other cases.
    """

    group: str
    name: str
    unit: str
    work: float
    parameters: dict[str, Any]
    primitives: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    sides: dict[str, SideResult] = field(default_factory=dict)
    error: str | None = None
    engine: str = ""
    reason: str = ""
    unavailable: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)  # seconds of the whole case, part by part
    commit: str = ""

    @property
    def computed_by(self) -> str:
        """The engine, by its name in :func:`mlx_cuda.explain`."""
        return next((ENGINES[name] for name in self.primitives if name in ENGINES), FORMER.get(self.engine, self.engine))

    def median(self, side: str = "ours") -> float | None:
        """Seconds per call."""
        return self.sides[side].median if side in self.sides else None

    def rate(self, side: str) -> float | None:
        """Work per second in the unit of the case."""
        median = self.median(side)
        return self.work / median / SCALES[self.unit] if median else None

    def speedup(self, over: str) -> float | None:
        """How many times faster ours is than the other side."""
        ours, other = self.rate("ours"), self.rate(over)
        return ours / other if ours and other else None

    def best_speedup(self, over: str) -> float | None:
        """The speedup between the favourable quartiles of both sides: what the noise leaves open."""
        ours, other = (self.sides[name].quartiles if name in self.sides else None for name in ("ours", over))
        return other[1] / ours[0] if ours and other else None

    def behind(self, other: str = "upstream") -> bool:
        """Whether ours is slower than the other side by more than the noise."""
        best = self.best_speedup(other)
        return best is not None and best < 1

    def to_json(self) -> dict[str, Any]:
        """But for what is empty."""
        known = {name: value for name, value in vars(self).items() if value or name == "parameters"}
        return known | {"sides": {name: side.to_json() for name, side in self.sides.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CaseResult:
        return cls(**{**data, "sides": {name: SideResult.from_json(side) for name, side in data["sides"].items()}})


def builds_of(cases: Sequence[CaseResult], builds: dict[str, Any]) -> dict[str, Any]:
    """The earlier builds, by their commits, that some of the cases are of."""
    commits = {case.commit for case in cases}
    return {commit: build for commit, build in builds.items() if commit in commits}


def _of_any_build(native: Any) -> Any:
    """What a native module says of itself, but for what is different in every build; anything else as it is."""
    if not isinstance(native, dict) or "build" not in native:
        return native
    return {**native, "build": {name: value for name, value in native["build"].items() if name not in OWN}}


def require_same_machine(earlier: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise where results, by their provenance, cannot stand beside those of an earlier build, or nobody could tell them from these."""
    for name in SAME:
        one, other = (_of_any_build(each[name]) for each in (earlier, own))
        if one != other:
            raise ValueError(f"the earlier results are of another {name}: {one}, not {other}")
    if not earlier["commit"]:
        raise ValueError("the earlier results name no commit, so nobody could tell their cases from the others")


@dataclass
class Results:
    provenance: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        write(path, {"kind": "kernels", "provenance": self.provenance, "cases": [case.to_json() for case in self.cases]})

    def join(self, earlier: Results) -> None:
        """Take over the cases that were not measured again, each with the commit of its build."""
        before = earlier.provenance
        require_same_machine(before, self.provenance)
        have = {(case.group, case.name) for case in self.cases}
        old = [replace(case, commit=case.commit or before["commit"]) for case in earlier.cases if (case.group, case.name) not in have]
        self.cases += old
        build = {name: before[name] for name in ("date", "wheel", "gpu_before")}
        self.provenance["earlier_builds"] = {
            **builds_of(old, {**before.get("earlier_builds", {}), before["commit"]: build}),
            **self.provenance.get("earlier_builds", {}),
        }

    @classmethod
    def load(cls, path: Path) -> Results:
        data = read(path, "kernels")
        return cls(data["provenance"], [CaseResult.from_json(case) for case in data["cases"]])
