"""The benchmark of many requests at once: what it adds up, and its loop around mlx-lm's own batches, with a tiny model."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import models, requests, serving, soak
from benchmarks.__main__ import main as tables
from benchmarks.mlx_lm_parts import part
from benchmarks.requests import Answer, Request, Served, draw, equal_start, figures, percentile
from benchmarks.result_file import read, write
from benchmarks.serving_table import replayed, serving_tables, speed
from benchmarks.soak import growth

from .invented import PROVENANCE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TINY: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 512, "rope_theta": 1e4,
}  # fmt: skip
SMALL = ["--requests", "5", "--prompt", "9", "--tokens", "6", "--rate", "200", "--warm", "2", "--alone", "2"]
SMALL += ["--completion-batch", "3", "--prefill-batch", "2"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        part("generate")
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(serving, "SHAPES", {"Tiny": ("qwen3", TINY), "Tiny, 4 bit": ("qwen3", {**TINY, "quantization": models.QUANTIZED})})


def test_arrivals_are_the_same_each_time() -> None:
    one = draw(200, 32.0, (20, 5), 96, seed=3)
    assert one == draw(200, 32.0, (20, 5), 96, seed=3)
    assert one != draw(200, 32.0, (20, 5), 96, seed=4)
    assert {(len(each.prompt), each.tokens) for each in one} == {(20, 5)}
    assert all(0 <= token < 96 for each in one for token in each.prompt)
    assert one[0].arrival == 0
    gaps = [after.arrival - before.arrival for before, after in itertools.pairwise(one)]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 32, rel=0.3)
    assert {each.arrival for each in draw(4, 0, (20, 5), 96)} == {0.0}
    lengths = {len(each.prompt) for each in draw(200, 0, (20, 5), 96, vary=0.5)}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 10


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([float(value) for value in range(101)], 0.99) == 99
    assert percentile([1.0, 2.0], 1.0) == 2
    assert [equal_start([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 5, 3], [])] == [3, 1, 0]


def test_what_a_run_adds_up_to() -> None:
    answers = [
        Answer(Request(0.0, [1] * 10, 3), [1, 2, 3], [1.0, 1.1, 1.3], finished=True),
        Answer(Request(0.5, [1] * 10, 3), [4, 5], [1.1, 1.3]),
        Answer(Request(9.0, [1] * 10, 3)),
    ]
    stats = SimpleNamespace(prompt_tokens=20, prompt_time=0.5, decode_time=0.25)
    found = figures(Served(answers, [1, 2, 2], joins=2, seconds=2.0, idle=0.25, limited=True), stats)
    assert speed(found) == 2.5  # until the limit
    assert (found["requests finished"], found["requests begun"], found["tokens"]) == (1, 2, 5)
    assert found["between tokens, ms"] == pytest.approx({"50th": 200, "99th": 200, "most": 200})
    assert found["to the first token, ms"]["most"] == pytest.approx(1000)
    assert found["mean batch"] == pytest.approx(5 / 3)
    assert found["changes of the batch's size"] == 1
    assert found["wall clock"] == {
        "prompt steps": 0.5,
        "decoding steps": 0.25,
        "joining and the rest": 1.0,
        "nobody there": 0.25,
    }
    whole = figures(Served(answers[:2], [1, 2, 2], seconds=2.0), stats)
    assert whole["seconds"] == 1.3  # to the last token
    empty = figures(Served([]), SimpleNamespace(prompt_tokens=0, prompt_time=0.0, decode_time=0.0))
    assert speed(empty) is None
    assert replayed({**empty, "replayed": 0}) is None
    assert empty["between tokens, ms"]["99th"] is None


@pytest.mark.usefixtures("tiny")
def test_every_request_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serving.jsonl"
    assert serving.main([*SMALL, "--model", "Tiny", "--profile", "--logprobs", "--vary", "0.5", "-o", str(path)]) == 0
    assert "Tiny, patched: " in capsys.readouterr().err
    results = read(path, "serving")
    assert [entry["model"] for entry in results["cases"]] == ["Tiny"]
    asked = draw(5, 200.0, (9, 6), 96, vary=0.5)
    for side in serving.SIDES:
        found = results["cases"][0][side]
        assert found["requests finished"] == 5
        assert found["tokens"] == sum(each.tokens for each in asked)
        assert found["prompt tokens"] == sum(len(each.prompt) - 1 for each in asked)  # the last one is a step's
        assert found["largest batch"] <= 3
        assert not found["ended by the limit"]
        assert found["calls of caches"]["filter"]["calls"] > 0
        assert found["calls of caches"]["extract"]["calls"] == 2 * 5  # of each layer and request
        assert [each["of"] for each in found["alone"]] == [asked[each["request"]].tokens for each in found["alone"]]
        assert len(found["alone"]) == 2
    cache = part("models.cache").BatchKVCache
    assert not [name for name in requests.METHODS if hasattr(getattr(cache, name), "__wrapped__")]


@pytest.mark.usefixtures("tiny")
def test_a_limit_leaves_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "serving.jsonl"
    words = [*SMALL, "--model", "Tiny", "--tokens", "100000", "--seconds", "0.5", "--alone", "0", "--sides", "upstream", "-o", str(path)]
    assert serving.main(words) == 0
    (entry,) = read(path, "serving")["cases"]
    assert entry.keys() == {"model", "requests", "upstream"}
    assert entry["upstream"]["ended by the limit"]
    assert entry["upstream"]["requests finished"] == 0
    assert entry["upstream"]["tokens"] > 0
    assert entry["upstream"]["seconds"] >= 0.5


@pytest.mark.usefixtures("tiny")
def test_a_side_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, measure = tmp_path / "serving.jsonl", serving.measure

    def broken(side: str, *arguments: Any) -> dict[str, Any]:
        if side == "upstream":
            raise RuntimeError("no memory")
        return measure(side, *arguments)

    monkeypatch.setattr(serving, "measure", broken)
    assert serving.main([*SMALL, "--model", "Tiny, 4 bit", "-o", str(path)]) == 1
    said = capsys.readouterr().err
    assert "Tiny, 4 bit, upstream: FAILED" in said
    assert "1 models, 1 failures" in said
    (entry,) = read(path, "serving")["cases"]
    assert entry["upstream"] == {"error": "RuntimeError: no memory"}
    assert entry["patched"]["requests finished"] == 5


@pytest.mark.usefixtures("tiny")
def test_a_model_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serving.jsonl"
    monkeypatch.setattr(serving, "SHAPES", {"Tinier": ("qwen3", {**TINY, "hidden_size": "none"}), "Tiny": ("qwen3", TINY)})
    assert serving.main([*SMALL, "--model", "Tinier", "Tiny", "--sides", "patched", "-o", str(path)]) == 1
    broken, whole = read(path, "serving")["cases"]
    assert broken["error"]
    assert whole["patched"]["requests finished"] == 5


@pytest.mark.usefixtures("tiny")
def test_models_are_called_by_the_beginning_of_their_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.chosen(["Ti"]) == ["Tiny", "Tiny, 4 bit"]
    assert serving.chosen(["Tiny"]) == ["Tiny"]
    assert serving.chosen(["Tiny,", "Tiny"]) == ["Tiny, 4 bit", "Tiny"]
    assert serving.main(["--model", "Huge", "-o", str(tmp_path / "serving.jsonl")]) == 2
    assert "error: no model is called Huge; there are Tiny; Tiny, 4 bit" in capsys.readouterr().err


def test_a_soak_fails_where_replaying_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own steps take their place, so nobody else would notice."""
    decoding = SimpleNamespace(
        captured=1, replayed=0, errors=["replaying it failed: no"], reason="", sessions=[], batches=SimpleNamespace(nbytes=0)
    )
    run = SimpleNamespace(run=lambda _: None, steps=3, to_json=lambda _: {"failures": ["a request gave 1 tokens of 2"]})
    monkeypatch.setattr(serving, "decoding_of", lambda _: decoding)
    monkeypatch.setattr(serving, "Soak", lambda *_, **__: run)
    model = SimpleNamespace(args=SimpleNamespace(vocab_size=5))
    args = serving.make_parser().parse_args([*SMALL, "-o", "none.json", "--soak", "1"])
    assert serving.soak("patched", model, args, print)["failures"] == ["a request gave 1 tokens of 2", "replaying it failed: no"]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("least", [256.0, -1e6])
