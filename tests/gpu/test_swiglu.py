from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from . import reference
from .support import DTYPES, GRADIENT_TOLERANCE, ROUNDOFF, assert_close, assert_fused, device, host, normal, poison

pytestmark = [pytest.mark.gpu, pytest.mark.older_gpus]

# One rounding of a result computed in float32; float32 itself: a handful of roundings.
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 1e-6}

SHAPES = [(), (1,), (7,), (8,), (3, 5), (1, 8), (17, 33), (64, 127), (64, 128), (5, 1, 257), (3, 1000, 40)]

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def check(gate: mx.array, up: mx.array) -> None:
    result = mlx_cuda.swiglu(gate, up)
    if gate.shape == up.shape:  # shapes that broadcast are composed
        assert_fused(result, "SwiGLU")
    assert result.dtype == gate.dtype
    assert_close(
        result,
        reference.swiglu(host(gate), host(up)),
        tolerance=TOLERANCE[gate.dtype],
        upstream=gate * mx.sigmoid(gate) * up,
        floor=4 * ROUNDOFF[gate.dtype] if gate.dtype == mx.float32 else ROUNDOFF[gate.dtype],
    )


@dtypes
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (8,), (3, 5), (1, 8), (17, 33), (64, 127), (64, 128), (5, 1, 257), (3, 1000, 40)], ids=str
)
def test_matches_float64(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    check(normal(rng, shape, dtype), normal(rng, shape, dtype))


@dtypes
@pytest.mark.parametrize(("rows", "columns"), [(70_000, 3), (70_000, 8), (1, 3_000_001)])
def test_beyond_one_grid(rng: np.random.Generator, dtype: mx.Dtype, rows: int, columns: int) -> None:
    """More rows than a grid has in y, also as views whose rows are apart."""
    gate, up = normal(rng, (rows, 2 * columns), dtype), normal(rng, (rows, columns), dtype)
    check(gate[:, :columns], up)
    check(gate[:, columns:], up)


Pair = tuple[mx.array, mx.array]
VIEWS: dict[str, Callable[[mx.array], Pair]] = {
    "offset by one element": lambda a: (a.reshape(-1)[1:-7], a.reshape(-1)[8:]),
    "both offset by one element": lambda a: (a.reshape(-1)[1:-7], a.reshape(-1)[1:-7]),
    "halves of one array": lambda a: (mx.split(a, 2, axis=-1)[0], mx.split(a, 2, axis=-1)[1]),
    "halves of odd width": lambda a: (a[..., :33], a[..., 33:66]),
    "halves along the rows": lambda a: (a[:, :3], a[:, 3:]),
    "interleaved": lambda a: (a[..., ::2], a[..., 1::2]),
    "transposed": lambda a: (a.transpose(2, 0, 1), a.transpose(2, 0, 1)),
    "one transposed": lambda a: (a[0, :, :6].T, a[0, :, 6:12]),
    "backwards": lambda a: (a[..., ::-1], a[::-1]),
    "a row for all": lambda a: (a[:, :1], a),
    "a row for all rows": lambda a: (a, a[0, 0]),
    "a column for all": lambda a: (a[..., :1], a),
    "a plane for all": lambda a: (a[:1], a),
    "a middle dimension for all": lambda a: (a[:, :1, :], a[:, 1:2, :] + mx.zeros((1, 6, 1), a.dtype)),
    "outer product": lambda a: (a[0, :, :1], a[0, :1, :]),
    "a scalar": lambda a: (a[0, 0, 0], a),
    "a row repeated": lambda a: (mx.broadcast_to(a[:1, :1], a.shape), a),
    "a column repeated": lambda a: (a, mx.broadcast_to(a[..., :1], a.shape)),
    "an outer dimension repeated": lambda a: (mx.broadcast_to(a[:1], a.shape), a),
    "a middle dimension repeated": lambda a: (a, mx.broadcast_to(a[:, :1], a.shape)),
    "a scalar repeated": lambda a: (mx.broadcast_to(a[0, 0, 0], a.shape), mx.broadcast_to(a[1, 0, 0], a.shape)),
}


@dtypes
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(rng: np.random.Generator, dtype: mx.Dtype, view: Callable[[mx.array], Pair]) -> None:
    gate, up = view(normal(rng, (4, 6, 128), dtype))
    mx.eval(gate, up)
    check(gate, up)


@dtypes
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_empty(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    result = mlx_cuda.swiglu(mx.zeros(shape, dtype), mx.zeros(shape, dtype))
    assert result.shape == shape
    assert result.dtype == dtype
    mx.eval(result)


@dtypes
def test_huge_values(dtype: mx.Dtype) -> None:
    """Finite wherever the exact result is within the dtype's range."""
    largest = {mx.float16: 6e4, mx.bfloat16: 3e38, mx.float32: 3e38}[dtype]
    values = np.array([0.0, 1e-7, 1.0, 20.0, 88.0, 89.0, 104.0, 1e3, 3e4, largest / 8, largest])
    values = np.concatenate([values, -values])
    values = values[np.abs(values) <= largest]
    gate, up = (device(a.copy(), dtype) for a in np.broadcast_arrays(values[:, None], values))
    exact = reference.swiglu(host(gate), host(up))
    result = host(mlx_cuda.swiglu(gate, up))
    within = np.abs(exact) < largest
    assert np.isfinite(result[within]).all()
    # silu in float32 is 0 where its exponential overflows: an error below 1e-36 of up
    tolerance = 2 * TOLERANCE[dtype] * np.abs(exact) + 1e-36 * np.abs(host(up)) + (1e-7 if dtype == mx.float16 else 0)
    assert (np.abs(result - exact)[within] <= tolerance[within]).all()
    assert not np.isnan(result).any()  # out of range is infinite, as MLX's own matmul


@dtypes
@pytest.mark.parametrize("width", [64, 33])
def test_nan_goes_through_and_stays_put(dtype: mx.Dtype, width: int) -> None:
    gate, up = mx.ones((5, width), dtype), mx.ones((5, width), dtype)
    gate[1, 2] = float("nan")
    up[3, width - 1] = float("nan")
    nan = np.isnan(host(mlx_cuda.swiglu(gate, up)))
    assert nan[1, 2]
    assert nan[3, width - 1]
    assert nan.sum() == 2


@dtypes
def test_writes_all_of_its_output(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    for shape in (129,), (33, 31), (16, 128):
        gate, up = normal(rng, shape, dtype), normal(rng, shape, dtype)
        poison(partial(mlx_cuda.swiglu, gate, mx.full(shape, float("nan"), dtype)), shape, dtype)
        check(gate, up)


@dtypes
def test_vjp(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    gate, up, cotangent = (normal(rng, (33, 70), dtype) for _ in range(3))
    gradients = mx.vjp(mlx_cuda.swiglu, [gate, up], [cotangent])[1]
    for gradient, exact in zip(gradients, reference.swiglu_vjp(host(gate), host(up), host(cotangent)), strict=True):
        assert gradient.dtype == dtype
        assert_close(gradient, exact, tolerance=1e-5 if dtype == mx.float32 else GRADIENT_TOLERANCE[dtype])


def test_vjp_of_a_broadcast_sums(rng: np.random.Generator) -> None:
    gate, up, cotangent = normal(rng, (1, 16), mx.float32), normal(rng, (9, 16), mx.float32), normal(rng, (9, 16), mx.float32)
    by_gate, by_up = mx.vjp(mlx_cuda.swiglu, [gate, up], [cotangent])[1]
    exact = reference.swiglu_vjp(np.broadcast_to(host(gate), (9, 16)), host(up), host(cotangent))
    assert_close(by_gate, exact[0].sum(axis=0, keepdims=True), tolerance=1e-5)
    assert_close(by_up, exact[1], tolerance=1e-5)


@dtypes
def test_vmap(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    a, b = normal(rng, (5, 6, 7), dtype), normal(rng, (5, 6, 7), dtype)
    exact = reference.swiglu(host(a), host(b))
    assert_close(mx.vmap(mlx_cuda.swiglu)(a, b), exact, tolerance=TOLERANCE[dtype])
    assert_close(mx.vmap(mlx_cuda.swiglu, in_axes=(0, 2))(a, mx.moveaxis(b, 0, 2)), exact, tolerance=TOLERANCE[dtype])
    assert_close(mx.vmap(mlx_cuda.swiglu, in_axes=1, out_axes=1)(a, b), exact, tolerance=TOLERANCE[dtype])
    shared = reference.swiglu(host(a), host(b)[:1])
    assert_close(mx.vmap(mlx_cuda.swiglu, in_axes=(0, None))(a, b[0]), shared, tolerance=TOLERANCE[dtype])
    shared = reference.swiglu(host(a)[:1], host(b))
    assert_close(mx.vmap(mlx_cuda.swiglu, in_axes=(None, 0))(a[0], b), shared, tolerance=TOLERANCE[dtype])


@dtypes
def test_compiled_equals_eager(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    compiled = mx.compile(mlx_cuda.swiglu)
    for rows in 3, 4, 3:
        gate, up = normal(rng, (rows, 100), dtype), normal(rng, (rows, 100), dtype)
        assert mx.array_equal(compiled(gate, up), mlx_cuda.swiglu(gate, up))


def test_mixed_dtypes_promote(rng: np.random.Generator) -> None:
    gate, up = normal(rng, (8, 32), mx.bfloat16), normal(rng, (8, 32), mx.float32)
    result = mlx_cuda.swiglu(gate, up)
    assert result.dtype == mx.float32
    assert_close(result, reference.swiglu(host(gate), host(up)), tolerance=TOLERANCE[mx.float32])
