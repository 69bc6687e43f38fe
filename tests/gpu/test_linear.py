from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from . import reference
from .reference import Activation
from .support import (
    DTYPES,
    GRADIENT_TOLERANCE,
    LAYOUT,
    ROUNDOFF,
    TF32_ROUNDOFF,
    TOLERANCE,
    assert_close,
    assert_fused,
    device,
    host,
    normal,
    poison,
    primitives,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.older_gpus]

ACTIVATIONS: list[Activation] = [None, "relu", "gelu_approx"]
# M, N, K: some of all combinations of sizes that tiles and vectors do and do not divide.
SIZES = np.random.default_rng(2).choice(list(itertools.product([1, 3, 17, 127, 128, 1000], repeat=3)), 24, replace=False).tolist()

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
biased = pytest.mark.parametrize("with_bias", [False, True], ids=["bare", "bias"])


def upstream(x: mx.array, w: mx.array, bias: mx.array | None, activation: Activation) -> mx.array:
    z = x @ w.T if bias is None else mx.addmm(bias, x, w.T)
    if activation == "relu":
        return mx.maximum(z, 0)
    if activation == "gelu_approx":
        # In float32, so that only the matmul's error counts and not the roundings of the formula.
        f = z.astype(mx.float32)
        return (0.5 * f * (1 + mx.tanh(0.7978845608 * (f + 0.044715 * f**3)))).astype(z.dtype)
    return z


def check(x: mx.array, w: mx.array, bias: mx.array | None = None, activation: Activation = None) -> None:
    result = mlx_cuda.linear(x, w, bias, activation=activation)
    one_bare_row = x.size == x.shape[-1] and bias is None and activation is None
    assert_fused(result, "Matmul" if one_bare_row else "Linear")  # MLX's own matrix-vector kernel is faster
    assert result.dtype == x.dtype
    arguments = host(x), host(w), None if bias is None else host(bias)
    assert_close(
        result,
        reference.linear(*arguments, activation),
        size=reference.linear_size(*arguments),
        tolerance=TOLERANCE[x.dtype],
        upstream=upstream(x, w, bias, activation),
        floor=max(ROUNDOFF[x.dtype], TF32_ROUNDOFF),
    )


def inputs(rng: np.random.Generator, m: int, n: int, k: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    return normal(rng, (m, k), dtype), normal(rng, (n, k), dtype, k**-0.5), normal(rng, (n,), dtype)


@dtypes
@biased
@activations
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matches_float64(
    rng: np.random.Generator, m: int, n: int, k: int, dtype: mx.Dtype, with_bias: bool, activation: Activation
) -> None:
    x, w, bias = inputs(rng, m, n, k, dtype)
    check(x, w, bias if with_bias else None, activation)


@dtypes
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 1, 3, 64), (1, 1, 64)], ids=str)
def test_leading_dimensions(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    x, w, bias = normal(rng, shape, dtype), normal(rng, (48, 64), dtype, 0.125), normal(rng, (48,), dtype)
    assert mlx_cuda.linear(x, w, bias).shape == (*shape[:-1], 48)
    if len(shape) > 1:
        check(x, w, bias, "gelu_approx")
    else:
        assert relative_error(mlx_cuda.linear(x, w, bias), reference.linear(host(x), host(w), host(bias))) <= TOLERANCE[dtype]


@dtypes
def test_transposed_operands(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    for m, n, k in (16, 128, 64), (5, 17, 33), (1, 40, 24):
        check(normal(rng, (m, k), dtype), normal(rng, (k, n), dtype, k**-0.5).T, normal(rng, (n,), dtype), "relu")
        check(normal(rng, (k, m), dtype).T, normal(rng, (n, k), dtype, k**-0.5), normal(rng, (n,), dtype), "gelu_approx")
        check(normal(rng, (k, m), dtype).T, normal(rng, (k, n), dtype, k**-0.5).T)


VIEWS: dict[str, Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]] = {
    "every other row": lambda x, w, b: (x[::2, 0], w[:, :130], b[:50]),
    "columns of wider matrices": lambda x, w, b: (x[:, 0, 1:129], w[:, 2:130], b[1:51]),
    "outer dimensions swapped": lambda x, w, b: (x.swapaxes(0, 1), w[:, 130:], b[50:]),
    "inner dimensions swapped": lambda x, w, b: (x[:, :, :3].swapaxes(1, 2), w[:, :3], b[:50]),
    "every other column": lambda x, w, b: (x[:, 1], w[:, ::2], b[::2]),
    "first row repeated": lambda x, w, b: (mx.broadcast_to(x[:1, 0], (7, 130)), w[:, :130], b[:50]),
    "an outer dimension repeated": lambda x, w, b: (mx.broadcast_to(x[:1], (4, 3, 130)), w[:, :130], b[:50]),
    "a middle dimension repeated": lambda x, w, b: (mx.broadcast_to(x[:, :1], (40, 5, 130)), w[:, :130], b[:50]),
    "one bias for all": lambda x, w, b: (x, w[:, :130], mx.broadcast_to(b[:1], (50,))),
    "one weight row for all": lambda x, w, b: (x, mx.broadcast_to(w[:1, :130], (50, 130)), b[:50]),
    "backwards": lambda x, w, b: (x[::-1, 0], w[::-1, :130], b[:50][::-1]),
}


@dtypes
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(
    rng: np.random.Generator, dtype: mx.Dtype, view: Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]
) -> None:
    """Inputs that are not contiguous, or whose data starts at an odd element."""
    arrays = view(normal(rng, (40, 3, 130), dtype), normal(rng, (50, 260), dtype, 130**-0.5), normal(rng, (100,), dtype))
    mx.eval(arrays)
    check(*arrays, "relu")


