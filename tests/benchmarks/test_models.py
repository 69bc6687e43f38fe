"""The benchmark of models, with one of a single layer in place of mlx-lm's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from benchmarks import models, peer
from benchmarks.__main__ import main as tables
from benchmarks.result_file import read

SIZES = {"vocab_size": 96, "hidden_size": 64}


class Cache:
    """The keys so far, which are the values as well."""

    def __init__(self) -> None:
        self.state = mx.zeros((0,))

    def update(self, keys: mx.array) -> mx.array:
        self.state = mx.concatenate([self.state, keys], axis=2) if self.state.size else keys
        return self.state


class Model(Module):
    def __init__(self, arguments: SimpleNamespace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = Embedding(arguments.vocab_size, arguments.hidden_size)
        self.project = Linear(arguments.hidden_size, arguments.hidden_size, bias=False)

    def __call__(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        q = self.project(self.embedding(tokens))[:, None]
        keys = cache[0].update(q)
        mask = "causal" if tokens.shape[1] > 1 else None
        result = mx.fast.scaled_dot_product_attention(q, keys, keys, scale=0.125, mask=mask)
        logits: mx.array = self.embedding.as_linear(result[:, 0])  # type: ignore[no-untyped-call]
        return logits


def load(name: str) -> Any:
    if name == "cache":
        return SimpleNamespace(make_prompt_cache=lambda _: [Cache()])
    if name == "broken":
        raise RuntimeError("no such model")
    return SimpleNamespace(Model=Model, ModelArgs=SimpleNamespace(from_dict=lambda arguments: SimpleNamespace(**arguments)))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "models_of_mlx_lm", lambda: load)
    shapes = {
        "Broken": ("broken", SIZES),
        "Tiny": ("tiny", SIZES),
        "Tiny, 4 bit": ("tiny", {**SIZES, "quantization": models.QUANTIZED}),
    }
    monkeypatch.setattr(models, "SHAPES", shapes)


@pytest.mark.parametrize(("bits", "expected"), [(None, ["rows"] * 4), (8, ["rows", "8 bit", "8 bit", "8 bit"])])
def test_caches_are_quantised_after_each_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch, bits: int | None, expected: list[str]) -> None:
    """So a long prompt is never there in 16 bits as a whole."""
    quantised = SimpleNamespace(kind="8 bit", state=mx.zeros(1))
    rows = SimpleNamespace(kind="rows", state=mx.zeros(1), to_quantized=lambda group_size, bits: quantised)  # noqa: ARG005
    cache, seen = models.Cache([rows]), []
    cache.bits = bits

    def model(tokens: mx.array, cache: models.Cache) -> mx.array:
        seen.append((cache[0].kind, tokens.shape[1]))
        return tokens

    monkeypatch.setattr(models, "PREFILL_STEP", 4)
    models.prefill(model, cache, mx.zeros((2, 11), mx.int32))
    assert seen == list(zip(expected, (4, 4, 2, 1), strict=True))


@pytest.mark.usefixtures("tiny")
def test_a_model_that_fails_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.jsonl"
    sizes = ["--prompt", "20", "--tokens", "5", "--batch", "1", "2", "--turns", "2"]
    assert models.main([*sizes, "-o", str(path)]) == 1
    said = capsys.readouterr().err
    assert "Broken: FAILED" in said
    assert "4 measured, 1 failed" in said
    results = read(path, "models")
    assert results["error of an exported layer"] < 1e-3
    measured = results["cases"]
    assert [(each["model"], each["batch"]) for each in measured] == [(name, batch) for name in ("Tiny", "Tiny, 4 bit") for batch in (1, 2)]
    for each in measured:
        assert mx.cuda.is_available() or each["equal before the first difference"] == 5  # both sides are MLX's there
        for side in "upstream", "first patched", "patched":
            assert len(each[side]["seconds"]) == 3  # of which the first is not counted
            assert 0 < each[side]["host us a step"] < 1e6
        assert ("logits" in each) == (each["batch"] == 1)
    logits = measured[2]["logits"]
    assert logits["steps"] == 5
    assert max(logits["error"].values()) < 0.05
    decode = {name.partition(", ")[2]: count for name, count in measured[2]["engines"]["decode"].items()}
    assert decode == {"no mask": 1, "quantized_matmul": 2}
    assert tables(["models", str(path)]) == 0
    assert "| Tiny, 4 bit | 2 |" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_only_the_models_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    assert models.main(["--prompt", "4", "--tokens", "2", "--batch", "1", "--turns", "1", "--model", "4 bit", "-o", str(path)]) == 0
    assert [each["model"] for each in read(path, "models")["cases"]] == ["Tiny, 4 bit"]


@pytest.mark.usefixtures("tiny")
def test_torch_decodes_one_sequence_of_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: None))

    def decode(of: Any, model: Any, *words: Any) -> dict[str, Any]:
        asked.append(words)
        return {"attention": {"flash": 7.0}}

    monkeypatch.setattr(models, "import_torch", lambda *_, **__: torch)
    monkeypatch.setattr(models, "collect", lambda *_, **known: {"torch": known["torch"] is torch})
    monkeypatch.setattr(peer, "fits", lambda config: "quantization" not in config)
    monkeypatch.setattr(peer, "decode", decode)
    monkeypatch.setattr(models, "of_steps", lambda *_: {"upstream": {}})
    path = tmp_path / "models.jsonl"
    words = ["--prompt", "4", "--tokens", "2", "--batch", "2", "1", "--turns", "1", "--model", "Tiny", "-o", str(path)]
    for option, found in ([], [None] * 4), (["--peer"], [None, {"attention": {"flash": 7.0}}, None, None]):
        assert models.main([*words, *option]) == 0
        results = read(path, "models")
        assert results["provenance"]["torch"] == bool(option)
        assert [each.get("torch") for each in results["cases"]] == found
        assert [each["batch"] for each in results["cases"] if "profile" in each] == ([1, 1] if option else [])
    assert asked == [(SIZES, 4, 2, 1)]

    def broken(*_: Any) -> dict[str, Any]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(peer, "decode", broken)
    assert models.main([*words, "--peer"]) == 1
    assert [each["batch"] for each in read(path, "models")["cases"]] == [2, 1, 2, 1]  # an error of torch's loses nothing


def test_matmul_in_float32_is_that_of_the_dequantised_weights() -> None:
    x, w = mx.random.normal((3, 1, 64)), mx.random.normal((4, 96, 64))
    parts = mx.quantize(w, group_size=32, bits=4)
    options: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
    chosen = mx.array([0, 2, 2], mx.uint32)
    exact = mx.dequantize(*parts, **options)
    gathered = models.gathered_in_float32(x, *parts, rhs_indices=chosen, transpose=True, sorted_indices=True, **options)
    assert mx.allclose(gathered, x @ exact[chosen].swapaxes(1, 2), rtol=1e-4, atol=1e-4)
    plain = models.matmul_in_float32(x, *(part[1] for part in parts), transpose=True, **options)
    assert mx.allclose(plain, x @ exact[1].T, rtol=1e-4, atol=1e-4)
