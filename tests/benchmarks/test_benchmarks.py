from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._explain import EXPLAINED

from benchmarks.__main__ import ATTENTION, GROUPS, MATMUL, RESULTS, main, warnings
from benchmarks.cases import GROUPS as CASES
from benchmarks.cases import base
from benchmarks.cases.base import UnavailableError, operation
from benchmarks.cases.linear_attention import FLA, Fla, FlaGraph
from benchmarks.decoding import bytes_of_step
from benchmarks.measuring import check
from benchmarks.record import CaseResult, Results, SideResult
from benchmarks.result_file import write
from benchmarks.table import SHORT, case_table, fill, short_table
from benchmarks.targets import ATTENTION as ATTENTION_TARGETS
from benchmarks.targets import MATMUL as MATMUL_TARGETS
from benchmarks.targets import behind_table, judge
from benchmarks.timing import MlxEngine, Settings, Side, Timing, measure

from .invented import results_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "performance.md"


@pytest.fixture(scope="module", autouse=True)
def _few_inputs() -> Iterator[None]:
    """On the CPU it takes long to draw as many as no cache of a GPU holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "ROTATED_BYTES", 4 << 20)
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "results.jsonl"
    assert main(["run", "--quick", "--no-torch", "--commit", "abc", "--case", "swiglu", "--case", "linear", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A quick run of all groups of attention."""
    path = tmp_path_factory.mktemp("attention") / "results.jsonl"
    groups = [word for group in ATTENTION for word in ("--case", group)]
    assert main(["run", "--quick", "--no-torch", "--commit", "abc", *groups, "-o", str(path)]) == 0
    return Results.load(path)


def case_of(**sides: SideResult) -> CaseResult:
    return CaseResult("swiglu", "2x3", "TB/s", 6e9, {}, sides=sides)


def test_results_are_written_and_read_back(quick: Path) -> None:
    results = Results.load(quick)
    assert results.provenance["commit"] == "abc"
    assert results.provenance["distributions"]["mlx"]
    assert results.provenance["command"][-1] == "results.jsonl"  # no path of this machine
    assert [case.group for case in results.cases] == ["swiglu", "linear", "linear"]
    for case in results.cases:
        assert not case.error
        assert list(case.sides) == ["ours", "upstream"]
        assert all(len(side.seconds) == 2 and min(side.seconds) > 0 for side in case.sides.values())
    again = quick.with_name("again.jsonl")
    results.save(again)
    assert again.read_text("utf-8") == quick.read_text("utf-8")


def test_groups_measured_later_join_the_file_of_the_same_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    common = ["run", "--quick", "--no-torch", "-o", str(path)]
    assert main([*common, "--commit", "abc", "--case", "swiglu", "--case", "small"]) == 0
    before = Results.load(path)
    assert main([*common, "--commit", "abc", "--case", "linear", "--case", "small", "--keep"]) == 0
    after = Results.load(path)
    assert [case.group for case in after.cases] == ["small", "linear", "linear", "swiglu"]
    assert after.cases[-1] == before.cases[0]
    assert after.cases[0] != before.cases[1]
    assert [run["date"] for run in after.provenance["earlier_runs"]] == [before.provenance["date"]]
    assert main([*common, "--commit", "def", "--case", "linear", "--keep"]) == 2
    assert "of another commit: abc, not def" in capsys.readouterr().err
    assert Results.load(path) == after


