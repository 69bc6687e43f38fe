"""GGUFs of small models become folders with the weights that they were written from, and with their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from . import tiny, vocabulary
from .convert import convert

TEXT = "the  other\n\nthing: café 12"


def made(folder: Path, **options: bool) -> tuple[tiny.Weights, dict[str, mx.array]]:
    given = tiny.write(folder / "model.gguf", **options)
    convert(folder / "model.gguf", folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    return given, weights


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma3"])
def test_weights_are_what_mlx_lm_wants(tmp_path: Path, gemma: bool) -> None:
    given, found = made(tmp_path, gemma=gemma)
    assert found.keys() == given.keys()
    for name, weight in given.items():
        assert found[name].dtype == mx.bfloat16
        # A GGUF has Gemma's norms with the one in them: what is taken off again has float32's roundoff.
        assert np.allclose(np.array(found[name].astype(mx.float32)), weight, rtol=2**-8, atol=2**-22), name


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    given, found = made(tmp_path, quantized=True)
    for name, weight in given.items():
        off = np.abs(np.array(found[name].astype(mx.float32)) - weight).max()
        assert off <= np.abs(weight).max() * (1 / 254 + 2**-8), name
        assert weight.ndim == 1 or off > 0


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma3"])
def test_the_config_says_what_the_fields_say(tmp_path: Path, gemma: bool) -> None:
    made(tmp_path, gemma=gemma)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6}
    assert {name: config[name] for name in sizes} == sizes
    assert config["model_type"] == ("gemma3_text" if gemma else "llama")
    assert config.get("sliding_window") == (64 if gemma else None)


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma3"])
def test_mlx_lm_loads_it(tmp_path: Path, gemma: bool) -> None:
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")  # benchmarks import mlx_lm's parts without itself
    made(tmp_path, gemma=gemma)
    model, tokenizer = utils.load(str(tmp_path))
    ids = tokenizer.encode(TEXT)
    logits = model(mx.array([ids]))
    assert logits.shape == (1, len(ids), model.args.vocab_size)
    assert mx.isfinite(logits).all()
    assert tokenizer.decode(ids) == ("<bos>" if gemma else "") + TEXT
    if gemma:
        assert [tokenizer.decode([each]) for each in ids[:5]] == ["<bos>", "t", "he", "  ", "o"]
        assert tokenizer.encode("\n\n the") == [2, 5, tokenizer.vocab[f"{vocabulary.SPACE}the"]]
    else:
        assert tokenizer.encode("the the 12")[2:] == [tokenizer.vocab[each] for each in ("Ġthe", "Ġ", "1", "2")]


def test_pairs_are_ranked_by_what_they_make() -> None:
    tokens = ["ab", "a", "b", "c", "abc", "bc", "<s>", "a<s>"]
    scores = [-1.0, 0.0, 0.0, 0.0, -0.5, -2.0, 0.0, 5.0]
    kinds = [1, 1, 1, 1, 1, 1, vocabulary.CONTROL, 1]
    assert list(vocabulary.ranked_pairs(tokens, scores, kinds)) == [("a", "bc"), ("ab", "c"), ("a", "b"), ("b", "c")]


@pytest.mark.parametrize(
    "change", [{"model": "bert"}, {"pre": "qwen2"}, {"model": "llama", "add_space_prefix": True}], ids=["kind", "cut", "space before"]
)
def test_an_unknown_tokenizer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^\[tokenizer\] Only the kinds of SmolLM2 and Gemma 3 are known, got "):
        vocabulary.tokenizer({**tiny.of_bytes(), **change})


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer: Any = GGUFWriter(tmp_path / "model.gguf", "bert")
    writer.add_uint32("bert.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"^\[convert\] Only llama, gemma3 are known, got a GGUF of bert$"):
        convert(tmp_path / "model.gguf", tmp_path)


def test_a_weight_without_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import convert as module

    tiny.write(tmp_path / "model.gguf")
    monkeypatch.setattr(module, "OUTER", {"token_embd": "embed_tokens"})
    with pytest.raises(ValueError, match=r"^\[convert\] A weight has no place in the architecture, got output_norm\.weight$"):
        convert(tmp_path / "model.gguf", tmp_path)
