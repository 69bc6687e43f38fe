"""The step in torch that decoding is compared with computes what mlx-lm's model does, on the GPU as a CUDA graph."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from benchmarks import models
from benchmarks.cells import speed
from benchmarks.decoding import PEER, decoding_table, draw_decoding
from benchmarks.peer import Peer, decode, fits

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64,
}  # fmt: skip
LENGTH = 40
ERROR = {"float32": 3e-3 if mx.cuda.is_available() else 1e-5, "bfloat16": 2e-2}  # MLX's own float32 is TF32 on a GPU


@pytest.fixture
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def make(kind: str, dtype: str, *, tied: bool) -> tuple[Any, dict[str, Any]]:
    """A model of mlx-lm with random weights, those of norms too, which else are 1; and its sizes."""
    try:
        module = models.models_of_mlx_lm()(kind)
    except SystemExit:
        pytest.skip("mlx_lm is not installed")
    config = {**SIZES, "model_type": kind, "tie_word_embeddings": tied}
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: mx.random.normal(weight.shape).astype(getattr(mx, dtype)) / 4, model.parameters()))
    return model, config


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_its_logits_are_those_of_mlx_lm(torch: Any, kind: str, tied: bool, dtype: str) -> None:
    model, config = make(kind, dtype, tied=tied)
    tokens = mx.random.randint(0, config["vocab_size"], (1, LENGTH))
    gpu = torch.cuda.is_available()
    peer = Peer(torch, model, config, *((1024, "cuda") if gpu else (64, "cpu")))  # flash attention splits many keys
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    exact = np.array(model(tokens)[0])
    for attend in (peer.masked, peer.flash) if gpu and dtype == "bfloat16" else (peer.masked,):
        launch = peer.captured(attend)
        peer.begin(0)
        rows = []
        for position, token in enumerate(tokens[0].tolist()):  # type: ignore[arg-type]
            peer.token.fill_(token)
            launch()
            rows.append(peer.logits[0].float().cpu().numpy())
            assert (peer.token.item(), peer.position.item()) == (rows[-1].argmax(), position + 1)
        error = np.linalg.norm(np.stack(rows) - exact) / np.linalg.norm(exact)
        assert error < ERROR[dtype], attend.__name__


def test_its_speed_is_that_of_the_faster_attention(torch: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    model, config = make("qwen3", "bfloat16", tied=True)
    result = decode(torch, model, config, 300, 8, 2)
    assert sorted(result["attention"]) == ["flash", "masked"]
    assert speed({"torch": result}, "torch") == max(result["attention"].values()) > 0


def test_it_knows_dense_models_alone() -> None:
    known = [name for name, (_, config) in models.SHAPES.items() if fits(config)]
    assert known == ["Qwen 3 4B: head_dim 128", "Qwen 3 32B", "Llama 3.1 8B"]


def result_of(name: str, **sides: float) -> dict[str, Any]:
    result: dict[str, Any] = {"model": name, "batch": 1, "prompt": 1024, "generated": 4, "equal before the first difference": 4}
    for side, tokens in {"first patched": 50.0, **sides}.items():
        turn = [0.2, result["generated"] / tokens]
        result[side] = {"attention": {"flash": tokens}, "seconds": [turn, turn], "host us a step": 90.0, "peak MiB": 100.0}
    return result | {"logits": {"error": {"upstream": 0.01, "patched": 0.01}}, "decoding": {"kernel": "", "reason": ""}}


def test_it_has_a_column_and_a_bar_where_it_was_measured(tmp_path: Path) -> None:
    dense, quantised = "Qwen 3 4B: head_dim 128", "Qwen 3 4B, 4 bit"
    both = [result_of(dense, upstream=100, patched=300), result_of(quantised, upstream=100, patched=400)]
    results: dict[str, Any] = {"provenance": {"device": "NVIDIA H200"}, "cases": both}
    assert PEER not in decoding_table(results, models.SHAPES)
    both[0] = result_of(dense, upstream=100, patched=300, torch=222)
    header, _, *rows = decoding_table(results, models.SHAPES).partition("\n\n")[0].splitlines()
    assert header.startswith(f"| model | MLX | {PEER} | patched |")
    assert [row.split(" | ")[1:4] for row in rows] == [["100", "222", "300"], ["100", "", "400"]]

    pytest.importorskip("matplotlib")
    picture = tmp_path / "decoding.svg"
    draw_decoding(results, models.SHAPES, picture)
    drawn = picture.read_text("utf-8")
    assert PEER in drawn
    assert ">222<" in drawn
    assert drawn.count(">0</text>") == 1  # of the axis