def test_a_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float) -> None:
    monkeypatch.setattr(soak, "READ_EVERY", 0.1)
    path = tmp_path / "soak.jsonl"
    words = [*SMALL, "--model", "Tiny", "--sides", "patched", "--soak", "2.5", "--growth", str(least), "-o", str(path)]
    code = serving.main(words)
    found = read(path, "serving")["cases"][0]["patched"]
    assert found["requests"] > 10
    assert 0 < found["cancelled"] < found["requests"]
    assert found["repeated"] > 0
    assert len(found["first differences"]) <= found["repeated"]
    assert len(found["readings, MiB"]) >= soak.FEWEST_READINGS
    assert not [each for each in found["failures"] if "grew" not in each]
    assert code == bool(found["failures"])
    if least < 0:
        assert any(failure.startswith("active memory grew by ") for failure in found["failures"])


def test_memory_that_grows() -> None:
    def readings(active: Sequence[float], captures: float = 0.0) -> list[dict[str, float | None]]:
        return [{"active": each, "recordings": captures, "driver": None, "host": 1.0} for each in active]

    assert growth(readings([1.0] * 7)) == {"active": None, "driver": None, "host": None}
    assert growth(readings([90.0, 1, 2, 2, 3, 3, 7, 7])) == {"active": 5.0, "driver": None, "host": 0.0}
    assert growth([*readings([1.0] * 6), *readings([4.0, 4.0], 3.0)])["active"] == 0  # what recordings have is no growth