@activations
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0)])
def test_empty(m: int, n: int, k: int, activation: Activation) -> None:
    x, w, bias = mx.ones((m, k), mx.float16), mx.ones((n, k), mx.float16), mx.full((n,), 0.5, mx.float16)
    result = mlx_cuda.linear(x, w, bias, activation=activation)
    assert result.shape == (m, n)
    assert np.allclose(host(result), reference.linear(host(x), host(w), host(bias), activation), atol=1e-3)


@dtypes
@biased
@activations
def test_vjp(rng: np.random.Generator, dtype: mx.Dtype, with_bias: bool, activation: Activation) -> None:
    x, w, bias = inputs(rng, 65, 48, 41, dtype)
    if activation == "relu":  # sums that every dtype holds exactly and that are never 0, or rounding would decide their slope
        x, w = device(rng.integers(-2, 2, (65, 41)) + 0.5, dtype), device(rng.integers(0, 2, (48, 41)) * 2.0 - 1, dtype)
        bias = device(rng.integers(-2, 3, (48,)) * 1.0, dtype)
    cotangent = normal(rng, (65, 48), dtype)

    def function(*arrays: mx.array) -> mx.array:
        return mlx_cuda.linear(*arrays, activation=activation)

    primals = [x, w, bias] if with_bias else [x, w]
    gradients = mx.vjp(function, primals, [cotangent])[1]
    expected = reference.linear_vjp(host(x), host(w), host(bias) if with_bias else None, activation, host(cotangent))
    for gradient, exact in zip(gradients, expected, strict=False):  # without a bias there is no third one
        assert gradient.dtype == dtype
        assert_close(gradient, exact, tolerance=GRADIENT_TOLERANCE[dtype])


@dtypes
@activations
@pytest.mark.parametrize("shape", [(33,), (1, 40), (2, 3, 129), (700, 264)], ids=str)
def test_gradients_of_shapes(rng: np.random.Generator, dtype: mx.Dtype, activation: Activation, shape: tuple[int, ...]) -> None:
    """Leading dimensions, one row, sizes that vectors do and do not divide, and each gradient alone."""
    if activation == "relu":
        shift = 0.25  # exact sums that are never 0
        x, w = device(rng.integers(-2, 3, shape) * 1.0, dtype), device(rng.integers(0, 2, (72, shape[-1])) * 2.0 - 1, dtype)
        bias = device(rng.integers(-2, 3, (72,)) + shift, dtype)
    else:
        x, w, bias = normal(rng, shape, dtype), normal(rng, (72, shape[-1]), dtype, shape[-1] ** -0.5), normal(rng, (72,), dtype)
    cotangent = normal(rng, (*shape[:-1], 72), dtype)
    rows = host(x).reshape(-1, shape[-1]), host(cotangent).reshape(-1, 72)
    exact = reference.linear_vjp(rows[0], host(w), host(bias), activation, rows[1])
    primals = [x, w, bias]

    def with_one(i: int, one: mx.array) -> mx.array:
        x, w, bias = (one if i == j else primal for j, primal in enumerate(primals))
        return mlx_cuda.linear(x, w, bias, activation=activation)

    together = mx.vjp(lambda *p: mlx_cuda.linear(*p, activation=activation), primals, [cotangent])[1]
    for i, (gradient, one) in enumerate(zip(together, exact, strict=True)):
        alone = mx.vjp(partial(with_one, i), [primals[i]], [cotangent])
        assert (gradient.dtype, gradient.shape) == (dtype, primals[i].shape)
        assert_close(gradient, one.reshape(gradient.shape), tolerance=2 * TOLERANCE[dtype])
        assert_close(alone[1][0], one.reshape(gradient.shape), tolerance=2 * TOLERANCE[dtype])


