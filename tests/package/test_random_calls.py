"""Random calls of all forms of attention, composed here: the cases of the GPU tests, smaller, and their program."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu import cases, matmul_cases, matmul_trials, soak, trials
from tests.gpu.cases import Case

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SMALL = 40_000


@given(seed=st.integers(0, 2**31))
@settings(max_examples=150)
def test_any_call(seed: int) -> None:
    trials.check(seed, most=SMALL)


def case_with(wanted: str, **fields: object) -> Case:
    """The first case with these values, and of an option that is wanted any."""
    drawn = (cases.draw(seed, most=SMALL) for seed in range(5000))
    return next(case for case in drawn if getattr(case, wanted) and all(getattr(case, name) == value for name, value in fields.items()))


def test_the_cases_reach_everything() -> None:
    drawn = [cases.draw(seed) for seed in range(3000)]
    assert {case.kind for case in drawn} == {"dense", "varlen", "paged"}
    assert {case.mask for case in drawn} == {"none", "causal", "bool", "additive"}
    assert {case.pattern for case in drawn} == {*cases.PATTERNS, ""}
    assert {layout for case in drawn for layout in case.layouts} == set(cases.LAYOUTS)
    assert {len(case.mask_shape) for case in drawn} == {0, 1, 2, 3, 4}
    assert {case.dtype for case in drawn} == {"float16", "bfloat16", "float32"}
    assert any(0 in case.ends for case in drawn if case.ends)
    assert max(case.k_len for case in drawn) == max(cases.LONG)
    for option in ("lse", "gradient", "sinks", "softcap", "starts", "spoilt", "written"):
        assert 20 < sum(bool(getattr(case, option)) for case in drawn) < 2000, option


@pytest.mark.parametrize("wanted", ["lse", "gradient", "sinks"])
def test_the_judge_sees_errors(wanted: str) -> None:
    case = case_with(wanted, kind="dense", dtype="float32", softcap=0.0, batch=1, size=1.0)
    outcome = trials.compute(case)
    judge = partial(cases.judge, case, outcome.engine, gpu=mx.cuda.is_available())
    assert not judge(outcome.results)
    for name, values in outcome.results.items():
        for wrong in (values + 0.2, np.where(values == values.flat[-1], np.nan, values), values[..., :-1]):
            assert judge(outcome.results | {name: wrong})
    assert judge({"out": outcome.results["out"]}) or wanted == "sinks"


def exact(case: Case) -> dict[str, Any]:
    return {name: values for name, (values, _) in cases.expected(case, cases.inputs(case)).values.items()}


def to_tf32(values: Any) -> Any:
    """The nearest of 11 significant bits."""
    return ((np.array(values, np.float32).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def test_the_judge_knows_what_a_softcap_lets_through() -> None:
    """TF32's rounding of scores of 300 moves those within a softcap of 1; those at the cap stay where they are."""
    case = cases.draw(4403)  # one key
    assert (case.dtype, case.softcap, case.size, case.k_len, case.lse) == ("float32", 1.0, 300.0, 1, True)
    arrays = cases.inputs(case)
    right = cases.expected(case, arrays)
    rounded = cases.expected(case, arrays | {name: to_tf32(arrays[name]) for name in "qk"})
    results = {name: values for name, (values, _) in rounded.values.items()}
    moved = np.abs(results["lse"] - right.values["lse"][0])
    assert 0.01 < moved.max() < 0.02
    assert not cases.judge(case, "flash", results, gpu=True)
    assert cases.judge(case, "decode", results, gpu=False)
    bounds = cases.bounds(case, "flash", right, gpu=True)
    capped = np.argmin(right.values["lse"][1])
    assert bounds.lse < 0.003
    results["lse"].flat[capped] += 2 * bounds.lse
    assert cases.judge(case, "flash", results, gpu=True)


def test_the_judge_knows_the_fit_of_the_tangent() -> None:
    """Of the Hopper kernel: so far off, and no farther, and no other kernel."""
    case = cases.draw(368)
    assert (case.dtype, case.softcap, case.lse) == ("bfloat16", 50.0, True)
    results = exact(case)
    off = results | {"lse": results["lse"] * (1 + 5e-6)}
    assert not cases.judge(case, "flash varlen", off, gpu=True)
    assert cases.judge(case, "decode", off, gpu=True)
    assert cases.judge(case, "flash varlen", results | {"lse": results["lse"] * (1 + 2e-5)}, gpu=True)


def test_the_judge_knows_the_smallest_numbers() -> None:
    """What no number of the dtype is near to may be 0, and no more than rounding it may take."""
    case = cases.draw(6575)
    right = exact(case)["out"]
    assert 0 < np.abs(right).max() < 2**-25
    assert case.dtype == "float16"
    for wrong, values in ((False, 0 * right), (False, right), (True, right + 2**-24)):
        assert bool(cases.judge(case, "decode", {"out": values}, gpu=True)) == wrong


def test_rounding_is_that_of_the_dtypes() -> None:
    values = np.array([1.00390625, 1.01171875, -2.5, 3.14159, 65519.0, 1e-3], np.float32)
    for name, dtype in trials.DTYPES.items():
        if name == "float16":
            continue
        np.testing.assert_array_equal(cases.rounded(values, name), np.array(trials.on_device(values, dtype).astype(mx.float32)))


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--cases", "6", "--seed", "3", "--processes", "1", "--workers", "1", "--largest", "20000"]) == 0
    printed = capsys.readouterr().out
    assert "seeds 3 to 8: 6 cases" in printed
    assert "0 failed" in printed


def test_the_program_knows_matmul_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--of", "matmul", "--cases", "40", "--processes", "1", "--workers", "1", "--largest", "100000"]) == 0
    assert "seeds 0 to 39: 40 cases" in capsys.readouterr().out


def test_the_program_leaves_out_what_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--cases", "40", "--processes", "1", "--workers", "1", "--largest", "100000"]
    assert soak.main(["--of", "matmul", "--without", "mlx", *few]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"seeds 0 to 39: \d cases .*\n  fallback +\d cases", printed)
    assert re.search(r"\d+ more were of other engines", printed)
    with pytest.raises(SystemExit):
        soak.main(["--without", "mlx", *few])


def test_wrong_matmuls_are_found() -> None:
    for seed in range(30):
        case = matmul_cases.draw(seed, most=100000)
        outcome = matmul_trials.compute(case)
        assert not matmul_cases.judge(case, outcome.engine, outcome.results, gpu=False)
        for name in outcome.results.keys() & {"out", "x", "w"}:
            spoilt = outcome.results | {name: -outcome.results[name]}
            assert matmul_cases.judge(case, outcome.engine, spoilt, gpu=False), name


def test_processes_divide_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--cases", "5", "--seed", "11", "--processes", "2", "--workers", "1", "--largest", "20000"]) == 0
    assert "seeds 11 to 15: 5 cases" in capsys.readouterr().out


def test_the_program_names_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(case: Case) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(trials, "compute", crash)
    assert soak.main(["--cases", "2", "--seed", "7", "--processes", "1", "--workers", "1"]) == 1
    printed = capsys.readouterr().out
    assert "seed 7: RuntimeError: no such kernel" in printed
    assert "failing seeds: 7 8" in printed
