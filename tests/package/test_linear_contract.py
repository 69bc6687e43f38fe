from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda import linear
from mlx_cuda._matmul.linear import Activation

from . import references as reference
from .references import DTYPES, assert_close, gradients, host, random, sliced

ACTIVATIONS: tuple[Activation | None, ...] = (None, "relu", "gelu_approx")


def composed(x: mx.array, w: mx.array, bias: mx.array, activation: Activation | None) -> mx.array:
    y = x @ w.T + bias
    if activation == "relu":
        return mx.maximum(y, 0)
    return 0.5 * y * (1 + mx.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y * y * y))) if activation else y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    rows=st.lists(st.integers(0, 5), max_size=3),
    k=st.integers(0, 40),
    n=st.integers(0, 40),
    activation=st.sampled_from(ACTIVATIONS),
    with_bias=st.booleans(),
)
def test_matches_float64(*, dtype: mx.Dtype, rows: list[int], k: int, n: int, activation: Activation | None, with_bias: bool) -> None:
    x, w, bias = random((*rows, k), dtype), random((n, k), dtype, seed=1), random((n,), dtype, seed=2) if with_bias else None
    result = linear(x, w, bias, activation=activation)
    assert result.dtype == dtype
    assert_close(result, reference.linear(host(x), host(w), None if bias is None else host(bias), activation))


def test_strided_inputs() -> None:
    x, w, bias = random((16, 6)).T[:, ::2], random((8, 5), seed=1).T, random((10,), seed=2)[::2]
    assert_close(linear(x, w, bias), reference.linear(host(x), host(w), host(bias)))


def test_promotion() -> None:
    half, single, integer = mx.ones((2, 2), mx.float16), mx.ones((2, 2)), mx.ones((2, 2), mx.int32)
    assert linear(half, half).dtype == mx.float16
    assert linear(half, single).dtype == mx.float32
    assert linear(half, half.astype(mx.bfloat16)).dtype == mx.float32
    assert linear(half, half, mx.ones(2)).dtype == mx.float32
    assert linear(integer, half).dtype == mx.float16


def test_float64_and_complex_are_composed() -> None:
    with mx.stream(mx.cpu):
        x = random((3, 4)).astype(mx.float64)
        assert_close(linear(x, x, mx.ones(3), activation="relu"), reference.linear(host(x), host(x), np.ones(3), "relu"))
        z = x.astype(mx.complex64)
        assert_close(mx.real(linear(z * 1j, z * 1j, mx.ones(3))), -reference.linear(host(x), host(x)) + 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vjp(dtype: mx.Dtype, activation: Activation | None) -> None:
    inputs, cotangent = (
        [random((2, 5, 8), dtype), random((6, 8), dtype, seed=1), random((6,), dtype, seed=2)],
        random((2, 5, 6), dtype, seed=3),
    )
    _, actual = mx.vjp(lambda x, w, b: linear(x, w, b, activation=activation), inputs, [cotangent])
    for got, expected in zip(actual, gradients(lambda x, w, b: composed(x, w, b, activation), inputs, cotangent), strict=True):
        assert_close(got, expected, slack=3)


def test_gelu_of_large_float16_has_finite_gradients() -> None:
    x = mx.array([[-300.0], [300.0]], mx.float16)
    gradient = mx.grad(lambda x: linear(x, mx.ones((1, 1), mx.float16), activation="gelu_approx").sum())(x)
    np.testing.assert_array_equal(host(gradient), [[0.0], [1.0]])


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (1, 0, None), (0, 2, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    shapes = [list(shape) for shape in ((5, 8), (6, 8), (6,))]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    arrays = [random(tuple(shape), seed=seed) for seed, shape in enumerate(shapes)]
    rows = [reference.linear(*sliced(arrays, axes, i)) for i in range(3)]
    assert_close(mx.vmap(linear, in_axes=axes)(*arrays), np.stack(rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compile(activation: Activation | None) -> None:
    x, w = random((3, 5)), random((4, 5), seed=1)
    assert_close(
        mx.compile(lambda x, w: linear(2 * x, w, activation=activation))(x, w), reference.linear(2 * host(x), host(w), None, activation)
    )


def test_runs_on_the_stream_that_is_asked_for() -> None:
    x = random((3, 5))
    assert_close(linear(x, x, stream=mx.cpu), reference.linear(host(x), host(x)))


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((), (3, 4)), r"Shapes must be x \[\.\.\., K\] and w \[N, K\], got \(\) and \(3,4\)\."),
        (((2, 3), (4, 5)), r"Shapes must be x \[\.\.\., K\] and w \[N, K\], got \(2,3\) and \(4,5\)\."),
        (((2, 3), (3,)), r"Shapes must be x \[\.\.\., K\] and w \[N, K\], got \(2,3\) and \(3,\)\."),
        (((2, 3), (4, 3), (3,)), r"bias must have the shape \(4,\) of w's rows, got \(3,\)\."),
        (((2, 3), (4, 3), (1, 4)), r"bias must have the shape \(4,\) of w's rows, got \(1,4\)\."),
    ],
)
def test_shape_errors(shapes: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[linear\] {text}$"):
        linear(*(mx.ones(shape) for shape in shapes))


def test_other_errors() -> None:
    x = mx.ones((2, 2))
    with pytest.raises(ValueError, match=r"^\[linear\] Activation must be None or one of 'relu', 'gelu_approx', got 'tanh'\.$"):
        linear(x, x, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^\[linear\] Only inexact types are supported, got int32 and int32\.$"):
        linear(x.astype(mx.int32), x.astype(mx.int32))
    with pytest.raises(ValueError, match=r"^\[linear\] Activation 'relu' needs a real type, got complex64\.$"):
        linear(x.astype(mx.complex64), x, activation="relu")
    with pytest.raises(TypeError, match=r"^\[linear\] w must be an mlx\.core\.array, got list\.$"):
        linear(x, [[1.0]])  # type: ignore[arg-type]