def found(rate: int, **others: Any) -> dict[str, Any]:
    return {
        "warm-up seconds": 2.0, "ended by the limit": False, "requests finished": 64, "requests begun": 64, "seconds": 10.0,
        "tokens": 10 * rate, "prompt tokens": 10000, "mean batch": 20.0, "decoding steps": 300,
        "between tokens, ms": {"50th": 5.0, "99th": 50.0, "most": 90.0},
        "to the first token, ms": {"50th": 500.0, "99th": 1500.0, "most": 1600.0}, "first steps of joining requests": 9,
        "wall clock": {"prompt steps": 2.0, "decoding steps": 7.0, "joining and the rest": 1.0, "nobody there": 0.0},
        "peak MiB": 5000.0, "driver's MiB": None,
        "alone": [{"request": 0, "equal": 256, "of": 256}], **others,
    }  # fmt: skip


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"prompt": 1024, "tokens": 256, "rate": 32.0, "vary": 0.0}
    calls = {"extend": {"calls": 36, "seconds": 1.25}}
    served = {
        "kind": "serving",
        "provenance": PROVENANCE,
        "settings": settings,
        "cases": [
            {
                "model": "One", "requests": 64, "upstream": found(500, **{"ended by the limit": True, "requests finished": 20}),
                "patched": found(2500, replayed=270, **{"recorded": 9, "calls of caches": calls}),
            },
            {"model": "Two", "requests": 64, "upstream": {"error": "RuntimeError: no memory"}, "patched": found(100)},
        ],
    }  # fmt: skip
    soaked = {
        "readings, MiB": [{"at": 1200.0}], "requests": 9000, "cancelled": 1800, "tokens": 300000, "repeated": 1000,
        "growth, MiB": {"active": 1.0, "driver": None, "host": 12.0}, "failures": [], "first differences": [3] * 7,
    }  # fmt: skip
    endured = {**served, "cases": [{"model": "One", "soak": 1200.0, "patched": soaked}]}
    assert serving_tables([served]).keys() == {"serving_H200"}
    assert serving_tables([endured]).keys() == {"soak_H200"}
    files = [tmp_path / "speed.jsonl", tmp_path / "soak.jsonl"]
    for file, results in zip(files, (served, endured), strict=True):
        write(file, results)
    assert tables(["serving", *map(str, files)]) == 0
    said = capsys.readouterr().out
    name = "One; 64 x (1024 + 256), 32/s"
    assert f"| {name} | MLX | 500, ended after 10 s: 20 finished |  | 5.0, 50.0 | 0.50, 1.50 | 20.0 | 256 of 256 |" in said
    assert f"| {name} | patched | 2500 | 5.00x |" in said
    assert "| Two; 64 x (1024 + 256), 32/s | MLX | failed: RuntimeError: no memory |" in said
    assert f"| {name} | patched | 2.0, 7.0, 1.0, 0.0 | 5000 | 300 + 9 of those that join | 87% | 9 | 2.0 | 5000 |" in said
    assert f"| {name} | patched | 36 x extend, 1.2 s |" in said
    assert "| One | patched | 20 | 9000 | 1800 | 300000 | 1000 | 7 | +1, unknown, +12 | none |" in said
    document = tmp_path / "serving.md"
    document.write_text("<!-- results: serving_H200 -->\n<!-- end of results -->\n<!-- results: soak_H200 -->\n<!-- end of results -->\n")
    assert tables(["serving", str(files[1]), "--update", str(document)]) == 0
    text = document.read_text("utf-8")
    assert text.startswith("<!-- results: serving_H200 -->\n<!-- end of results -->\n")  # of which there is nothing yet
    assert "| One | patched | 20 |" in text
