"""Composed attention: native code that needs no GPU, compiled for MLX's CPU backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda._attention.composed import compose
from mlx_cuda._attention.options import Options

from .compiled import compiles
from .references import host, random

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]


@given(data=st.data())
def test_composed_attention_is_the_same_natively(native: Any, data: st.DataObject) -> None:
    """By one rule for rows that see no key, for rows of large numbers and for what lies where no keys are; gradients too."""
    draw = data.draw
    batch, kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    q_len, k_len, heads = draw(st.integers(1, 5)), draw(st.integers(1, 7)), kv_heads * groups
    q, k, v = (random((batch, *shape), seed=n) for n, shape in enumerate(((heads, q_len, 8), *2 * [(kv_heads, k_len, 8)])))
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    seen = mx.array(chance.random((batch, heads, q_len, k_len)) < 0.6)
    row = mx.array(chance.choice([0.0, 5.0, -2000.0, 3000.0, -1e30, float(np.finfo(np.float32).min)], (batch, heads, q_len, 1)))
    additive = mx.where(seen, row.astype(mx.float32) + random((k_len,), seed=5), draw(st.sampled_from((-mx.inf, -1e9))))
    sides, counts = st.integers(-1, 4), st.none() | st.lists(st.integers(0, k_len), min_size=batch, max_size=batch)
    starts, ends = draw(counts), draw(counts)
    options = Options(
        draw(st.floats(0.1, 2)),
        softcap=draw(st.sampled_from((0.0, 3.0))),
        window=(draw(sides), draw(sides)),
        mask=draw(st.sampled_from((None, seen, additive))),
        sinks=draw(st.sampled_from((None, random((heads,), seed=6)))),
        starts=None if starts is None else mx.array(starts),
        ends=None if ends is None else mx.array(ends),
        lse=True,
    )
    place = np.arange(k_len).reshape(1, 1, -1, 1)
    bounds = [np.reshape(each or [other] * batch, (-1, 1, 1, 1)) for each, other in ((starts, 0), (ends, k_len))]
    k, v = (mx.where(mx.array((place < bounds[0]) | (place >= bounds[1])), float("nan"), each) for each in (k, v))

    def natively(*arrays: mx.array) -> list[mx.array]:
        results: list[mx.array] = native.composed_attention(*arrays, options, mx.default_stream(mx.cpu))
        return results

    def by_python(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return compose(q, k, v, options)

    both = natively, by_python
    for actual, expected in zip(*(call(q, k, v) for call in both), strict=True):
        np.testing.assert_allclose(host(actual), host(expected), rtol=1e-5, atol=1e-5)
    gradients = [mx.grad(lambda *arrays, call=call: call(*arrays)[0].square().sum(), argnums=(0, 1, 2))(q, k, v) for call in both]
    for actual, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(host(actual), host(expected), rtol=1e-4, atol=1e-5)
        assert np.isfinite(host(actual)).all()


ROWS, COLUMNS, COPIED_ROWS, COPIED_COLUMNS = range(4)


@pytest.mark.parametrize(
    ("view", "x", "weights"),
    [
        (lambda a: a, ROWS, ROWS),
        (lambda a: a.reshape(-1, 64)[:, None], ROWS, ROWS),  # the inserted axis has a stride of 1
        (lambda a: mx.expand_dims(a.reshape(-1, 64), -2), ROWS, ROWS),
        (lambda a: a.reshape(-1, 64)[:, None, :32], COPIED_ROWS, COPIED_ROWS),  # rows apart
        (lambda a: a[:, :, :32], COPIED_ROWS, COPIED_ROWS),
        (lambda a: a[::2], COPIED_ROWS, COPIED_ROWS),  # matrices apart
        (lambda a: mx.broadcast_to(a[:1], (4, 16, 64)), COPIED_ROWS, COPIED_ROWS),
        (lambda a: a[::-1], COPIED_ROWS, COPIED_ROWS),
        (lambda a: a.swapaxes(1, 2), COPIED_ROWS, COLUMNS),  # as layers have their weights
        (lambda a: a[::2].swapaxes(1, 2), COPIED_ROWS, COPIED_ROWS),
        (lambda a: a.swapaxes(0, 1), COPIED_ROWS, COPIED_ROWS),
        # A kernel reads 8 elements at once along the axis that is adjacent wherever K, here that of the rows, is a multiple of 8.
        (lambda a: a.reshape(4, 64, 16)[:, :, :10], COPIED_ROWS, COPIED_COLUMNS),
        (lambda a: a.reshape(-1)[:2560].reshape(4, 64, 10), ROWS, COPIED_COLUMNS),
        (lambda a: a.reshape(-1)[:2560].reshape(4, 10, 64), ROWS, ROWS),
        (lambda a: a.reshape(-1)[:2560].reshape(4, 10, 64).swapaxes(1, 2), COPIED_ROWS, COLUMNS),
        (lambda a: a.reshape(-1)[:2560].reshape(4, 64, 10).swapaxes(1, 2), COPIED_ROWS, COPIED_ROWS),  # K of the gradient
        (lambda a: a.reshape(-1)[:396].reshape(4, 9, 11), ROWS, ROWS),
        (lambda a: a.reshape(-1)[:396].reshape(4, 9, 11).swapaxes(1, 2), COPIED_ROWS, COLUMNS),
    ],
)  # fmt: skip
def test_layouts_that_mlx_reads_right(native: Any, view: Callable[[mx.array], mx.array], x: int, weights: int) -> None:
    array = view(mx.zeros((4, 16, 64)))
    mx.eval(array)
    assert (native.layout_for_upstream(array, 0, False), native.layout_for_upstream(array, 0, True)) == (x, weights)
    copied = {ROWS: COPIED_ROWS, COLUMNS: COPIED_ROWS if array.shape[2] % 8 == 0 or array.shape[1] % 8 else COPIED_COLUMNS}
    for past in 2, 4, 16:  # it reads up to 32 bytes at once
        assert native.layout_for_upstream(array, past, False) == COPIED_ROWS
        assert native.layout_for_upstream(array, past, True) == copied.get(weights, weights)
