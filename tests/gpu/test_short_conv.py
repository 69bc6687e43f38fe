from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._recurrence import short_conv

from . import reference
from .reference import Array
from .support import GRADIENT_TOLERANCE, TOLERANCE, assert_close, host, normal, primitives

pytestmark = pytest.mark.gpu

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
SHAPES = {  # batch, tokens, channels, taps
    "one token": (3, 1, 96, 4),
    "one token, many taps": (2, 1, 94, 8),
    "two tokens": (1, 2, 1032, 4),
    "a tile": (2, 8, 96, 4),
    "a tile and one more": (2, 9, 96, 3),
    "a prompt": (1, 1003, 2056, 4),
    "few channels": (3, 4099, 8, 3),
}


def exact(x: mx.array, weight: mx.array, **options: Any) -> tuple[Array, Array]:
    given: dict[str, Any] = {name: host(each) if isinstance(each, mx.array) else each for name, each in options.items()}
    return reference.short_conv(host(x), host(weight), **given)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """x, weight, bias and state."""
    batch, tokens, channels, taps = shape
    return [normal(rng, of, dtype) for of in ((batch, tokens, channels), (channels, taps), (channels,), (batch, taps - 1, channels))]


@halves
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matches_float64(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    x, weight, bias, state = draw(rng, shape, dtype)
    some: tuple[dict[str, Any], ...] = ({}, {"bias": bias}, {"state": state, "activation": "silu"}, {"bias": bias, "state": state})
    for options in some:
        y, last = mlx_cuda.short_conv(x, weight, **options)
        assert "ShortConvolution" in primitives(y)
        expected = exact(x, weight, **options)
        assert_close(y, expected[0], tolerance=TOLERANCE[dtype], about=options.keys())
        assert np.array_equal(host(last), expected[1])


@halves
def test_any_split_of_a_sequence_gives_the_same(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    x, weight, bias, state = draw(rng, (2, 150, 96, 4), dtype)
    whole = mlx_cuda.short_conv(x, weight, bias=bias, state=state, activation="silu")
    for cuts in (1,), (2, 3, 70), (8, 149):
        parts, kept = [], state
        for piece in mx.split(x, list(cuts), axis=1):
            y, kept = mlx_cuda.short_conv(piece, weight, bias=bias, state=kept, activation="silu")
            parts.append(y)
        assert mx.array_equal(mx.concatenate(parts, axis=1), whole[0])
        assert mx.array_equal(kept, whole[1])


@halves
@pytest.mark.parametrize("tokens", [1, 70])
def test_strided_inputs(rng: np.random.Generator, dtype: mx.Dtype, tokens: int) -> None:
    x, weight, bias, state = draw(rng, (2, tokens, 96, 4), dtype)
    expected = exact(x, weight, bias=bias, state=state)[0]
    wide, tall = mx.concatenate([x, x * 0 + mx.nan], axis=2), mx.concatenate([x * 0 + mx.nan, x], axis=1)
    transposed = mx.contiguous(x.swapaxes(0, 2)).swapaxes(0, 2)
    odd = mx.concatenate([x[..., :1] * 0, x], axis=2)  # rows that lie on 2 bytes
    rows = mx.concatenate([state[:, :1] * 0 + mx.nan, state], axis=1)
    for own in wide[..., :96], tall[:, tokens:], transposed, odd[..., 1:]:
        for kept in state, rows[:, 1:]:
            y = mlx_cuda.short_conv(own, mx.contiguous(weight.T).T, bias=mx.repeat(bias, 2)[::2], state=kept)[0]
            assert_close(y, expected, tolerance=TOLERANCE[dtype])


@halves
def test_rows_before_the_taps_are_not_read(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    x, weight, *_ = draw(rng, (1, 80, 96, 3), dtype)
    poisoned = mx.where(mx.arange(80)[None, :, None] == 20, mx.nan, x)
    got, expected = (mlx_cuda.short_conv(each, weight, activation="silu")[0] for each in (poisoned, x))
    assert mx.isnan(got[:, 20:23]).all().item()
    assert mx.array_equal(got[:, :20], expected[:, :20])
    assert mx.array_equal(got[:, 23:], expected[:, 23:])


@halves
def test_gradients(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    arrays = draw(rng, (2, 30, 96, 4), dtype)
    cotangents = [normal(rng, (2, 30, 96), dtype), normal(rng, (2, 3, 96), dtype)]

    def both(x: mx.array, weight: mx.array, bias: mx.array, state: mx.array) -> list[mx.array]:
        return list(mlx_cuda.short_conv(x, weight, bias=bias, state=state, activation="silu"))

    got = mx.vjp(both, arrays, cotangents)[1]
    with mx.stream(mx.cpu):
        exactly = mx.vjp(both, [each.astype(mx.float32) for each in arrays], [each.astype(mx.float32) for each in cotangents])[1]
        mx.eval(exactly)
    for mine, other in zip(got, exactly, strict=True):
        assert_close(mine, host(other), tolerance=GRADIENT_TOLERANCE[dtype])


@halves
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_layers_of_mlx(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, dtype: mx.Dtype, tokens: int) -> None:
    monkeypatch.setattr(short_conv, "FEWEST_NUMBERS", 1)
    layer = nn.Conv1d(96, 96, 4, groups=96, bias=True)
    layer.set_dtype(dtype)
    x = normal(rng, (2, tokens + 3, 96), dtype)
    expected = exact(x[:, 3:], layer.weight[..., 0], bias=layer.bias, state=x[:, :3])[0]
    with mlx_cuda.patch():
        y = layer(x)
    assert ("ShortConvolution" in primitives(y)) == (tokens > 1)
    assert_close(y, expected, tolerance=2 * TOLERANCE[dtype])  # rounded before the bias, too


@halves
def test_vmap(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    x, weight, *_ = draw(rng, (2, 9, 96, 4), dtype)
    many = mx.stack([x, 2 * x, -x])
    got = mx.vmap(lambda each: mlx_cuda.short_conv(each, weight)[0])(many)
    assert_close(got, np.stack([exact(each, weight)[0] for each in many]), tolerance=2 * TOLERANCE[dtype])


def test_compiled_without_shapes_it_is_mlx_s(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(short_conv, "FEWEST_NUMBERS", 1)
    weight = normal(rng, (96, 4, 1), mx.bfloat16)
    with mlx_cuda.patch():
        layer = mx.compile(lambda x: mx.conv1d(x, weight, groups=96), shapeless=True)
        for tokens in 9, 30:
            x = normal(rng, (2, tokens + 3, 96), mx.bfloat16)
            expected = exact(x[:, 3:], weight[..., 0], state=x[:, :3])[0]
            y = layer(x)
            assert "ShortConvolution" not in primitives(y)  # which was chosen for a size
            assert_close(y, expected, tolerance=TOLERANCE[mx.bfloat16])


def test_a_graph_that_was_made_for_one_token(rng: np.random.Generator) -> None:
    weight = normal(rng, (94, 4), mx.bfloat16)
    call = mx.compile(lambda x: mlx_cuda.short_conv(x, weight)[0], shapeless=True)
    one, many = (normal(rng, (2, tokens, 94), mx.bfloat16) for tokens in (1, 16))
    assert_close(call(one), exact(one, weight)[0], tolerance=2 * TOLERANCE[mx.bfloat16])
    with pytest.warns(RuntimeWarning, match="No kernel takes so many tokens"):
        assert_close(call(many), exact(many, weight)[0], tolerance=2 * TOLERANCE[mx.bfloat16])
