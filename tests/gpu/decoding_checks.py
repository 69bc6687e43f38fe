"""Models of all formats, and their captured steps against themselves in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map
from mlx_cuda._mlx_lm import caches

from .decoding_model import Experts, KVCache, Model, nn
from .formats import Form
from .support import host, relative_error

PROMPT = 11
TOLERANCE = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 6e-2}  # of logits after a few layers
FOUR = Form("affine", 4, 64)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures have to grow soon."""
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 32)
    monkeypatch.setattr(caches, "HEADROOM", 4)


def make(rng: np.random.Generator, dtype: mx.Dtype, form: Form | None = None, **sizes: Any) -> Model:
    mx.random.seed(int(rng.integers(2**31)))
    model = Model(**sizes)
    model.update(tree_map(lambda w: (w * (1 if w.ndim > 1 else 1 + 0.1 * mx.random.normal(w.shape))).astype(dtype), model.parameters()))
    if form:  # a table of small floats would give bfloat16, whatever the model's dtype is
        kept = () if form.mode == "affine" else nn.Embedding
        quantize(model, class_predicate=lambda _, layer: hasattr(layer, "to_quantized") and not isinstance(layer, kept), **form.options)
    mx.eval(model.parameters())
    return model


def fresh(model: Model, make_cache: Callable[[], Any] = KVCache) -> list[Any]:
    return [make_cache() for _ in model.layers]


def words(rng: np.random.Generator, batch: int, count: int) -> mx.array:
    return mx.array(rng.integers(0, 500, (batch, count)))


def run(model: Model, cache: list[Any], tokens: mx.array, step: Callable[..., mx.array]) -> mx.array:
    """The logits of each token after a prompt.

    Quantized models read it token by token: from 8 rows on, counting one per expert, MLX's own kernel reads beyond weights whose K is one
    or two tiles, as with groups of 128 here (docs/results/upstream-issues.md, `qmm_sm80`).
    """
    piece = 1 if "scales" in model.head else PROMPT
    for at in range(0, PROMPT, piece):
        model(tokens[:, at : at + piece], cache=cache)
    logits = [step(tokens[:, i : i + 1], cache) for i in range(PROMPT, tokens.shape[1])]
    return mx.concatenate(logits, axis=1)


def replayed(model: Model) -> Callable[..., mx.array]:
    return lambda tokens, cache: mlx_cuda.decode_step(model, tokens, cache)


def as_it_is(model: Model) -> Callable[..., mx.array]:
    return lambda tokens, cache: model(tokens, cache=cache)


def wide(model: Model) -> Model:
    """The same with its values in float32."""
    other: Any = copy.deepcopy(model)
    blocks: list[Any] = [other, *other.layers, *(layer.mixture for layer in other.layers if "mixture" in layer)]
    for block in blocks:
        for name, layer in list(block.items()):
            if hasattr(layer, "bits"):
                values = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode)
                like = type(layer).__name__.removeprefix("Quantized")
                plain = getattr(nn, like, Experts)(1, 1)
                plain.weight = values
                plain.pop("bias", None)
                block[name] = plain
    other.update(tree_map(lambda w: w.astype(mx.float32), other.parameters()))
    return other  # type: ignore[no-any-return]


def check(model: Model, tokens: mx.array, dtype: mx.Dtype, make_cache: Callable[[], Any] = KVCache) -> mx.array:
    exact = host(run(wide(model), fresh(model, make_cache), tokens, as_it_is(wide(model))))
    own = run(model, fresh(model, make_cache), tokens, as_it_is(model))
    ours = run(model, fresh(model, make_cache), tokens, replayed(model))
    assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "replay"
    error = relative_error(ours, exact)
    assert error <= TOLERANCE[dtype]
    assert error <= 1.3 * max(relative_error(own, exact), 2**-10)
    return ours