@activations
def test_the_backward_is_fused(rng: np.random.Generator, activation: Activation) -> None:
    x, w, bias = inputs(rng, 48, 64, 32, mx.bfloat16)
    weights = normal(rng, (48, 64), mx.bfloat16)

    def loss(*p: mx.array) -> mx.array:
        return (mlx_cuda.linear(*p, activation=activation) * weights).sum()

    names = primitives(*mx.grad(loss, argnums=(0, 1, 2))(x, w, bias)) - LAYOUT
    assert {"Linear", "LinearGradient"} <= names
    assert not names & {"Matmul", "AddMM", "Tanh", "Sigmoid", "Square", "Maximum", "Greater"}


def test_gelu_gradients_at_the_ends() -> None:
    x = mx.array([[0.0, 1e30, -1e30, 20.0], [-20.0, 0.0, 3.0, -3.0], [float("nan"), 0.0, 0.0, 0.0]])
    w = mx.eye(4)
    (gradient,) = mx.vjp(lambda x: mlx_cuda.linear(x, w, activation="gelu_approx"), [x], [mx.ones((3, 4))])[1]
    values = host(gradient)
    assert np.isnan(values[2]).all()
    assert np.allclose(values[:2], reference.activation_gradient(np.clip(host(x)[:2], -50, 50), "gelu_approx"), atol=1e-3)


@dtypes
@pytest.mark.parametrize("activation", ["gelu_approx", None])
def test_second_derivatives(rng: np.random.Generator, dtype: mx.Dtype, activation: Activation) -> None:
    """Against finite differences of the exact first derivative."""
    x, w, bias = inputs(rng, 24, 16, 32, dtype)
    cotangent, direction = normal(rng, (24, 16), dtype), normal(rng, (24, 32), dtype)

    def directional(x: mx.array) -> mx.array:
        (gradient,) = mx.vjp(lambda x: mlx_cuda.linear(x, w, bias, activation=activation), [x], [cotangent])[1]
        return (gradient.astype(mx.float32) * direction.astype(mx.float32)).sum()

    def exact(x: reference.Array) -> float:
        return float((reference.linear_vjp(x, host(w), host(bias), activation, host(cotangent))[0] * host(direction)).sum())

    second = host(mx.grad(directional)(x))
    along, step = rng.standard_normal(x.shape), 1e-5
    difference = (exact(host(x) + step * along) - exact(host(x) - step * along)) / (2 * step)
    assert abs((second * along).sum() - difference) <= 30 * GRADIENT_TOLERANCE[dtype] * max(1.0, np.abs(second * along).sum() ** 0.5)


