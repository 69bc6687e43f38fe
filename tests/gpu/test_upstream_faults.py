"""Where MLX's own CUDA kernels fail and ours are not used: right results all the same (docs/results/upstream-issues.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from . import quantized_cases
from .formats import Form
from .reference import Array
from .support import GRADIENT_TOLERANCE, TOLERANCE, assert_close, host, normal

pytestmark = pytest.mark.gpu

MLX: Any = mx
VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "inserted": lambda a: a[:, None],
    "expanded": lambda a: mx.expand_dims(a, -2),
    "of wider rows": lambda a: mx.concatenate([a, mx.zeros_like(a)], axis=-1)[:, None, : a.shape[1]],
    "every second": lambda a: mx.repeat(a, 2, axis=0)[::2, None],
    "backwards": lambda a: mx.contiguous(a[::-1])[::-1, None],
    "columns adjacent": lambda a: mx.contiguous(a.T).T[:, None],
    "at an odd address": lambda a: mx.concatenate([mx.zeros(1, a.dtype), a.flatten()])[1:].reshape(-1, 1, a.shape[1]),
}
STACKS: dict[str, Callable[[mx.array], mx.array]] = {
    "rows": lambda w: w,
    "columns": lambda w: mx.contiguous(w.swapaxes(1, 2)).swapaxes(1, 2),
    "every second": lambda w: mx.repeat(w, 2, axis=0)[::2],
    "every second, columns": lambda w: mx.repeat(w.swapaxes(1, 2), 2, axis=0)[::2].swapaxes(1, 2),
    "of wider rows": lambda w: mx.concatenate([w, w], axis=-1)[..., : w.shape[2]],
    "at an odd address": lambda w: mx.concatenate([mx.zeros(1, w.dtype), w.flatten()])[1:].reshape(w.shape),
    "one for all": lambda w: mx.broadcast_to(w[:1], w.shape),
}


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with mlx_cuda.patch():
        yield


def gathered(x: Array, w: Array, lhs: Any, rhs: Any) -> Array:
    return np.asarray(x[lhs] @ w[rhs])


# K and N that are multiples of 8, which kernels read at once, and that are not: all but the last are left to MLX.
SIZES = [*((mx.float32, k, n) for k in (72, 75) for n in (40, 43)), (mx.bfloat16, 75, 40), (mx.bfloat16, 75, 43), (mx.bfloat16, 72, 40)]
sizes = pytest.mark.parametrize(("dtype", "k", "n"), SIZES, ids=str)


@sizes
@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "any order"])
def test_gather_mm_of_views(rng: np.random.Generator, dtype: mx.Dtype, k: int, n: int, ordered: bool) -> None:
    flat, w = normal(rng, (120, k), dtype), normal(rng, (5, k, n), dtype, k**-0.5)
    rhs = rng.integers(0, 5, 120)
    rhs = np.sort(rhs) if ordered else rhs
    for name, view in VIEWS.items():
        for kind, stack in STACKS.items() if name in {"inserted", "columns adjacent"} else [("rows", STACKS["rows"])]:
            x, weights = view(flat), stack(w)
            result = mx.gather_mm(x, weights, rhs_indices=mx.array(rhs), sorted_indices=ordered)
            exact = gathered(host(x), host(weights), np.arange(120), rhs)
            assert_close(result, exact, tolerance=TOLERANCE[dtype], about=(name, kind))


@sizes
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
def test_gather_mm_of_matrices(rng: np.random.Generator, dtype: mx.Dtype, k: int, n: int, stack: Callable[[mx.array], mx.array]) -> None:
    w = stack(normal(rng, (5, k, n), dtype, k**-0.5))
    lhs, rhs = rng.integers(0, 6, 30), rng.integers(0, 5, 30)
    for x in (normal(rng, (6, 9, k), dtype), normal(rng, (6, k, 9), dtype).swapaxes(1, 2), normal(rng, (12, 9, k), dtype)[::2]):
        result = mx.gather_mm(x, w, lhs_indices=mx.array(lhs), rhs_indices=mx.array(rhs))
        assert_close(result, gathered(host(x), host(w), lhs, rhs), tolerance=TOLERANCE[dtype])


@sizes
@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "any order"])
@pytest.mark.parametrize("turned", [True, False], ids=["columns", "rows"])
def test_gradients_of_gather_mm(rng: np.random.Generator, dtype: mx.Dtype, k: int, n: int, ordered: bool, turned: bool) -> None:
    """Of results of which only parts are used, so that their gradients are views."""
    flat, w = normal(rng, (60, k), dtype), normal(rng, (5, k, n), dtype, k**-0.5)
    w = STACKS["columns"](w) if turned else w
    rhs = np.sort(rng.integers(0, 5, 60)) if ordered else rng.integers(0, 5, 60)
    cotangent = normal(rng, (60, 2 * n), dtype)

    def function(x: mx.array, w: mx.array) -> mx.array:
        y = mx.gather_mm(x[:, None], w, rhs_indices=mx.array(rhs), sorted_indices=ordered).squeeze(1)
        return mx.concatenate([y, 2 * y], axis=1)

    dx, dw = mx.vjp(function, [flat, w], [cotangent])[1]
    dy = host(cotangent)[:, :n] + 2 * host(cotangent)[:, n:]
    assert_close(dx, np.einsum("rn,rkn->rk", dy, host(w)[rhs]), tolerance=GRADIENT_TOLERANCE[dtype])
    exact = np.stack([host(flat)[rhs == e].T @ dy[rhs == e] for e in range(5)])
    assert_close(dw, exact, tolerance=GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("form", [Form("affine", 4, 64), Form("affine", 8, 32)], ids=str)
def test_gather_qmm_of_views(rng: np.random.Generator, form: Form) -> None:
    weights = quantized_cases.draw(rng, (5, 64, 128), form, mx.float32)
    flat, rhs = normal(rng, (120, 128), mx.float32), rng.integers(0, 5, 120)
    for name, view in VIEWS.items():
        x = view(flat)
        result = MLX.gather_qmm(x, *weights.arrays, rhs_indices=mx.array(rhs), **weights.options)
        exact = gathered(host(x), weights.exact.swapaxes(1, 2), np.arange(120), rhs)
        assert_close(result, exact, tolerance=TOLERANCE[mx.float32], about=name)


# ------------------------------------------------------------------------------------------------- more than fits into a grid
MANY = 70_000
SOME = np.array([0, 1, 2046, 2047, 2048, 2099, 32767, 32768, 65534, 65535, 65536, MANY - 1])


def random(*shape: int, dtype: mx.Dtype) -> mx.array:
    """Drawn on the GPU."""
    result = mx.random.normal(shape, dtype=dtype, key=mx.random.key(sum(shape)))
    mx.eval(result)
    return result


def check_attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None = None) -> None:
    """Of some of the sequences."""
    result = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert result.shape == q.shape
    some = mx.array(SOME[q.shape[0] > SOME])
    scores = host(q[some]) @ host(k[some]).swapaxes(-1, -2) * 0.125
    if mask is not None:
        scores = np.where(np.array(mask[some]), scores, -np.inf) if mask.dtype == mx.bool_ else scores + host(mask[some])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True) @ host(v[some])
    assert_close(result[some], exact, tolerance=TOLERANCE[q.dtype])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (5, 24), (40, 40)])
def test_attention_of_many_sequences(dtype: mx.Dtype, queries: int, keys: int) -> None:
    q, k, v = (random(MANY, 1, length, 64, dtype=dtype) for length in (queries, keys, keys))
    mask = random(MANY, 1, queries, keys, dtype=dtype)
    for each in None, mask, (mask > -1) | (mx.arange(keys) == 0):
        check_attention(q, k, v, each)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_attention_of_many_heads(dtype: mx.Dtype) -> None:
    q, k, v = (random(MANY, 1, length, 64, dtype=dtype) for length in (4, 16, 16))
    result = mx.fast.scaled_dot_product_attention(*(each.swapaxes(0, 1) for each in (q, k, v)), scale=0.125)
    assert mx.allclose(result[0, :, None], mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125), 2e-2, 2e-2)
    check_attention(q, k, v)


def test_few_queries_of_many_keys_in_float32() -> None:
    """MLX's kernel has 32 blocks for each sequence then."""
    check_attention(*(random(2100, 1, length, 64, dtype=mx.float32) for length in (1, 1100, 1100)))


