from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import short_conv
from mlx_cuda._loader import native
from mlx_cuda._recurrence import short_conv as our_short_conv
from mlx_cuda._recurrence.short_conv import LARGEST_BATCH, MOST_CHANNELS, depthwise

from ..gpu import reference
from .references import DTYPES, assert_close, gradients, host, random

KERNELS: Any = SimpleNamespace(short_conv=None)  # which nothing here calls


def draw(dtype: mx.Dtype = mx.float32, tokens: int = 9, taps: int = 4, channels: int = 6) -> tuple[mx.array, ...]:
    """x, weight, bias and state."""
    shapes = ((2, tokens, channels), (channels, taps), (channels,), (2, taps - 1, channels))
    x, weight, bias, state = (random(shape, dtype, seed=seed) for seed, shape in enumerate(shapes))
    return x, weight, bias, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "taps"), [(9, 4), (1, 4), (2, 8), (5, 2), (3, 1), (0, 4)])
def test_matches_float64(dtype: mx.Dtype, tokens: int, taps: int) -> None:
    x, weight, bias, state = draw(dtype, tokens, taps)
    some: tuple[tuple[dict[str, Any], Any], ...] = (({}, None), ({"bias": bias}, None), ({"state": state}, None))
    for arrays, activation in (*some, ({"bias": bias, "state": state}, "silu")):
        y, last = short_conv(x, weight, activation=activation, **arrays)
        exact = {name: host(each) for name, each in arrays.items()}
        expected = reference.short_conv(host(x), host(weight), activation=activation, **exact)
        assert y.dtype == last.dtype == dtype
        assert_close(y, expected[0])
        assert_close(last, expected[1])


@pytest.mark.parametrize("cuts", [(1, 1), (3, 8), (8,), (2, 5, 6)])
def test_any_split_of_a_sequence_gives_the_same(cuts: tuple[int, ...]) -> None:
    x, weight, bias, state = draw()
    whole, last = short_conv(x, weight, bias=bias, state=state, activation="silu")
    parts = []
    for piece in mx.split(x, list(cuts), axis=1):
        y, state = short_conv(piece, weight, bias=bias, state=state, activation="silu")
        parts.append(y)
    assert_close(mx.concatenate(parts, axis=1), host(whole))
    assert_close(state, host(last))


def test_weights_of_a_layer() -> None:
    x, weight, *_ = draw()
    assert_close(short_conv(x, weight[:, :, None])[0], host(short_conv(x, weight)[0]))


def test_promotion() -> None:
    x, weight, bias, state = draw(mx.float16)
    assert [each.dtype for each in short_conv(x, weight.astype(mx.float32), bias=bias, state=state)] == [mx.float32] * 2
    assert short_conv(mx.ones((1, 2, 3), mx.int32), mx.ones((3, 2), mx.int32))[0].dtype == mx.float32


def test_vjp() -> None:
    arrays = draw()

    def both(x: mx.array, weight: mx.array, bias: mx.array, state: mx.array) -> mx.array:
        return mx.concatenate([*short_conv(x, weight, bias=bias, state=state, activation="silu")], axis=1)

    def plain(x: mx.array, weight: mx.array, bias: mx.array, state: mx.array) -> mx.array:
        rows = mx.concatenate([state, x], axis=1)
        y = sum((rows[:, k : k + 9] * weight[:, k] for k in range(4)), bias)
        return mx.concatenate([y * mx.sigmoid(y), rows[:, -3:]], axis=1)

    cotangent = random((2, 12, 6), seed=9)
    for got, expected in zip(mx.vjp(both, list(arrays), [cotangent])[1], gradients(plain, list(arrays), cotangent), strict=True):
        assert_close(got, expected)


def test_errors() -> None:
    x, weight, bias, state = draw()
    for arguments, options, message in (
        ((x, weight[:5]), {}, r"x must be \[B, T, C\] and weight \[C, K\] or \[C, K, 1\], got \(2,9,6\) and \(5,4\)"),
        ((x[0], weight), {}, r"x must be \[B, T, C\] and weight .*, got \(9,6\) and \(6,4\)"),
        ((x, weight[:, :0]), {}, r"x must be .*, got \(2,9,6\) and \(6,0\)"),
        ((x, weight), {"bias": bias[:5]}, r"bias must have the shape \(6,\), got \(5,\)"),
        ((x, weight), {"state": state[:, :2]}, r"state must have the shape \(2,3,6\), got \(2,2,6\)"),
        ((x, weight), {"activation": "relu"}, r"activation must be 'silu' or None, got 'relu'"),
        ((x.astype(mx.complex64), weight), {}, r"Only real types are supported, got complex64 and float32"),
    ):
        with pytest.raises(ValueError, match=rf"^\[short_conv\] {message}\.$"):
            short_conv(*arguments, **options)
    with pytest.raises(TypeError, match=r"^\[short_conv\] state must be an mlx\.core\.array, got ndarray\.$"):
        short_conv(x, weight, state=np.ones((2, 3, 6)))  # type: ignore[arg-type]