@dtypes
def test_per_example_gradients(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    x, w, bias = normal(rng, (5, 7, 24), dtype), normal(rng, (16, 24), dtype, 0.2), normal(rng, (16,), dtype)

    def loss(w: mx.array, x: mx.array) -> mx.array:
        return mlx_cuda.linear(x, w, bias, activation="gelu_approx").sum()

    gradients = mx.vmap(mx.grad(loss), in_axes=(None, 0))(w, x)
    for i in range(5):
        exact = reference.linear_vjp(host(x[i]), host(w), host(bias), "gelu_approx", np.ones((7, 16)))[1]
        assert_close(gradients[i], exact, tolerance=GRADIENT_TOLERANCE[dtype])


@dtypes
@activations
def test_compiled_gradients(rng: np.random.Generator, dtype: mx.Dtype, activation: Activation) -> None:
    x, w, bias = inputs(rng, 40, 64, 48, dtype)

    def loss(*p: mx.array) -> mx.array:
        return mlx_cuda.linear(*p, activation=activation).astype(mx.float32).sum()

    gradient = mx.grad(loss, argnums=(0, 1, 2))
    for ours, compiled in zip(gradient(x, w, bias), mx.compile(gradient)(x, w, bias), strict=True):
        assert mx.array_equal(ours, compiled)


@dtypes
def test_vmap(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    x, w, bias = normal(rng, (5, 7, 24), dtype), normal(rng, (5, 16, 24), dtype, 0.2), normal(rng, (5, 16), dtype)

    def function(x: mx.array, w: mx.array, bias: mx.array) -> mx.array:
        return mlx_cuda.linear(x, w, bias, activation="gelu_approx")

    for axes in (0, None, None), (1, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (2, 0, 0):
        arrays = [a if axis is not None else a[0] for a, axis in zip((x, w, bias), axes, strict=True)]
        if axes[0] is not None:
            arrays[0] = mx.moveaxis(x, 0, axes[0])
        result = mx.vmap(function, in_axes=axes)(*arrays)
        batched = [a if axis is not None else a[:1] for a, axis in zip((x, w, bias), axes, strict=True)]
        members = [[host(a[i % len(a)]) for a in batched] for i in range(5)]
        expected = np.stack([reference.linear(m[0], m[1], m[2], "gelu_approx") for m in members])
        assert_close(result, expected, tolerance=3 * TOLERANCE[dtype])  # a batch of weights is composed of MLX operations


@dtypes
@activations
def test_compiled_equals_eager(rng: np.random.Generator, dtype: mx.Dtype, activation: Activation) -> None:
    def function(x: mx.array, w: mx.array, bias: mx.array) -> mx.array:
        return mlx_cuda.linear(x, w, bias, activation=activation)

    compiled = mx.compile(function)
    for m in 33, 34, 33:
        arrays = inputs(rng, m, 64, 32, dtype)
        assert mx.array_equal(compiled(*arrays), function(*arrays))


@dtypes
def test_writes_all_of_its_output(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    for m, n, k in (33, 65, 40), (128, 128, 128), (1, 7, 3):
        x, w, bias = inputs(rng, m, n, k, dtype)
        for activation in ACTIVATIONS:
            poison(partial(mlx_cuda.linear, mx.full(x.shape, float("nan"), dtype), w), (m, n), dtype)
            check(x, w, bias, activation)


@pytest.mark.parametrize("activation", ["gelu_approx", "relu"])
def test_nan_goes_through(activation: Activation) -> None:
    x, w = mx.ones((4, 16), mx.bfloat16), mx.ones((8, 16), mx.bfloat16)
    x[2, 3] = float("nan")
    result = host(mlx_cuda.linear(x, w, mx.zeros((8,), mx.bfloat16), activation=activation))
    assert np.isfinite(result[[0, 1, 3]]).all()
    if activation != "relu":  # cuBLASLt's ReLU epilogue may give 0 for NaN, as max(0, NaN) does in C
        assert np.isnan(result[2]).all()


def test_mixed_dtypes_promote(rng: np.random.Generator) -> None:
    x, w = normal(rng, (8, 32), mx.float16), normal(rng, (16, 32), mx.float32, 0.2)
    result = mlx_cuda.linear(x, w)
    assert result.dtype == mx.float32
    assert_close(result, reference.linear(host(x), host(w)), tolerance=TOLERANCE[mx.float32])


def test_repeated_calls_give_the_same_bits(rng: np.random.Generator) -> None:
    x, w, bias = inputs(rng, 256, 512, 384, mx.bfloat16)
    first = mlx_cuda.linear(x, w, bias, activation="gelu_approx")
    results = [mlx_cuda.linear(x, w, bias, activation="gelu_approx") for _ in range(20)]
    mx.eval(results)
    assert all(mx.array_equal(first, result) for result in results)


def test_many_shapes_in_one_graph(rng: np.random.Generator) -> None:
    """More shapes than the plan cache holds, evaluated together and again."""
    w = normal(rng, (32, 64), mx.float16, 0.125)
    xs = [normal(rng, (m, 64), mx.float16) for m in range(1, 600)]
    for _ in range(2):
        results = [mlx_cuda.linear(x, w) for x in xs]
        mx.eval(results)
        assert max(relative_error(y, reference.linear(host(x), host(w))) for x, y in zip(xs, results, strict=True)) <= TOLERANCE[mx.float16]
