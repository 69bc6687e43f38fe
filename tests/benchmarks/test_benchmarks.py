from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import mlx_cuda
import pytest

from benchmarks.__main__ import RESULTS, main
from benchmarks.record import CaseResult, Results, SideResult
from benchmarks.table import case_table, fill
from benchmarks.timing import MlxEngine, Settings, Side, Timing, measure

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "results.json"
    assert main(["run", "--quick", "--no-torch", "--commit", "abc", "--case", "swiglu", "--case", "linear", "-o", str(path)]) == 0
    return path


def case_of(**sides: SideResult) -> CaseResult:
    return CaseResult("swiglu", "2x3", "TB/s", 6e9, {}, sides=sides)


def test_results_are_written_and_read_back(quick: Path) -> None:
    results = Results.load(quick)
    assert results.provenance["commit"] == "abc"
    assert results.provenance["distributions"]["mlx"]
    assert results.provenance["command"][-1] == "results.json"  # no path of this machine
    assert [case.group for case in results.cases] == ["swiglu", "linear", "linear"]
    for case in results.cases:
        assert not case.error
        assert list(case.sides) == ["ours", "upstream"]
        assert all(len(side.seconds) == 3 and min(side.seconds) > 0 for side in case.sides.values())
    again = quick.with_name("again.json")
    results.save(again)
    assert json.loads(again.read_text("utf-8")) == json.loads(quick.read_text("utf-8"))


def test_a_wrong_result_is_not_timed_and_loses_no_other_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = mlx_cuda.linear
    monkeypatch.setattr(mlx_cuda, "linear", lambda *arrays, **options: right(*arrays, **options) * 1.1)
    path = tmp_path / "results.json"
    assert main(["run", "--quick", "--no-torch", "--case", "linear", "--case", "swiglu", "-o", str(path)]) == 1
    by_group = {case.group: case for case in Results.load(path).cases}
    assert "relative error 1.0" in str(by_group["linear"].error)
    assert not by_group["linear"].sides
    assert by_group["swiglu"].rate("ours")
    assert "FAILED" in capsys.readouterr().err
    assert "failed" in case_table([by_group["linear"]])


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_quick_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-o", str(tmp_path / "results.json")]) == 2
    assert "cure:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_side_that_raises_is_recorded_and_the_others_are_timed() -> None:
    def broken(*_: object) -> mx.array:
        raise RuntimeError("no kernel for this")

    inputs = [(mx.ones((4,)),)]
    sides = [Side("ours", MlxEngine(), mx.exp, inputs), Side("broken", MlxEngine(), broken, inputs)]
    measured = measure(sides, 16, Settings(repetitions=2, batch_seconds=1e-5))
    case = case_of(**{name: SideResult.of(outcome) for name, outcome in measured.items()})
    assert isinstance(measured["ours"], Timing)
    assert len(case.sides["ours"].seconds) == 2
    assert case.sides["broken"].to_json() == {"error": "RuntimeError: no kernel for this"}
    assert "failed" in case_table([case])


def test_rates_and_ratios() -> None:
    case = case_of(ours=SideResult([2e-3, 1e-3, 9e-3]), upstream=SideResult([5e-3]))
    assert case.rate("ours") == pytest.approx(3.0)
    assert case.speedup("upstream") == pytest.approx(2.5)
    header, _, row = case_table([case]).splitlines()
    assert header == "| case | ours | upstream | ours / upstream |"
    assert row == "| 2x3 | 2.000 ms, 3.00 TB/s | 5.000 ms, 1.20 TB/s | 2.50x |"


def test_results_of_another_schema_are_refused(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    path.write_text(quick.read_text("utf-8").replace('"schema": 1', '"schema": 0'), "utf-8")
    assert main(["table", str(path)]) == 2
    assert "measure again" in capsys.readouterr().err


def test_filling_a_document_replaces_what_was_there(quick: Path) -> None:
    results = Results.load(quick)
    once = fill(DOCUMENT.read_text("utf-8"), results)
    assert "| 16x130 |" in once
    assert fill(once, results) == once


def test_the_document_has_a_place_for_every_operation() -> None:
    assert re.findall(r"<!-- results: (\w+) -->", DOCUMENT.read_text("utf-8")) == ["provenance", "attention", "decode", "linear", "swiglu"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_complete_and_no_trial(path: Path) -> None:
    results = Results.load(path)
    assert not results.provenance["quick"]
    assert not [case.name for case in results.cases if case.error]


def test_the_document_is_made_from_committed_results() -> None:
    text = DOCUMENT.read_text("utf-8")
    made = [path for path in RESULTS.glob("*.json") if fill(text, Results.load(path)) == text]
    assert made or not any(RESULTS.glob("*.json")), "run: python -m benchmarks table benchmarks/results/… --update docs/performance.md"


def test_chart(quick: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert main(["chart", str(quick), "--case", "linear", "-o", str(picture)]) == 0
    one, two = (picture.read_text("utf-8") for picture in pictures)
    assert one == two
    assert "mlx-cuda" in one
    assert "bare" in one
    assert main(["chart", str(quick), "--match", "gelu", "-o", str(pictures[1])]) == 0
    assert "bare" not in pictures[1].read_text("utf-8")
    assert main(["chart", str(quick), "--case", "attention", "-o", str(tmp_path / "none.svg")]) == 2