def test_who_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(capability: tuple[int, int] = (9, 0), dtype: mx.Dtype = mx.bfloat16, batch: int = 2, **sizes: int) -> str:
        monkeypatch.setattr(native, "engine", lambda _: native.Engine(KERNELS, capability, cudnn=(9, 0, 0)))
        x, weight, *_ = draw(dtype, **sizes)
        return short_conv.prepare(mx.broadcast_to(x[:1], (batch, *x.shape[1:])), weight, stream=mx.cpu).choice.engine

    assert engine(channels=8) == engine((8, 0), channels=16) == engine(dtype=mx.float16, channels=8, taps=3) == "direct"
    assert engine((7, 5), channels=8) == engine(dtype=mx.float32, channels=8) == engine(batch=LARGEST_BATCH + 1, channels=8) == "mlx"
    assert engine(channels=4) == engine(channels=8, taps=2) == engine(channels=8, taps=5) == engine(channels=8, tokens=0) == "mlx"
    assert engine(batch=LARGEST_BATCH, channels=8) == "direct"
    assert engine(tokens=1) == engine(tokens=1, taps=2) == engine(tokens=1, taps=8) == "direct"
    assert engine(tokens=1, channels=5) == engine(tokens=1, taps=1) == engine(tokens=1, taps=9) == "mlx"


def test_patched_calls_that_our_kernel_does_not_take_are_mlx_s() -> None:
    theirs = mx.conv1d
    x, weight, *_ = draw(channels=8)
    expected = theirs(x, weight[:, :, None], stride=2, padding=3, groups=8)
    with mlx_cuda.patch():
        assert mx.conv1d is not theirs
        assert mx.array_equal(mx.conv1d(x, weight[:, :, None], 2, padding=3, groups=8), expected)
        with pytest.raises(ValueError, match=r"^\[conv\]"):
            mx.conv1d(x, weight[:, 0], groups=8)
        with pytest.raises(ValueError, match=r"^\[conv\]"):
            mx.conv1d(mx.array(1.0), weight[:, :, None])
        for arguments in ((x,), ([1.0], weight)):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                mx.conv1d(*arguments)
    assert mx.conv1d is theirs


def test_more_channels_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "engine", lambda _: native.Engine(KERNELS, (9, 0), cudnn=(9, 0, 0)))
    for channels, engine in (MOST_CHANNELS, "direct"), (MOST_CHANNELS + 2, "mlx"):
        x, weight = mx.broadcast_to(mx.zeros(1, mx.bfloat16), (1, 1, channels)), mx.broadcast_to(mx.zeros(1, mx.bfloat16), (channels, 4))
        assert short_conv.prepare(x, weight, stream=mx.cpu).choice.engine == engine


class Module:
    """What stands in for the native one: the arrays that it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def short_conv(self, *arguments: Any) -> tuple[mx.array, None]:
        self.calls.append(arguments)
        return mx.zeros(1), None


def test_convolutions_of_mlx_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(native, "engine", lambda _: native.Engine(module, (9, 0), cudnn=(9, 0, 0)))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "module", lambda _: module)
    x, weight, *_ = draw(mx.bfloat16, channels=8)
    monkeypatch.setattr(our_short_conv, "FEWEST_NUMBERS", x.size + 1)
    w = weight[:, :, None]
    assert depthwise(x, w, groups=8) is None
    monkeypatch.setattr(our_short_conv, "FEWEST_NUMBERS", 2 * 5 * 8)
    ours = depthwise(x, w, groups=8)
    assert ours is not None
    assert ours.result
    assert ours.result().size == 1
    assert module.calls[0][0] is x
    assert module.calls[0][1] is w
    assert module.calls[0][2:6] == (None, None, False, False)
    assert depthwise(x[:, :5], w, 1, 0, 1, 8) is not None  # two tokens
    monkeypatch.setattr(our_short_conv, "FEWEST_NUMBERS", 1)
    others: tuple[tuple[tuple[mx.array, mx.array], dict[str, Any]], ...] = (
        ((mx.repeat(x[:, :4], 2, axis=0), w), {"groups": 8}),  # one token
        ((x, w), {"groups": 8, "padding": 3}),
        ((x, w), {"groups": 8, "stride": 2}),
        ((x, w), {"groups": 8, "dilation": 2}),
        ((x, random((8, 4, 2), mx.bfloat16)), {"groups": 4}),
        ((x, random((16, 4, 1), mx.bfloat16)), {"groups": 8}),  # two results for each channel
        ((x, w.astype(mx.float16)), {"groups": 8}),
        ((x, w[:, 0, 0]), {"groups": 8}),
        ((x, mx.array(1.0, mx.bfloat16)), {"groups": 8}),
        ((x[0], w), {"groups": 8}),
        ((x, w), {"groups": 4}),
        ((x, w), {"groups": 8.0}),
        ((x.astype(mx.float32), w.astype(mx.float32)), {"groups": 8}),
    )
    for arguments, options in others:
        assert depthwise(*arguments, **options) is None
