"""What is said of a target, for invented results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import GROUPS
from benchmarks.record import SideResult
from benchmarks.targets import ATTENTION, MATMUL, Target, judge, targets_table
from benchmarks.targets.judge import Number, Share, Speedup, TimeOver, cases

from .invented import results_of

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.record import Results


TARGETS = (*ATTENTION, *MATMUL)


def ids(target: Target) -> str:
    return target.text


def with_ours(results: Results, group: str, seconds: list[float], index: int = 0) -> Results:
    """The same with another time of ours in one case."""
    place = [i for i, case in enumerate(results.cases) if case.group == group][index]
    case = results.cases[place]
    results.cases[place] = replace(case, sides={**case.sides, "ours": SideResult(seconds)})
    return results


@pytest.mark.parametrize("target", TARGETS, ids=ids)
def test_every_target_has_cases_and_one_to_compare_with(target: Target) -> None:
    declared = [(group, case.parameters()) for group, make in GROUPS.items() for case in make(quick=False)]
    assert any(target.select.takes(*case) for case in declared)
    for other in target.measure.others:
        assert sum(other.takes(*case) for case in declared) == 1
    assert (target.at_least is None) != (target.at_most is None)


@pytest.mark.parametrize("target", [target for target in TARGETS if isinstance(target.measure, Speedup)], ids=ids)
def test_speedups(target: Target) -> None:
    limit = target.at_least or 0.0
    for ours, state in (0.999, "met"), (1.001, "missed"):
        results = results_of(lambda _, side, ours=ours: 1e-3 * ours if side == "ours" else 1e-3 * limit)  # type: ignore[misc]
        assert judge(target, results).state == state


def test_the_worst_point_decides_and_the_spread_is_allowed_for() -> None:
    target = Target("row", "text", cases("softcap"), Speedup("upstream"), at_least=1.0)
    even = results_of(lambda *_: 1.0)
    assert judge(target, even).state == "met"
    outcome = judge(target, with_ours(even, "softcap", [1.1, 1.1], index=1))
    assert outcome.state == "missed"
    assert outcome.points[0][1].text == "0.91x"
    assert outcome.points[0][0] is [case for case in even.cases if case.group == "softcap"][1]
    assert judge(target, with_ours(even, "softcap", [0.9, 1.1, 1.1, 1.1, 1.3], index=1)).state == "missed"
    assert judge(target, with_ours(even, "softcap", [0.9, 0.95, 1.1, 1.1, 1.3], index=1)).state == "within the noise"


def test_a_side_without_a_time_leaves_the_target_open() -> None:
    target = Target("row", "text", cases("softcap"), Speedup("torch flex"), at_least=1.0)
    broken = results_of(lambda case, side: None if side == "torch flex" and "D=256" in case.name else 1.0)
    outcome = judge(target, broken)
    assert (outcome.state, outcome.missing, len(outcome.points)) == ("not measured", 1, 1)
    assert judge(target, with_ours(broken, "softcap", [2.0])).state == "missed"


def test_ours_against_another_case_and_for_the_same_work() -> None:
    base = cases("window", head_dim=128, length=8192)
    target = Target("row", "text", cases("window", head_dim=128, length=32768), TimeOver(base=base), at_most=1.5)
    even = results_of(lambda *_: 1.0)
    assert judge(target, even).state == "met"
    assert judge(target, with_ours(even, "window", [0.5])).state == "missed"
    per_work = replace(target, measure=TimeOver(base=base, per_work=True))
    linear = results_of(lambda case, _: case.work / 1e15)
    assert judge(per_work, linear).points[0][1].number == pytest.approx(1.0)
    assert judge(per_work, with_ours(linear, "window", [0.5 * linear.cases[0].work / 1e15])).state == "missed"


def test_shares_of_the_memory_and_counts() -> None:
    results = results_of(lambda case, _: case.work / 4e12, numbers={"ours: plans": 3})
    share = judge(Target("row", "text", cases("decode", batch=64), Share(), at_least=0.9), results)
    assert share.state == "met"
    assert share.points[0][1].text == "93 %"
    assert judge(Target("row", "text", cases("growing"), Number("ours: plans"), at_most=3), results).state == "met"
    assert judge(Target("row", "text", cases("growing"), Number("ours: plans"), at_most=2), results).state == "missed"
    assert judge(Target("row", "text", cases("growing"), Number("ours: steps"), at_least=2), results).state == "not measured"


def test_the_table_names_the_worst_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of(lambda _, side: 1e-3 if side == "ours" else 1e-2)
    slow = with_ours(results, "attention", [0.02], index=1)
    row = next(line for line in targets_table(ATTENTION, slow).splitlines() if ">= 1.0 x MLX at every point" in line)
    assert row.endswith("| 0.50x to 10.00x | D=64 full, L=4096 | **missed (1 of 20)** |")
    path = tmp_path / "results.jsonl"
    slow.save(path)
    assert main(["targets", str(path)]) == 0
    printed = capsys.readouterr().out
    assert row in printed
    assert "SLOWER than MLX, beyond the noise: attention D=64 full, L=4096: 0.500x" in printed
