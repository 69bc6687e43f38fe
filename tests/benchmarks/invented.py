"""Results of a run that never was: every case there is, with the times that a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cases import GROUPS, Case
from benchmarks.record import CaseResult, Results, SideResult

SIDES = (
    "ours",
    "upstream",
    "ours, without",
    "ours, contiguous",
    "torch cuDNN",
    "torch flash",
    "torch flex",
    "torch",
    "bf16",
    "torch grouped bf16",
    "dequantised",
)
PROVENANCE: dict[str, Any] = {
    "date": "2026-01-01", "device": "NVIDIA H200", "python": "3.12", "quick": False, "native": None, "torch": None, "gpu_before": None,
    "distributions": {}, "wheel": None, "commit": None, "command": [],
}  # fmt: skip


def results_of(seconds: Callable[[Case, str], float | None], numbers: dict[str, float] | None = None) -> Results:
    """``seconds`` gives a side's time; None: it has none."""
    cases = []
    for group, make in GROUPS.items():
        for case in make(quick=False):
            times = {side: seconds(case, side) for side in SIDES}
            sides = {side: SideResult([time] if time else [], None if time else "failed") for side, time in times.items()}
            engine = "" if group in ("linear", "swiglu") else "decode"
            header = (group, case.name, case.unit, case.work, case.parameters())
            cases.append(CaseResult(*header, sides=sides, engine=engine, numbers=dict(numbers or {})))
    return Results(dict(PROVENANCE), cases)
