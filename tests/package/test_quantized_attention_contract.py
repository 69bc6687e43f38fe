from __future__ import annotations

import types
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.rules import AttentionCase, choose_quantized_attention
from mlx_cuda._matmul.formats import Format
from mlx_cuda._mlx_lm.caches import Quantized, kind_of
from mlx_cuda._mlx_lm.stand_ins import QuantizedStandIn
from mlx_cuda._replay.capture import Capture
from mlx_cuda._replay.kinds import Place

from . import references
from .environments import put_module
from .references import assert_close, host, random

Parts = tuple[mx.array, ...]
attend: Any = mlx_cuda.quantized_attention  # overloads do not let options through
FORMS = [("affine", 64, 4), ("affine", 32, 8), ("affine", 64, 2), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


def packed(shape: tuple[int, ...], form: tuple[str, int, int], *, seed: int, dtype: mx.Dtype = mx.float32) -> tuple[Parts, mx.array]:
    mode, group, bits = form
    parts = tuple(mx.quantize(random(shape, dtype, seed=seed), group_size=group, bits=bits, mode=mode))
    biases = parts[2] if len(parts) > 2 else None
    return parts, mx.dequantize(parts[0], parts[1], biases, group_size=group, bits=bits, mode=mode, dtype=dtype)


def asked(form: tuple[str, int, int]) -> dict[str, Any]:
    return dict(zip(("mode", "group_size", "bits"), form, strict=True))


@forms
def test_matches_float64(form: tuple[str, int, int]) -> None:
    q = random((2, 4, 3, 64))
    (k, k_values), (v, v_values) = (packed((2, 2, 10, 64), form, seed=seed) for seed in (1, 2))
    out, lse = attend(q, k, v, mask="causal", return_lse=True, **asked(form))
    seen = np.broadcast_to(references.seen(3, 10, window=(-1, 0), starts=None, ends=None), (2, 4, 3, 10))
    assert_close(out, references.attention(host(q), host(k_values), host(v_values), mask=seen), slack=2)
    assert_close(lse, host(mlx_cuda.attention(q, k_values, v_values, mask="causal", return_lse=True)[1]))
    assert_close(attend(q, list(k), list(v), mask="causal", **asked(form)), host(out))


def test_options_are_those_of_attention() -> None:
    form = ("affine", 64, 4)
    q = random((2, 4, 2, 64))
    (k, k_values), (v, v_values) = (packed((2, 2, 9, 64), form, seed=seed) for seed in (1, 2))
    options: dict[str, Any] = {
        "scale": 0.2, "window_size": 4, "softcap": 3.0, "sinks": random((4,)), "lengths": mx.array([9, 4]),
        "left_padding": mx.array([1, 0]),
    }  # fmt: skip
    for name, value in options.items():
        wanted: Any = mlx_cuda.attention
        assert_close(attend(q, k, v, **{name: value}), host(wanted(q, k_values, v_values, **{name: value})))


def test_pages() -> None:
    form = ("affine", 64, 8)
    q, table, lengths = random((2, 4, 2, 64)), mx.array([[3, 0], [1, 2]]), mx.array([7, 5])
    (k, k_values), (v, v_values) = (packed((4, 2, 4, 64), form, seed=seed) for seed in (1, 2))
    out = attend(q, k, v, block_table=table, lengths=lengths, **asked(form))
    assert_close(out, host(mlx_cuda.paged_attention(q, k_values, v_values, table, lengths)))


def test_gradients_reach_the_queries() -> None:
    q = random((1, 2, 2, 64))
    (k, k_values), (v, v_values) = (packed((1, 2, 5, 64), ("affine", 64, 4), seed=seed) for seed in (1, 2))
    gradient = mx.grad(lambda q: attend(q, k, v, bits=4).sum())(q)
    assert_close(gradient, host(mx.grad(lambda q: mlx_cuda.attention(q, k_values, v_values).sum())(q)))


def test_bad_input() -> None:
    q = random((2, 4, 1, 64))
    (k, _), (v, _) = (packed((2, 2, 5, 64), ("affine", 64, 4), seed=seed) for seed in (1, 2))
    with pytest.raises(TypeError, match=r"\[quantized_attention\] k must be a tuple \(packed, scales, biases\), got array"):
        attend(q, k[0], v)
    with pytest.raises(TypeError, match=r"\[quantized_attention\] scales must be an mlx.core.array, got int"):
        attend(q, (k[0], 1, k[2]), v)
    with pytest.raises(ValueError, match=r"\[quantized_attention\] Mode 'affine' needs biases"):
        attend(q, k[:2], v)
    with pytest.raises(ValueError, match=r"\[quantized_attention\] w and scales do not belong together"):
        attend(q, k, v, bits=8)
    with pytest.raises(ValueError, match=r"\[quantized_attention\] q and k must have the same last dimension"):
        attend(random((2, 4, 1, 32)), k, v)
    with pytest.raises(ValueError, match=r"\[quantized_attention\] mask must be None, 'causal' or an array, got 'full'"):
        attend(q, k, v, mask="full")
    with pytest.raises(ValueError, match=r"\[quantized_attention\] With block_table there have to be lengths"):
        attend(q, k, v, block_table=mx.array([[0], [1]]))
    with pytest.raises(ValueError, match=r"\[quantized_attention\] block_table must be \[B, n\]"):
        attend(q, k, v, block_table=mx.array([0, 1]), lengths=mx.array([1, 1]))


CASE = AttentionCase(8, 32, 8, 1, 8192, 128, 128, "bfloat16", "none", (9, 0), (9, 19))
AFFINE = Format(64, 4, "affine")


def test_who_computes_a_call() -> None:
    def engine(case: AttentionCase = CASE, form: Format = AFFINE, *, page: int = 0, same: bool = True) -> str:
        return choose_quantized_attention(case, form, page_size=page, same_dtype=same).engine

    assert engine() == engine(form=Format(32, 8, "mxfp8")) == engine(CASE._replace(dtype="float16")) == engine(page=48) == "decode"
    assert engine(CASE._replace(q_len=16)) == engine(CASE._replace(head_dim=192)) == engine(CASE._replace(capability=(8, 0))) == "decode"
    for other in (
        {"q_len": 17}, {"dtype": "float32"}, {"head_dim": 80}, {"v_head_dim": 288}, {"capability": (7, 5)}, {"k_len": 0}, {"batch": 2**16},
    ):  # fmt: skip
        assert engine(CASE._replace(**other)) == "fallback", other
    assert engine(form=Format(64, 2, "affine")) == engine(page=24) == engine(same=False) == "fallback"
    assert engine(CASE._replace(dtype="float16"), Format(16, 4, "nvfp4")) == "fallback"


@pytest.fixture
def their_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    theirs = {"quantized_scaled_dot_product_attention": lambda *arrays, **options: ("theirs", *arrays, options)}
    return put_module(monkeypatch, "mlx_lm.models.base", **theirs)


def test_mlx_lm_s_function_is_replaced_and_comes_back(their_module: Any) -> None:
    from mlx_cuda._mlx_lm import places as mlx_lm

    theirs = their_module.quantized_scaled_dot_product_attention
    mlx_lm.put()
    ours = their_module.quantized_scaled_dot_product_attention
    q = random((1, 4, 1, 64))
    (k, k_values), (v, v_values) = (packed((1, 2, 5, 64), ("affine", 64, 4), seed=seed) for seed in (1, 2))
    out = ours(q, k, v, scale=0.1, mask=None, group_size=64, bits=4)
    assert_close(out, host(mlx_cuda.attention(q, k_values, v_values, scale=0.1)))
    assert ours(q, k, v, 0.1, None, 64, 8)[0] == "theirs"  # mlx-lm says what is wrong with the arguments
    mlx_lm.take_away()
    assert their_module.quantized_scaled_dot_product_attention is theirs


class QuantizedKVCache:
    """As mlx-lm's, as far as it matters here."""

    def __init__(self, keys: Parts | None = None, values: Parts | None = None, offset: int = 0) -> None:
        self.keys, self.values, self.offset, self.group_size, self.bits = keys, values, offset, 64, 4


QuantizedKVCache.__module__ = "mlx_lm.models.cache"


def test_a_quantised_cache_in_a_step() -> None:
    assert Quantized.arrays(QuantizedKVCache()) == [None]
    (k, _), (v, _) = (packed((1, 2, 5, 64), ("affine", 64, 4), seed=seed, dtype=mx.bfloat16) for seed in (1, 2))
    cache = QuantizedKVCache(k, v, 4)
    assert kind_of(cache) is Quantized
    assert Quantized.next(cache, 8) == Place(4, 4, 5)
    arrays = Quantized.arrays(cache)
    assert [id(each) for each in arrays] == [id(each) for each in (*k, *v)]
    assert [Quantized.content(cache, each) for each in arrays] == [(each, 4) for each in arrays]
    memory = [Quantized.memory(each, 8) for each in arrays]
    assert [(each.shape[2], each.dtype) for each in memory] == [(8, each.dtype) for each in arrays]
    Quantized.give(cache, memory)
    assert cache.keys == tuple(memory[:3])
    assert cache.values == tuple(memory[3:])


@pytest.mark.parametrize("bits", [2, 4])
def test_what_a_model_appends_to_a_quantised_cache(bits: int) -> None:
    calls: list[tuple[str, Any]] = []

    def append(k: mx.array, v: mx.array, to_k: mx.array, to_v: mx.array, _: int) -> tuple[mx.array, mx.array]:
        calls.append(("append", (k.dtype, v.shape)))
        return to_k, to_v

    def append_quantized(_: mx.array, v: mx.array, memory: list[mx.array], group: int, bits: int, __: int) -> list[mx.array]:
        calls.append(("append_quantized", (v.shape, group, bits)))
        return list(memory)

    step = types.SimpleNamespace(append=append, append_quantized=append_quantized, offset=lambda _: mx.array(4))
    memory = [each for seed in (1, 2) for each in packed((1, 2, 8, 64), ("affine", 64, bits), seed=seed)[0]]
    stand_in = QuantizedStandIn(Capture(step), list(memory), 0, (64, bits))
    row = random((1, 2, 1, 64))
    keys, values = stand_in.update_and_fetch(row, row)
    assert [id(each) for each in (*keys, *values)] == [id(each) for each in memory]
    assert stand_in.capture.places[id(keys[0])][1] == 0
    if bits == 4:
        assert calls == [("append_quantized", ((1, 2, 1, 64), 64, 4))]
    else:
        assert calls == [("append", (dtype, (1, 2, 1, size))) for dtype, size in ((mx.uint32, 4), (mx.float32, 1), (mx.float32, 1))]
    with pytest.raises(Exception, match=r"keys or values of shape \(1, 2, 1, 32\) go to a cache"):
        stand_in.update_and_fetch(row[..., :32], row)
