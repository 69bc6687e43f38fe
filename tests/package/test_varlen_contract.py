"""Packed sequences: what they mean and what is refused; all combinations are in test_random_calls.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda import attention, attention_varlen

from . import references as reference
from .references import assert_close, host, random

Q, K, V = random((11, 4, 8), seed=1), random((14, 2, 8), seed=2), random((14, 2, 16), seed=3)
ENDS_Q, ENDS_K = mx.array([0, 3, 3, 9]), mx.array([0, 5, 7, 13])
MOST: dict[str, Any] = {"max_seqlen_q": 6, "max_seqlen_k": 6}


def test_each_sequence_is_a_call_of_its_own() -> None:
    """Rows 3 to 9 are the third sequence's, its keys 7 to 13; the second has no queries, and the last rows belong to nobody."""
    out, lse = attention_varlen(Q, K, V, ENDS_Q, ENDS_K, mask="causal", return_lse=True, **MOST)
    assert (out.shape, lse.shape, lse.dtype) == ((11, 4, 16), (4, 11), mx.float32)
    for rows, keys in ((slice(0, 3), slice(0, 5)), (slice(3, 9), slice(7, 13))):
        q, k, v = (each.swapaxes(0, 1)[None] for each in (Q[rows], K[keys], V[keys]))
        assert_close(out[rows], reference.attention(host(q), host(k), host(v), mask="causal")[0].swapaxes(0, 1))
        _, alone = attention(q, k, v, mask="causal", return_lse=True)
        assert_close(lse[:, rows], host(alone)[0])
    assert not host(out[9:]).any()
    assert (host(lse[:, 9:]) == -np.inf).all()


def test_room_to_spare_changes_nothing() -> None:
    exact = attention_varlen(Q, K, V, ENDS_Q, ENDS_K, softcap=2.0, **MOST)
    assert_close(attention_varlen(Q, K, V, ENDS_Q, ENDS_K, softcap=2.0, max_seqlen_q=20, max_seqlen_k=30), host(exact))


def test_more_queries_than_keys() -> None:
    """The first ones see nothing, as in attention; a sink is no key."""
    out, lse = attention_varlen(
        Q, K, V, mx.array([0, 11]), mx.array([0, 4]), max_seqlen_q=11, max_seqlen_k=4, mask="causal", sinks=mx.ones(4), return_lse=True
    )
    assert not host(out[:7]).any()
    np.testing.assert_allclose(host(lse[:, :7]), 1.0)
    assert host(out[7:]).all()


@pytest.mark.parametrize("ends", [mx.array([0]), mx.array([0, 0, 0])], ids=str)
def test_nothing_in_the_sequences(ends: mx.array) -> None:
    out, lse = attention_varlen(Q, K, V, ends, ends, return_lse=True, **MOST)
    assert not host(out).any()
    assert (host(lse) == -np.inf).all()
    assert attention_varlen(Q[:0], K, V, ends, ends, **MOST).shape == (0, 4, 16)
    assert not host(attention_varlen(Q, K[:0], V[:0], ends, ends, **MOST)).any()


def test_gradients_stay_in_their_sequence() -> None:
    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out: mx.array = attention_varlen(q, k, v, ENDS_Q, ENDS_K, **MOST)
        return out[3:9].square().sum()

    gradients = mx.grad(loss, argnums=(0, 1, 2))(Q, K, V)
    for gradient, rows in zip(gradients, (slice(3, 9), slice(7, 13), slice(7, 13)), strict=True):
        values = host(gradient)
        assert values[rows].any(axis=(1, 2)).all()
        values[rows] = 0
        assert not values.any()


def test_compiled_for_other_lengths() -> None:
    """The lengths are data: one graph serves all that fit."""
    compiled = mx.compile(lambda q, k, v, ends_q, ends_k: attention_varlen(q, k, v, ends_q, ends_k, mask="causal", **MOST))
    for ends_q, ends_k in ((ENDS_Q, ENDS_K), (mx.array([0, 6, 7, 8]), mx.array([0, 1, 2, 3]))):
        expected = attention_varlen(Q, K, V, ends_q, ends_k, mask="causal", **MOST)
        assert_close(compiled(Q, K, V, ends_q, ends_k), host(expected))


def test_promotion_and_negative_scale() -> None:
    half = attention_varlen(Q.astype(mx.float16), K.astype(mx.float16), V.astype(mx.float16), ENDS_Q, ENDS_K, scale=-0.5, **MOST)
    assert half.dtype == mx.float16
    assert_close(half, host(attention_varlen(-Q, K, V, ENDS_Q, ENDS_K, scale=0.5, **MOST)))
    assert attention_varlen(Q.astype(mx.bfloat16), K, V, ENDS_Q, ENDS_K, **MOST).dtype == mx.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": mx.ones((1, 11, 4, 8))}, r"q must have the 3 dimensions \[total, H, D\], got \(1,11,4,8\)\."),
        ({"k": mx.ones((14, 2, 6))}, r"q and k must have the same last dimension, got \(11,4,8\) and \(14,2,6\)\."),
        ({"v": mx.ones((13, 2, 8))}, r"k and v must agree in length and heads, got \(14,2,8\) and \(13,2,8\)\."),
        ({"q": mx.ones((11, 3, 8))}, r"The heads of q must be a multiple of those of k, got 3 and 2\."),
        ({"cu_seqlens_q": mx.zeros((2, 2), mx.int32)}, r"cu_seqlens_q must have the shape \(sequences \+ 1,\), got \(2,2\)\."),
        ({"cu_seqlens_q": mx.zeros((0,), mx.int32)}, r"cu_seqlens_q must have the shape \(sequences \+ 1,\), got \(0,\)\."),
        ({"cu_seqlens_k": mx.array([0, 3])}, r"cu_seqlens_k must have the shape \(4,\), got \(2,\)\."),
        ({"cu_seqlens_k": mx.ones(4)}, r"cu_seqlens_k must be of a type such as int32, got float32\."),
        ({"max_seqlen_q": -1}, r"max_seqlen_q must be a number, not negative, got -1\."),
        ({"max_seqlen_k": 2.0}, r"max_seqlen_k must be a number, not negative, got 2\.0\."),
        ({"mask": "lower"}, r"mask must be None or 'causal', got 'lower'\."),
        ({"window_size": (1, 2, 3)}, "window_size must be a number of keys or two"),
        ({"softcap": -1.0}, "softcap must be positive and finite"),
        ({"sinks": mx.ones(2)}, r"sinks must have the shape \(4,\), got \(2,\)\."),
        ({"force_fused": True, "stream": mx.cpu}, "force_fused is set, but no fused kernel supports this call: the stream is on the CPU"),
    ],
    ids=str,
)
def test_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, **MOST}
    with pytest.raises(ValueError, match=rf"^\[attention_varlen\] {message}"):
        attention_varlen(**(arguments | changed))


def test_integers_are_no_values() -> None:
    with pytest.raises(ValueError, match="Only floating point types are supported, got int32 and int32 and int32"):
        attention_varlen(Q.astype(mx.int32), K.astype(mx.int32), V.astype(mx.int32), ENDS_Q, ENDS_K, max_seqlen_q=6, max_seqlen_k=6)
    with pytest.raises(TypeError, match=r"^\[attention_varlen\] cu_seqlens_q must be an mlx\.core\.array, got list\.$"):
        attention_varlen(Q, K, V, [0, 3], ENDS_K, **MOST)  # type: ignore[call-overload]
