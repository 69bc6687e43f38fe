from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes
from mlx_cuda import swiglu

from . import references as reference
from .references import DTYPES, assert_close, gradients, host, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(shapes=mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=4, max_side=9))
def test_matches_float64(dtype: mx.Dtype, shapes: BroadcastableShapes) -> None:
    gate, up = (random(shape, dtype, seed=seed) for seed, shape in enumerate(shapes.input_shapes))
    result = swiglu(gate, up)
    assert result.dtype == dtype
    assert_close(result, reference.swiglu(host(gate), host(up)))


@pytest.mark.parametrize(("dtype", "digits"), [(mx.float16, 11), (mx.bfloat16, 8)], ids=str)
def test_halves_are_rounded_once(dtype: mx.Dtype, digits: int) -> None:
    gate, up = random((64, 64), dtype), random((64, 64), dtype, seed=1)
    expected = reference.swiglu(host(gate), host(up))
    normal = np.abs(expected) > 1e-3
    errors = np.abs(host(swiglu(gate, up)) - expected)[normal] / np.abs(expected)[normal]
    assert np.max(errors) <= 1.01 * 2.0**-digits


def test_strided_inputs() -> None:
    gate, up = random((8, 6)).T, random((6, 16))[:, ::2]
    assert_close(swiglu(gate, up), reference.swiglu(host(gate), host(up)))


@pytest.mark.parametrize(
    ("gate", "up", "result"),
    [
        (mx.float16, mx.float32, mx.float32),
        (mx.float16, mx.bfloat16, mx.float32),
        (mx.int32, mx.int32, mx.float32),
        (mx.bool_, mx.float16, mx.float16),
    ],
    ids=str,
)
def test_promotion(gate: mx.Dtype, up: mx.Dtype, result: mx.Dtype) -> None:
    assert swiglu(mx.ones(3, gate), mx.ones(3, up)).dtype == result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs_neither_overflow_nor_give_nan(dtype: mx.Dtype) -> None:
    gate = mx.array([-3e4, -100.0, 0.0, 100.0, 3e4]).astype(dtype)
    assert_close(swiglu(gate, mx.ones(5, dtype)), np.where(host(gate) > 0, host(gate), 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vjp(dtype: mx.Dtype) -> None:
    gate, up, cotangent = (random((5, 7), dtype, seed=seed) for seed in range(3))
    _, actual = mx.vjp(swiglu, [gate, up], [cotangent])
    for got, expected in zip(actual, gradients(lambda g, u: g * mx.sigmoid(g) * u, [gate, up], cotangent), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 0)], ids=str)
def test_vmap(axes: tuple[int | None, int | None]) -> None:
    gate, up = random((4, 4, 4), seed=1), random((4, 4, 4) if axes[1] is not None else (4, 4), seed=2)
    gate = gate if axes[0] is not None else gate[0]
    moved = [host(a) if axis is None else np.moveaxis(host(a), axis, 0) for a, axis in zip((gate, up), axes, strict=True)]
    assert_close(mx.vmap(swiglu, in_axes=axes)(gate, up), reference.swiglu(*moved))


def test_compile() -> None:
    gate, up = random((3, 5)), random((3, 5), seed=1)
    assert_close(mx.compile(lambda g, u: swiglu(2 * g, u))(gate, up), reference.swiglu(2 * host(gate), host(up)))


@pytest.mark.parametrize("stream", [mx.cpu, mx.Device(mx.cpu, 0), mx.new_stream(mx.cpu), mx.new_thread_local_stream(mx.cpu)], ids=repr)
def test_every_kind_of_stream(stream: mx.Device | mx.Stream) -> None:
    x = random((3, 5))
    assert_close(swiglu(x, x, stream=stream), reference.swiglu(host(x), host(x)))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^\[swiglu\] Only real types are supported, got complex64 and float32\.$"):
        swiglu(mx.ones(2, mx.complex64), mx.ones(2))
    with pytest.raises(ValueError, match=r"^\[swiglu\] Shapes must broadcast, got \(2,3\) and \(4,\)\.$"):
        swiglu(mx.ones((2, 3)), mx.ones(4))
    with pytest.raises(TypeError, match=r"^\[swiglu\] up must be an mlx\.core\.array, got ndarray\.$"):
        swiglu(mx.ones(2), np.ones(2))  # type: ignore[arg-type]