def test_what_was_not_measured_again_comes_from_the_earlier_build_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, path = tmp_path / "earlier.jsonl", tmp_path / "results.jsonl"
    common = ["run", "--quick", "--no-torch", "--case", "linear"]
    assert main([*common, "--case", "swiglu", "--case", "small", "--commit", "abc", "-o", str(earlier)]) == 0
    assert main([*common, "--commit", "def", "-o", str(path)]) == 0
    for results, device_code in (earlier, "1"), (path, "2"):
        known = Results.load(results)
        known.provenance["native"] = {"build": {"cuda": "13.0", "device_code": device_code}, "libraries": {"cudnn": "9.19.0"}}
        known.save(results)
    measured = Results.load(path).cases
    assert main(["join", str(path), str(earlier)]) == 0
    joined = Results.load(path)
    assert [(case.group, case.commit) for case in joined.cases] == [("small", "abc"), ("linear", ""), ("linear", ""), ("swiglu", "abc")]
    assert joined.cases[1:3] == measured
    assert main(["table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(`abc`) |") == 2
    assert "cases marked with `abc` are of that commit" in printed
    other = Results.load(earlier)
    other.provenance["commit"] = None
    other.save(earlier)
    assert main(["join", str(path), str(earlier)]) == 2
    assert "name no commit" in capsys.readouterr().err
    other.provenance["native"]["libraries"]["cudnn"] = "9.20.0"
    other.save(earlier)
    assert main(["join", str(path), str(earlier)]) == 2
    assert "of another native" in capsys.readouterr().err
    other.provenance["device"] = "another"
    other.save(earlier)
    assert main(["join", str(path), str(earlier)]) == 2
    assert "of another device: another, not" in capsys.readouterr().err
    assert Results.load(path) == joined


def test_every_earlier_build_whose_cases_are_left_is_named(tmp_path: Path) -> None:
    builds = {commit: tmp_path / f"{commit}.jsonl" for commit in ("abc", "def", "now")}
    for (commit, path), group in zip(builds.items(), ("linear", "swiglu", "small"), strict=True):
        assert main(["run", "--quick", "--no-torch", "--case", group, "--commit", commit, "-o", str(path)]) == 0
    for earlier in "abc", "def":
        assert main(["join", str(builds["now"]), str(builds[earlier])]) == 0
    assert set(Results.load(builds["now"]).provenance["earlier_builds"]) == {"abc", "def"}
    assert main(["run", "--quick", "--no-torch", "--case", "swiglu", "--keep", "--commit", "now", "-o", str(builds["now"])]) == 0
    results = Results.load(builds["now"])
    assert [case.commit for case in results.cases if case.group == "swiglu"] == [""]
    assert set(results.provenance["earlier_builds"]) == {"abc"}


def test_a_wrong_result_is_not_timed_and_loses_no_other_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = mlx_cuda.linear
    monkeypatch.setattr(mlx_cuda, "linear", lambda *arrays, **options: right(*arrays, **options) * 1.1)
    path = tmp_path / "results.jsonl"
    assert main(["run", "--quick", "--no-torch", "--case", "linear", "--case", "swiglu", "-o", str(path)]) == 1
    by_group = {case.group: case for case in Results.load(path).cases}
    assert "relative error 1.0" in str(by_group["linear"].error)
    assert not by_group["linear"].sides
    assert by_group["swiglu"].rate("ours")
    assert "FAILED" in capsys.readouterr().err
    assert "failed" in case_table([by_group["linear"]])


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_quick_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-o", str(tmp_path / "results.jsonl")]) == 2
    assert "fix:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_group_of_attention_runs_and_names_its_engine(attention: Results) -> None:
    assert {case.group for case in attention.cases} == set(ATTENTION)
    for case in attention.cases:
        assert not case.error
        assert case.sides["upstream"].median
        assert case.unavailable or (case.sides["ours"].median and case.errors["ours"] < 3e-2)
        assert case.unavailable or case.engine
    assert next(case for case in attention.cases if case.group == "growing").numbers["ours: steps"] == 10


def test_every_group_of_matmul_runs(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert main(["run", "--quick", "--no-torch", *(word for group in MATMUL for word in ("--case", group)), "-o", str(path)]) == 0
    results = Results.load(path)
    assert {case.group for case in results.cases} == set(MATMUL)
    for case in results.cases:
        assert case.unavailable or (case.sides["ours"].median and case.errors["ours"] < 3e-2)


def test_the_groups_of_the_command_line_are_those_there_are() -> None:
    assert tuple(CASES) == GROUPS


def test_no_two_cases_of_a_group_have_one_name() -> None:
    for quick in True, False:
        for group, cases in CASES.items():
            names = [case.name for case in cases(quick=quick)]
            assert len(names) == len(set(names)), group


def without_options(q: mx.array, k: mx.array, v: mx.array, *, scale: float = 1.0, mask: str | None = None) -> mx.array:
    return q


def test_what_the_package_lacks_is_unavailable_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlx_cuda, "attention", without_options)
    with pytest.raises(UnavailableError, match=r"no attention\(sinks\)"):
        operation("attention", scale=1.0, sinks=mx.zeros(1))()
    path = tmp_path / "results.jsonl"
    assert main(["run", "--quick", "--no-torch", "--case", "softcap", "-o", str(path)]) == 0
    (case,) = Results.load(path).cases
    assert case.unavailable == "the installed mlx_cuda has no attention(softcap)"
    assert case.sides["upstream"].median
    assert "| unavailable |" in case_table([case])
    assert "UNAVAILABLE softcap" in capsys.readouterr().err


def test_points_that_are_slower_than_upstream_are_named() -> None:
    spread = [1.0, 1.1, 1.2, 1.3]
    assert case_of(ours=SideResult([1.25, 1.3]), upstream=SideResult([1.0, 1.1])).behind()
    assert not case_of(ours=SideResult([1.15, 1.3]), upstream=SideResult(spread)).behind()
    assert not case_of(ours=SideResult([1.0]), upstream=SideResult(error="none")).behind()
    slow = case_of(ours=SideResult([2.0]), upstream=SideResult([1.0]))
    unsure = case_of(ours=SideResult([1.15, 1.3]), upstream=SideResult(spread))
    assert warnings([unsure, slow, case_of(ours=SideResult([1.0]), upstream=SideResult([1.0]))]) == [
        "SLOWER than MLX, beyond the noise: swiglu 2x3: 0.500x",
        "SLOWER than MLX, within the noise: swiglu 2x3: 0.939x",
    ]


def test_a_side_that_raises_is_noted_and_the_others_are_timed() -> None:
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


def test_a_side_of_torch_with_the_same_numbers_is_held_to_the_reference() -> None:
    (case, *_) = CASES["swiglu"](quick=True)
    prepared = case.prepare(None)
    torch: Any = object()
    others = [Side(name, torch, prepared.sides[0].call, prepared.sides[0].inputs) for name in ("same", "other")]
    header: dict[str, Any] = {}
    check(case, replace(prepared, sides=[*prepared.sides, *others], same_inputs={"same": prepared.error}), header)
    assert header["errors"] == {side: pytest.approx(header["errors"]["ours"], abs=1e-2) for side in ("ours", "upstream", "same")}


def test_flash_linear_attention_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    engine: Any = SimpleNamespace(torch=None)
    inputs: Any = [(mx.ones((1, 2, 1, 4)),)]
    side = Side(FLA, engine, Fla(engine, backward=False), inputs)
    with pytest.raises(UnavailableError, match="flash-linear-attention cannot be imported: "):
        side.call(*inputs[0])


def test_flash_linear_attention_is_captured_once_for_each_set_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = MagicMock()
    rules = SimpleNamespace(fused_recurrent_gated_delta_rule=MagicMock(side_effect=itertools.count()))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", rules)
    sets = [tuple(MagicMock(shape=(1, 1), data_ptr=lambda at=at: at) for _ in range(6)) for at in range(2)]
    engine: Any = SimpleNamespace(torch=torch)
    peer = FlaGraph(engine)
    assert [peer(*sets[i]) for i in (0, 1, 0, 1)] == [1, 3, 1, 3]  # the results of the second call of each, which is captured
    assert torch.cuda.CUDAGraph.call_count == 2
    assert torch.cuda.CUDAGraph.return_value.replay.call_count == 4


def test_rates_and_ratios() -> None:
    case = case_of(ours=SideResult([2e-3, 1e-3, 9e-3]), upstream=SideResult([5e-3]))
    assert case.rate("ours") == pytest.approx(3.0)
    assert case.speedup("upstream") == pytest.approx(2.5)
    header, _, row = case_table([case]).splitlines()
    assert header == "| case | mlx-cuda | MLX | vs MLX |"
    assert row == "| 2x3 | 2.000 ms, 3.00 TB/s | 5.000 ms, 1.20 TB/s | 2.50x |"


def test_filling_a_document_replaces_what_was_there(quick: Path) -> None:
    results = Results.load(quick)
    once = fill(DOCUMENT.read_text("utf-8"), results)
    assert "| 16x130 |" in once
    assert fill(once, results) == once


# Groups with a page of their own.
APART = {"linear_attention": "guides/linear-attention.md", "quantized_cache": "guides/quantized-cache.md"}


def test_the_document_has_a_place_for_every_operation() -> None:
    assert sorted(re.findall(r"<!-- results: (\w+) -->", DOCUMENT.read_text("utf-8"))) == sorted(
        ["provenance", "short", "targets", "matmul_targets", "behind", "models", *(each for each in GROUPS if each not in APART)]
    )
    for group, page in APART.items():
        assert f"<!-- results: {group} -->" in (DOCUMENT.parents[1] / page).read_text("utf-8")


@pytest.mark.nightly
def test_the_documents_show_every_picture_that_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.jsonl"
    results_of(lambda _, side: 1e-3 if side == "ours" else 2e-3).save(path)
    assert main(["pictures", str(path), "-o", str(tmp_path / "img")]) == 0
    drawn = {picture.name for picture in (tmp_path / "img").iterdir()}
    assert drawn == {Path(name).name for name in re.findall(r"\((?:\.\./)*img/([\w-]+\.svg)\)", DOCUMENT.read_text("utf-8"))}
    for picture in (tmp_path / "img").iterdir():
        assert "mlx-cuda" in picture.read_text("utf-8")
    quantized = (tmp_path / "img" / "quantized.svg").read_text("utf-8")
    for line in "MLX, in two steps", "MLX, bfloat16", "bandwidth limit", "compute limit":
        assert quantized.count(line) == 1  # in the legend
    assert "(../img/quantized.svg)" in (DOCUMENT.parents[1] / "reference" / "matmul.md").read_text("utf-8")


MODEL = {
    "model": "Tiny", "batch": 1, "prompt": 1000, "generated": 64, "equal before the first difference": 3,
    "upstream": {"seconds": [[9.0, 9.0], [0.05, 0.64]]},
    "patched": {"seconds": [[9.0, 9.0], [0.04, 0.5], [0.02, 0.5], [0.03, 0.5]]},
}  # fmt: skip
ALIKE = {
    "engines": {
        "prefill": {"flash, array mask": 29, "cudnn, causal mask": 5},
        "decode": {"decode, no mask": 34, "few, quantized_matmul": 252},
    },
    "logits": {"steps": 16, "error": {"upstream": 0.02, "patched": 0.01}, "equal tokens": {"patched, upstream": 15}},
}


def test_models_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, row, lines in (
        (MODEL, "| Tiny | 1 | 20000 | 33333 | 1.67x |  |  |", 3),
        (MODEL | ALIKE, "| Tiny | 1 | 20000 | 33333 | 1.67x | 15 of 16 | 2.0e-02, 1.0e-02 |", 8),
    ):
        path = tmp_path / "models.jsonl"
        write(path, {"kind": "models", "cases": [model]})
        assert main(["models", str(path)]) == 0
        table = capsys.readouterr().out.splitlines()
        assert len(table) == lines
        assert table[2] == row
    assert table[6] == "| Tiny | prefill | 29 x flash (array mask), 5 x cudnn (causal mask) |"
    assert table[7] == "| Tiny | decode | 34 x decode (no mask), 252 x small_m (quantized_matmul) |"


@pytest.mark.parametrize("group", [*ATTENTION, *MATMUL])
def test_explain_is_asked_about_the_call_that_is_timed(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[object]] = {"timed": [], "explained": []}

    def told(value: object) -> object:
        return (value.dtype, value.tolist()) if isinstance(value, mx.array) else value

    def note(kind: str, *arguments: object, **options: object) -> object:
        calls[kind].append(([told(each) for each in arguments], {name: told(value) for name, value in options.items()}))
        return arguments[0]

    for function in EXPLAINED:
        monkeypatch.setattr(mlx_cuda, function.__name__, wraps(function)(partial(note, "timed")))
    monkeypatch.setattr(mlx_cuda, "explain", lambda _, *arguments, **options: note("explained", *arguments, **options))
    for case in CASES[group](quick=True):
        side = case.prepare(None).sides[0]
        if side.explain and side.context is not mlx_cuda.patch:  # which is asked about what MLX's function is called with
            side.call(*side.inputs[0])
            side.explain(*side.inputs[0])
            assert calls["timed"] == calls["explained"] != []


def test_the_table_names_the_engine_of_what_explain_does_not_know() -> None:
    def case(name: str, *primitives: str) -> CaseResult:
        return CaseResult("varlen", name, "TFLOP/s", 1e12, {}, list(primitives), sides={"ours": SideResult([1.0])}, engine="fallback")

    rows = [case("masked", "Broadcast", "FlashAttention"), case("packed", "Arange", "FlashVarlenAttention")]
    table = case_table([*rows, case("paged", "PagedAttention"), case("padded", "Matmul")])
    assert [line.split(" | ")[:2] for line in table.splitlines()[2:]] == [
        ["| masked", "flash"],
        ["| packed", "flash"],
        ["| paged", "decode"],
        ["| padded", "fallback"],
    ]


def test_the_memory_has_a_share_where_bytes_count() -> None:
    results = results_of(lambda *_: 1e-3)
    table = case_table([case for case in results.cases if case.group == "decode"], "NVIDIA H200")
    header, _, *rows = table.splitlines()
    assert header.startswith("| case | engine | mlx-cuda |")
    column = header.split(" | ").index("of bandwidth")
    row = next(row for row in rows if row.startswith("| B=64, 1 of 8192, D=128, 32/8 heads |"))
    assert row.split(" | ")[column] == "50 %"  # 2.1 GB in a millisecond are 2.15 TB/s of 4.3


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_results_are_complete_and_no_trial(path: Path) -> None:
    results = Results.load(path)
    assert not results.provenance["quick"]
    assert not [case.name for case in results.cases if case.error]


def test_the_document_is_made_from_committed_results() -> None:
    text = DOCUMENT.read_text("utf-8")
    made = [path for path in RESULTS.glob("*.jsonl") if fill(text, Results.load(path)) == text]
    assert made or not any(RESULTS.glob("*.jsonl")), (
        "run: python -m benchmarks table benchmarks/results/… --update docs/results/performance.md"
    )


def test_the_bytes_of_a_token() -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 3, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    config["vocab_size"] = 50
    layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 20
    assert bytes_of_step(config, 7) == (3 * layer + 50 * 8) * 2 + 3 * 2 * 4 * 7 * 2
    assert bytes_of_step({**config, "quantization": {"bits": 4, "group_size": 64}}, 0) == (3 * layer + 50 * 8) * (0.5 + 1 / 16)
    experts = {**config, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    assert bytes_of_step(experts, 0) == (3 * (8 * 8 * 2 + 8 * 4 * 2 + 2 * 3 * 8 * 10 + 8 * 6) + 50 * 8) * 2


def test_what_is_missed_says_why() -> None:
    results = Results.load(RESULTS / "nvidia-h200-cu13.jsonl")
    rows = behind_table((*ATTENTION_TARGETS, *MATMUL_TARGETS), results).splitlines()[2:]
    missed = [target.text for target in (*ATTENTION_TARGETS, *MATMUL_TARGETS) if judge(target, results).state == "missed"]
    assert [row.split(" | ")[2] for row in rows] == missed
    assert not [row for row in rows if row.endswith(" |  |")], "give the target its `why`"


def test_every_row_in_short_has_cases() -> None:
    results = Results.load(RESULTS / "nvidia-h200-cu13.jsonl")
    rows = [line for line in short_table(results).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(SHORT), "a pattern fits no case"


def test_builds_are_compared_by_ours_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert main(["run", "--quick", "--alone", "--case", "swiglu", "-o", str(first)]) == 0
    results = Results.load(first)
    assert {name for case in results.cases for name in case.sides} == {"ours"}
    for case in results.cases[1:]:
        case.sides["ours"].seconds[:] = [10 * seconds for seconds in case.sides["ours"].seconds]
    results.save(second)
    capsys.readouterr()
    assert main(["compare", str(first), str(first)]) == 0
    assert f"{len(results.cases)} cases, median factor 1.000; apart: 0\n" in capsys.readouterr().out
    assert main(["compare", f"{first},{first}", str(second)]) == 0
    said = capsys.readouterr().out
    assert f"apart: {len(results.cases) - 1}\n" in said
    assert said.count("| 10.000 |") == len(results.cases) - 1


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
