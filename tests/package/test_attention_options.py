"""Windows, softcap, sinks and ragged batches: what they mean, against float64, on any machine."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda import attention, explain
from mlx_cuda._common.choice import Choice

from . import references as reference
from .references import DTYPES, assert_close, host, hosts, random


def inputs(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, dim: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim), (batch, kv_heads, k_len, dim)
    return [random(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_all_options_together(dtype: mx.Dtype, data: st.DataObject) -> None:
    draw = data.draw
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, k_len = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    q, k, v = inputs(batch, kv_heads * groups, kv_heads, q_len, k_len, 16, dtype)
    sides = st.one_of(st.none(), st.integers(0, 8))
    window = draw(st.one_of(st.none(), st.integers(0, 8), st.tuples(sides, sides)))
    softcap = draw(st.sampled_from((None, 0.5, 30.0)))
    sinks = random((kv_heads * groups,), dtype, seed=7) if draw(st.booleans()) else None
    bounds = st.none() | st.lists(st.integers(0, k_len), min_size=batch, max_size=batch)
    lengths, padding = draw(bounds), draw(bounds)
    mask = draw(st.sampled_from((None, "causal", "bool", "additive")))

    left, right = window if isinstance(window, tuple) else (window, None)
    sides64 = (-1 if left is None else left, 0 if mask == "causal" else -1 if right is None else right)
    starts, ends = (None if values is None else np.array(values) for values in (padding, lengths))
    seen = np.broadcast_to(reference.seen(q_len, k_len, window=sides64, starts=starts, ends=ends), (batch, kv_heads * groups, q_len, k_len))
    mask64: Any = seen
    given_mask: Any = mask
    chosen = np.random.default_rng(3).random((1, kv_heads * groups, 1, k_len)) < 0.7
    if mask == "bool":
        given_mask, mask64 = mx.array(chosen), seen & chosen
    if mask == "additive":
        given_mask = mx.where(mx.array(chosen), random(chosen.shape, dtype, seed=9), -mx.inf).astype(dtype)
        mask64 = np.where(seen, host(given_mask), -np.inf)
    result, lse = attention(
        q,
        k,
        v,
        return_lse=True,
        mask=given_mask,
        window_size=window,
        softcap=softcap,
        sinks=sinks,
        lengths=None if lengths is None else mx.array(lengths, mx.int32),
        left_padding=None if padding is None else mx.array(padding, mx.int32),
    )
    expected = reference.attention(*hosts([q, k, v]), mask=mask64, softcap=softcap or 0.0, sinks=None if sinks is None else host(sinks))
    assert result.dtype == dtype
    assert_close(result, expected, slack=2)
    assert (lse.dtype, lse.shape) == (mx.float32, q.shape[:3])
    assert ((host(lse) == -np.inf) == (~sees_some(mask64) & (sinks is None))).all()


def sees_some(mask: Any) -> Any:
    """Which rows of a bool or additive mask show a key."""
    return mask.any(axis=-1) if mask.dtype == np.bool_ else (mask > -np.inf).any(axis=-1)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": -0.7}], ids=str)
def test_parts_join_by_their_logarithms(options: dict[str, Any]) -> None:
    """Each half of the keys for itself, weighed by its share: also where the second hides all of them from some queries."""
    q, k, v = inputs(2, 4, 2, 5, 8, 16)
    hidden = mx.arange(3).reshape(1, 1, 1, 3) < mx.array([0, 3, 1, 0, 2]).reshape(1, 1, 5, 1)
    mask = mx.concatenate([mx.ones((1, 1, 5, 5), mx.bool_), hidden], axis=-1)
    whole, lse = attention(q, k, v, mask=mask, return_lse=True, **options)
    first, second = (
        attention(q, k[:, :, part], v[:, :, part], mask=mask[..., part], return_lse=True, **options) for part in (slice(5), slice(5, 8))
    )
    assert_close(mx.logaddexp(first[1], second[1]), host(lse))
    joined, other = (mx.exp(part[1] - lse)[..., None] * part[0] for part in (first, second))
    assert_close(joined + other, host(whole), slack=2)


def test_logarithms_of_no_keys() -> None:
    q, k, v = inputs(1, 2, 1, 3, 0, 8)
    out, lse = attention(q, k, v, return_lse=True)
    assert not host(out).any()
    assert (host(lse) == -np.inf).all()
    _, lse = attention(q, k, v, sinks=mx.array([1.0, -2.0]), return_lse=True)
    np.testing.assert_array_equal(host(lse)[0], [[1.0] * 3, [-2.0] * 3])
    _, lse = attention(*inputs(0, 2, 1, 3, 4, 8), return_lse=True)
    assert lse.shape == (0, 2, 3)
    q, k, v = inputs(1, 2, 1, 3, 4, 8)
    out, lse = attention(q, k, v[..., :0], return_lse=True)
    assert out.shape == (1, 2, 3, 0)
    assert_close(lse, host(attention(q, k, v, return_lse=True)[1]))


def test_gradients_through_the_logarithms_are_the_weights() -> None:
    q, k, v = inputs(1, 1, 1, 2, 3, 8)
    gradient = mx.grad(lambda k: attention(q, k, v, scale=1.0, return_lse=True)[1].sum())(k)
    weights = mx.softmax(q @ k.swapaxes(2, 3), axis=-1)
    assert_close(gradient, host(weights.swapaxes(2, 3) @ q))


def test_what_lies_beyond_the_lengths_may_be_anything() -> None:
    q, k, v = inputs(2, 4, 2, 3, 6, 8)
    lengths, padding = mx.array([4, 0]), mx.array([1, 0])
    place = mx.arange(6).reshape(1, 1, -1, 1)
    there = (place >= padding.reshape(-1, 1, 1, 1)) & (place < lengths.reshape(-1, 1, 1, 1))
    expected = attention(q, k, v, lengths=lengths, left_padding=padding)
    k, v = (mx.where(there, each, float("nan")) for each in (k, v))

    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, lengths=lengths, left_padding=padding).square().sum()

    assert_close(attention(q, k, v, lengths=lengths, left_padding=padding), host(expected))
    assert all(np.isfinite(host(gradient)).all() for gradient in mx.grad(loss, argnums=(0, 1, 2))(q, k, v))


def test_deterministic_changes_no_result() -> None:
    q, k, v = inputs(1, 4, 2, 5, 8, 16)
    assert mx.array_equal(attention(q, k, v, deterministic=True), attention(q, k, v))


def test_a_query_before_the_first_key_sees_only_what_its_window_reaches() -> None:
    """Five queries, of whose places three lie before the first of two keys: a window of as many keys is not one of all."""
    q, k, v = inputs(1, 2, 1, 5, 2, 8)
    result = attention(q, k, v, window_size=(2, 2))
    seen = reference.seen(5, 2, window=(2, 2))
    assert not seen[0, 0, 0].any()
    assert_close(result, reference.attention(*hosts([q, k, v]), mask=np.broadcast_to(seen, (1, 2, 5, 2))))


@pytest.mark.parametrize("after", [2**30, 2**31 - 1, 2**31, 2**70])
def test_a_window_of_more_keys_than_there_can_be_is_one_of_all(after: int) -> None:
    """A place and so many keys after it are no int32."""
    q, k, v = inputs(1, 2, 1, 4, 9, 8)
    assert mx.array_equal(attention(q, k, v, window_size=(None, after)), attention(q, k, v))
    assert mx.array_equal(attention(q, k, v, window_size=(2, after)), attention(q, k, v, window_size=(2, 100)))


def test_no_query_sees_a_key() -> None:
    """Results and gradients are 0, never NaN; with a sink too, which has no value."""
    q, k, v = inputs(2, 2, 1, 3, 5, 8)
    cases: tuple[dict[str, Any], ...] = ({}, {"softcap": 2.0}, {"sinks": mx.ones(2)})
    for options in cases:

        def loss(q: mx.array, k: mx.array, v: mx.array, options: dict[str, Any] = options) -> mx.array:
            out: mx.array = attention(q, k, v, lengths=mx.array([0, 0]), **options)
            return out.sum()

        value, gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
        for each in (value, *gradients):
            np.testing.assert_array_equal(host(each), np.zeros(each.shape))


def test_gradients_reach_the_sinks() -> None:
    q, k, v = inputs(1, 2, 2, 4, 6, 8)
    sinks = mx.array([0.3, -0.2])

    def loss(sinks: mx.array) -> mx.array:
        return (attention(q, k, v, sinks=sinks, softcap=3.0) ** 2).sum()

    gradient, step = host(mx.grad(loss)(sinks)), 1e-2
    for head in range(2):
        shift = mx.array([step * (index == head) for index in range(2)])
        difference = (loss(sinks + shift).item() - loss(sinks - shift).item()) / (2 * step)
        assert gradient[head] == pytest.approx(difference, rel=2e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": -1}, "window_size must be a number of keys or two, not negative, got -1"),
        ({"window_size": (3, -2)}, "window_size"),
        ({"window_size": 1.5}, "window_size"),
        ({"window_size": True}, "window_size"),
        ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        ({"softcap": float("inf")}, "softcap"),
        ({"sinks": mx.ones(3)}, r"sinks must have the shape \(4,\), got \(3,\)"),
        ({"sinks": mx.ones(4, mx.int32)}, "sinks must be of a type such as float32, got int32"),
        ({"lengths": mx.ones(2)}, "lengths must be of a type such as int32, got float32"),
        ({"lengths": mx.ones(1, mx.int32)}, "lengths must have the shape"),
        ({"left_padding": mx.ones((2, 1), mx.int32)}, "left_padding must have the shape"),
        ({"mask": "lower"}, "mask must be None, 'causal' or an array, got 'lower'"),
    ],
    ids=str,
)
def test_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    q, k, v = inputs(2, 4, 2, 3, 5, 8)
    with pytest.raises(ValueError, match=rf"^\[attention\] {message}"):
        attention(q, k, v, **options)
    with pytest.raises(ValueError, match=message):
        explain(q, k, v, **options)


def test_arrays_that_are_none() -> None:
    q, k, v = inputs(2, 4, 2, 3, 5, 8)
    with pytest.raises(TypeError, match=r"\[attention\] lengths must be an mlx.core.array, got list"):
        attention(q, k, v, lengths=[1, 2])  # type: ignore[call-overload]


def test_explain_says_why() -> None:
    q, k, v = inputs(1, 4, 2, 3, 5, 8)
    plain = explain(q, k, v, mask="causal", stream=mx.cpu)
    assert (plain.engine, plain.reason) == ("mlx", "the stream is on the CPU")
    assert explain(q, k, v, softcap=2.0, stream=mx.cpu).engine == "fallback"


def test_force_fused_names_the_reason() -> None:
    q, k, v = inputs(1, 4, 2, 3, 5, 8)
    with pytest.raises(ValueError, match="no fused kernel supports this call: the stream is on the CPU"):
        attention(q, k, v, softcap=2.0, force_fused=True, stream=mx.cpu)


# ---------------------------------------------------------------------------------------------------------------------------- patch
def test_patches_within_patches() -> None:
    upstream, (q, k, v) = mx.fast.scaled_dot_product_attention, inputs(1, 4, 2, 3, 5, 8)
    expected = attention(q, k, v, mask="causal")
    with mlx_cuda.patch():
        ours = mx.fast.scaled_dot_product_attention
        assert mx.allclose(attention(q, k, v, mask="causal"), expected)
        with mlx_cuda.patch(), pytest.raises(KeyError), mlx_cuda.patch():
            raise KeyError
        assert mx.fast.scaled_dot_product_attention is ours
    assert mx.fast.scaled_dot_product_attention is upstream
    mlx_cuda.patch()
    with mlx_cuda.patch():
        mlx_cuda.unpatch()
        assert mx.fast.scaled_dot_product_attention is upstream
    assert mx.fast.scaled_dot_product_attention is ours  # as before the block
    mlx_cuda.unpatch()


@pytest.mark.usefixtures("forgetful")
def test_wrappers_follow_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's wrapper, by which its models import it, calls MLX's function by its full name each time, with sinks."""

    def wrapper(queries: mx.array, keys: mx.array, values: mx.array, mask: Any = None, sinks: mx.array | None = None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask, sinks=sinks)

    q, k, v = inputs(1, 4, 2, 3, 5, 8)
    seen: list[Any] = []

    def choose(*arguments: Any) -> Choice:
        seen.append(arguments[3])
        return Choice("mlx", "")

    monkeypatch.setattr("mlx_cuda._attention.attention.choose", choose)
    calls: list[dict[str, Any]] = [{"mask": "causal"}, {"mask": mx.ones((3, 5), mx.bool_)}, {"sinks": mx.ones(4)}]
    for options in calls:
        expected = wrapper(q, k, v, **options)
        with mlx_cuda.patch():
            assert_close(wrapper(q, k, v, **options), host(expected))
    assert [(options.mask_kind, options.sinks is not None) for options in seen] == [("causal", False), ("bool", False), ("none", True)]
    wrapper(q, k, v)
    assert len(seen) == 3


def test_patched_calls_fail_as_they_did() -> None:
    q, k, v = inputs(1, 4, 2, 3, 5, 8)
    wrong: tuple[dict[str, Any], ...] = ({"scale": 1.0, "mask": "lower"}, {"scale": 1.0, "sinks": mx.ones(3)})
    for arguments in wrong:
        with pytest.raises(Exception) as before:  # noqa: PT011  (whatever MLX says)
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, **arguments))
        with mlx_cuda.patch(), pytest.raises(type(before.value)) as after:
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, **arguments))
        assert str(after.value) == str(before.value)