@pytest.mark.parametrize(
    ("dtype", "k", "rows"), [(mx.float32, 16, 1), (mx.float32, 16, 2), (mx.bfloat16, 16, 1), (mx.bfloat16, 15, 1)], ids=str
)
def test_gather_mm_of_many_pairs(rng: np.random.Generator, dtype: mx.Dtype, k: int, rows: int) -> None:
    x, w = normal(rng, (MANY, rows, k), dtype), normal(rng, (3, k, 24), dtype)
    for rhs in (rng.integers(0, 3, MANY), np.sort(rng.integers(0, 3, MANY))):
        result = mx.gather_mm(x, w, rhs_indices=mx.array(rhs), sorted_indices=bool((np.diff(rhs) >= 0).all()))
        assert_close(result, gathered(host(x), host(w), np.arange(MANY), rhs), tolerance=TOLERANCE[dtype])


def test_gather_qmm_of_many_pairs(rng: np.random.Generator) -> None:
    for dtype in mx.float32, mx.bfloat16:
        weights = quantized_cases.draw(rng, (3, 32, 64), Form("affine", 4, 64), dtype)
        x, rhs = normal(rng, (MANY, 1, 64), dtype), rng.integers(0, 3, MANY)
        result = MLX.gather_qmm(x, *weights.arrays, rhs_indices=mx.array(rhs), **weights.options)
        exact = gathered(host(x), weights.exact.swapaxes(1, 2), np.arange(MANY), rhs)
        assert_close(result, exact, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("transpose", [True, False])
def test_matmuls_of_many_batches_of_quantized_weights(rng: np.random.Generator, transpose: bool) -> None:
    weights = quantized_cases.draw(rng, (1, 64, 64), Form("affine", 4, 64), mx.bfloat16)
    arrays = [mx.repeat(array, MANY, axis=0) for array in weights.arrays]
    x = normal(rng, (MANY, 2, 64), mx.bfloat16)
    result = MLX.quantized_matmul(x, *arrays, **weights.options | {"transpose": transpose})
    dense = weights.exact[0].T if transpose else weights.exact[0]
    assert_close(result, host(x) @ dense, tolerance=TOLERANCE[mx.bfloat16])


def test_linear_attention_and_convolutions_of_many_sequences() -> None:
    """As for a few of them."""
    some, half = mx.array(SOME), mx.bfloat16
    x, weight = random(MANY, 3, 16, dtype=half), random(16, 4, dtype=half)
    assert mx.array_equal(mlx_cuda.short_conv(x, weight)[0][some], mlx_cuda.short_conv(x[some], weight)[0])
    for length in 1, 70:
        q, k, v = (random(MANY, length, 1, 32, dtype=half) for _ in range(3))
        g, beta = mx.sigmoid(random(MANY, length, 1, dtype=mx.float32)), mx.full((MANY, length, 1), 0.5)
        k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
        arrays = (q, k, v, g, beta)
        few = mlx_cuda.gated_delta(*(each[some] for each in arrays))
        for result, wanted in zip(mlx_cuda.gated_delta(*arrays), few, strict=True):
            assert mx.allclose(result[some], wanted, 2e-2, 2e-2)


# ------------------------------------------------------------------------------------------------------- few tiles of K
@pytest.mark.parametrize("form", [Form("affine", 4, 64), Form("affine", 8, 64), Form("affine", 4, 128), Form("mxfp4", 4, 32)], ids=str)
@pytest.mark.parametrize("k", [64, 128, 192, 256])
def test_matmuls_with_one_and_two_tiles_of_k(rng: np.random.Generator, form: Form, k: int) -> None:
    """MLX's kernel reads beyond the end of x and of the weights: run under compute-sanitizer's memcheck, this file shows it."""
    if k % form.group_size:
        pytest.skip("no whole group")
    weights = quantized_cases.draw(rng, (4, 128, k), form, mx.bfloat16)
    x = normal(rng, (4, 6, k), mx.bfloat16)
    result = MLX.quantized_matmul(x, *weights.arrays, **weights.options)
    assert_close(result, host(x) @ weights.exact.swapaxes(1, 2), tolerance=TOLERANCE[mx.bfloat16])
    values = quantized_cases.draw(rng, (4, 128, k), form, mx.bfloat16)
    rows, cotangent = normal(rng, (4, 6, 128), mx.bfloat16), normal(rng, (4, 6, k), mx.bfloat16)

    def matmul(rows: mx.array) -> Any:
        return MLX.quantized_matmul(rows, *values.arrays, **values.options | {"transpose": False})

    out, (gradient,) = mx.vjp(matmul, [rows], [cotangent])
    assert_close(out[0], host(rows) @ values.exact, tolerance=TOLERANCE[mx.bfloat16])
    assert_close(gradient, host(cotangent) @ values.exact.swapaxes(1, 2), tolerance=GRADIENT_TOLERANCE[mx.bfloat16])
