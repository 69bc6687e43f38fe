"""Matmuls of rows with the matrix of their group, and of pairs of matrices, against float64: every layout, and what lies beside."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import mlx_cuda._loader.native
import numpy as np
import pytest

from .reference import Array
from .support import GRADIENT_TOLERANCE, TOLERANCE, device, host, normal, primitives, relative_error

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=("float16", "bfloat16"))


def native() -> Any:
    return mlx_cuda._loader.native.load()


def grouped(x: mx.array, w: mx.array, offsets: mx.array, *, transpose: bool = True) -> mx.array:
    result: mx.array = native().grouped_matmul(x, w, offsets, transpose, mx.default_stream(mx.gpu))
    return result


def gathered(x: mx.array, w: mx.array, lhs: mx.array | None, rhs: mx.array, *, transpose: bool = True, ordered: bool = False) -> mx.array:
    result: mx.array = native().gather_mm(x, w, lhs, rhs, transpose, ordered, mx.default_stream(mx.gpu))
    return result


def rows_of_groups(bounds: list[int]) -> list[slice]:
    return [slice(begin, max(begin, end)) for begin, end in itertools.pairwise(bounds)]


def matmul(x: Array, w: Array, bounds: list[int]) -> Array:
    """Of float64 x [M, K] and w [E, N, K]."""
    out = np.zeros((x.shape[0], w.shape[1]))
    for rows, matrix in zip(rows_of_groups(bounds), w, strict=True):
        out[rows] = x[rows] @ matrix.T
    return out


def size_of(x: Array, w: Array, bounds: list[int]) -> Array:
    """How large such sums are when their signs are random: what rounding errors are relative to, also where a sum cancels."""
    return np.sqrt(matmul(x * x, w * w, bounds))


def weight_gradient(x: Array, y: Array, bounds: list[int]) -> Array:
    return np.stack([y[rows].T @ x[rows] for rows in rows_of_groups(bounds)])


def split(chance: random.Random, rows: int, groups: int) -> list[int]:
    """Bounds of groups: even, random, one with all rows, many empty, or with rows of no group before and behind."""
    kind = chance.choice(("even", "random", "one", "sparse", "gaps"))
    if kind == "even":
        return [rows * i // groups for i in range(groups + 1)]
    if kind == "one":
        which = chance.randrange(groups)
        return [0 if i <= which else rows for i in range(groups + 1)]
    cuts = sorted(chance.randint(0, rows) for _ in range(groups + 1))
    if kind == "sparse":
        cuts = sorted(chance.choice((0, rows // 3, rows // 3 + 1, rows)) for _ in range(groups + 1))
    return cuts if kind == "gaps" else [0, *cuts[1:-1], rows]


def laid_out(chance: random.Random, rng: np.random.Generator, rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """[rows, columns]: contiguous, the columns of something wider, not on 16 bytes, by columns, or one row for all."""
    layout = chance.choice(("contiguous", "contiguous", "wide", "unaligned", "columns", "one for all"))
    if layout == "wide":
        return normal(rng, (rows, columns + 16), dtype)[:, 8 : columns + 8]
    if layout == "unaligned":
        return normal(rng, (rows, columns + 3), dtype)[:, 1 : columns + 1]
    if layout == "columns":
        return normal(rng, (columns, rows), dtype).swapaxes(0, 1)
    if layout == "one for all":
        return mx.broadcast_to(normal(rng, (1, columns), dtype), (rows, columns))
    return normal(rng, (rows, columns), dtype)


def weights(chance: random.Random, rng: np.random.Generator, groups: int, n: int, k: int, dtype: mx.Dtype) -> mx.array:
    """[groups, n, k]: contiguous, with the last two dimensions exchanged in memory, every other matrix, or not on 16 bytes."""
    layout = chance.choice(("contiguous", "exchanged", "every other", "unaligned", "scattered"))
    if layout == "exchanged":
        return normal(rng, (groups, k, n), dtype).swapaxes(1, 2)
    if layout == "every other":
        return normal(rng, (groups * 2, n, k), dtype)[::2]
    if layout == "unaligned":
        return normal(rng, (groups, n, k + 1), dtype)[..., 1:]
    if layout == "scattered":
        return normal(rng, (n, groups, k * 2), dtype)[..., ::2].swapaxes(0, 1)
    return normal(rng, (groups, n, k), dtype)


def check(chance: random.Random, dtype: mx.Dtype) -> None:
    """One random call; a failure shows the arguments."""
    rng = np.random.default_rng(chance.getrandbits(32))
    rows = chance.choice((1, 2, 7, 63, 64, 65, 128, 129, 300, 1000, 3000))
    groups = chance.choice((1, 2, 3, 8, 31, 33, 100))
    n = chance.choice((1, 7, 8, 64, 67, 128, 136, 256, 264, 520))
    k = chance.choice((8, 16, 64, 72, 128, 200, 256, 512)) if chance.random() < 0.85 else chance.choice((1, 3, 63, 100, 129))
    transpose = chance.random() < 0.6
    bounds = split(chance, rows, groups)
    with_begin = bounds[0] > 0 or chance.random() < 0.5
    x, w = laid_out(chance, rng, rows, k, dtype), weights(chance, rng, groups, n, k, dtype)
    offsets = mx.array(bounds if with_begin else bounds[1:], mx.int32)
    out = grouped(x, w if transpose else w.swapaxes(1, 2), offsets, transpose=transpose)
    about = (rows, groups, n, k, transpose, with_begin, bounds)
    assert out.dtype == dtype
    error = relative_error(out, matmul(host(x), host(w), bounds), size_of(host(x), host(w), bounds))
    assert error <= TOLERANCE[dtype], (error, about)


@dtypes
@pytest.mark.parametrize("seed", range(40))
def test_groups(dtype: mx.Dtype, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    for _ in range(3):
        check(chance, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(4096, 2, 512, 256), (2500, 2, 256, 1024), (5000, 3, 264, 192)])
def test_long_groups(dtype: mx.Dtype, shape: tuple[int, int, int, int]) -> None:
    """Of so many rows and columns that a block has several tiles."""
    rows, groups, n, k = shape
    rng = np.random.default_rng(rows)
    x, w = normal(rng, (rows, k), dtype), normal(rng, (groups, n, k), dtype)
    for bounds in ([rows * i // groups for i in range(groups + 1)], [0] * groups + [rows], [3, *[rows - 200] * groups]):
        expected = matmul(host(x), host(w), bounds)
        assert relative_error(grouped(x, w, mx.array(bounds, mx.int32)), expected) <= TOLERANCE[dtype]
        turned = mx.contiguous(w.swapaxes(1, 2))
        assert relative_error(grouped(x, turned, mx.array(bounds, mx.int32), transpose=False), expected) <= TOLERANCE[dtype]


@dtypes
def test_many_groups(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    x, w = normal(rng, (3000, 64), dtype), normal(rng, (2500, 16, 64), dtype)
    bounds = sorted(int(cut) for cut in rng.integers(0, 3000, 2501))
    assert relative_error(grouped(x, w, mx.array(bounds, mx.int32)), matmul(host(x), host(w), bounds)) <= TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("k", [64, 63])
def test_nothing_leaks(dtype: mx.Dtype, k: int) -> None:
    """Rows and matrices of other groups may hold anything, and every row is written: zeros where it has no group."""
    rng = np.random.default_rng(k)
    values = rng.standard_normal((700, k))
    bounds = [10, 200, 200, 333, 600]
    bad_rows = np.r_[0:10, 333:700]
    values[bad_rows] = np.nan
    matrices = rng.standard_normal((4, 40, k))
    matrices[1] = np.inf
    x, w = device(values, dtype), device(matrices, dtype)
    mx.eval([mx.full((700, 40), float("nan"), dtype) for _ in range(4)])
    out = host(grouped(x, w, mx.array(bounds, mx.int32)))
    good = np.r_[10:333]
    assert relative_error(out[good], matmul(host(x), host(w)[[0, 0, 2, 3]], bounds)[good]) <= TOLERANCE[dtype]
    assert (out[:10] == 0).all()
    assert (out[600:] == 0).all()
    assert np.isnan(out[333:600]).all()


def test_offsets_may_hold_anything() -> None:
    rng = np.random.default_rng(0)
    x, w = normal(rng, (300, 64), mx.float16), normal(rng, (9, 72, 64), mx.float16)
    for _ in range(20):
        bounds = rng.integers(-(2**31), 2**31 - 1, 10) if rng.random() < 0.5 else rng.integers(-400, 700, 10)
        mx.eval(grouped(x, w, mx.array(bounds.astype(np.int32))))
    inside = grouped(x, w, mx.array([-5, 100, 50, 2**31 - 1, *[300] * 6], mx.int32))
    assert relative_error(inside[:50], matmul(host(x), host(w), [0, 100, 100, 300, *[300] * 6])[:50]) <= TOLERANCE[mx.float16]


@dtypes
@pytest.mark.parametrize("seed", range(12))
def test_gradients(dtype: mx.Dtype, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    rng = np.random.default_rng(seed)
    rows, groups = chance.choice((1, 64, 65, 300, 1000, 4000)), chance.choice((1, 3, 9))
    n, k = chance.choice((8, 40, 136, 264, 13, 1040)), chance.choice((8, 72, 128, 320, 1032))
    bounds = split(chance, rows, groups)
    transpose = chance.random() < 0.5
    x, w, y = laid_out(chance, rng, rows, k, dtype), weights(chance, rng, groups, n, k, dtype), laid_out(chance, rng, rows, n, dtype)
    offsets = mx.array(bounds, mx.int32)
    given = w if transpose else mx.contiguous(w.swapaxes(1, 2))
    _, (dx, dw) = mx.vjp(lambda x, w: grouped(x, w, offsets, transpose=transpose), [x, given], [y])
    dw = dw if transpose else dw.swapaxes(1, 2)
    about = (rows, groups, n, k, transpose, bounds)
    expected = matmul(host(y), host(w).swapaxes(1, 2), bounds)
    assert relative_error(dx, expected) <= GRADIENT_TOLERANCE[dtype], about
    assert relative_error(dw, weight_gradient(host(x), host(y), bounds)) <= GRADIENT_TOLERANCE[dtype], about


def test_gradient_beside_nan() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 64))
    values[:10] = np.nan
    values[170:] = np.inf
    y = device(rng.standard_normal((300, 72)), mx.bfloat16)
    x, w = device(values, mx.bfloat16), normal(rng, (2, 72, 64), mx.bfloat16)
    bounds = [10, 75, 170]
    _, (_, dw) = mx.vjp(lambda x, w: grouped(x, w, mx.array(bounds, mx.int32)), [x, w], [y])
    assert relative_error(dw, weight_gradient(host(x), host(y), bounds)) <= TOLERANCE[mx.bfloat16]


def test_second_gradient() -> None:
    rng = np.random.default_rng(1)
    x, w = normal(rng, (100, 64), mx.float16), normal(rng, (3, 32, 64), mx.float16)
    bounds = [0, 30, 30, 100]
    offsets = mx.array(bounds, mx.int32)

    def squares(w: mx.array) -> mx.array:
        return (grouped(x, w, offsets).astype(mx.float32) ** 2).sum() / 2

    direction = normal(rng, (3, 32, 64), mx.float16)
    _, (second,) = mx.vjp(mx.grad(squares), [w], [direction])
    through = matmul(host(x), host(direction), bounds)
    assert relative_error(second, weight_gradient(host(x), through, bounds)) <= GRADIENT_TOLERANCE[mx.float16]


@dtypes
@pytest.mark.parametrize("seed", range(40))
def test_pairs(dtype: mx.Dtype, seed: int) -> None:
    """Few and many pairs, with and without indices of x, sorted or not, of matrices of several rows."""
    chance = random.Random(seed)  # noqa: S311
    rng = np.random.default_rng(seed)
    pairs, groups = chance.choice((1, 2, 8, 33, 64, 300, 2000)), chance.choice((1, 8, 128, 600, 13000))
    n, k = (chance.choice((1, 33, 64, 136)), chance.choice((8, 64, 264, 13))) if groups < 13000 else (8, 16)
    matrix_rows = chance.choice((1, 1, 1, 3))
    repeats = chance.choice((1, 2, pairs))
    if pairs % repeats:
        repeats = 1
    transpose, ordered, indexed = (chance.random() < 0.5 for _ in range(3))
    matrices = chance.choice((1, 5, pairs)) if indexed else pairs // repeats
    x, w = normal(rng, (matrices, matrix_rows, k), dtype), weights(chance, rng, groups, n, k, dtype)
    lhs = rng.integers(0, matrices, pairs) if indexed else np.arange(pairs) // repeats
    rhs = rng.integers(0, groups, pairs)
    rhs = np.sort(rhs) if ordered else rhs
    out = gathered(
        x, w if transpose else w.swapaxes(1, 2), mx.array(lhs.astype(np.uint32)) if indexed else None, mx.array(rhs.astype(np.uint32)),
        transpose=transpose, ordered=ordered,
    )  # fmt: skip
    rows, matrices_of_groups = host(x), host(w)
    expected, squares = (
        np.stack([rows[left] ** power @ matrices_of_groups[right].T ** power for left, right in zip(lhs, rhs, strict=True)])
        for power in (1, 2)
    )
    about = (pairs, groups, n, k, matrix_rows, repeats, transpose, ordered, indexed, matrices)
    assert relative_error(out, expected, np.sqrt(squares)) <= TOLERANCE[dtype], about


@dtypes
@pytest.mark.parametrize("pairs", [5, 500])
@pytest.mark.parametrize("ordered", [False, True])
def test_pairs_without_weights(dtype: mx.Dtype, pairs: int, ordered: bool) -> None:
    """An index that is too large gives zeros."""
    rng = np.random.default_rng(pairs)
    x, w = normal(rng, (pairs, 1, 64), dtype), normal(rng, (7, 24, 64), dtype)
    rhs = rng.integers(0, 10, pairs)
    rhs[:2] = (7, 2**32 - 1)
    rhs = np.sort(rhs) if ordered else rhs
    mx.eval([mx.full((pairs, 1, 24), float("nan"), dtype) for _ in range(4)])
    out = gathered(x, w, None, mx.array(rhs.astype(np.uint32)), ordered=ordered)
    matrices = np.concatenate([host(w), np.zeros((1, 24, 64))])
    expected = np.stack([row @ matrices[min(at, 7)].T for row, at in zip(host(x), rhs, strict=True)])
    assert relative_error(out, expected) <= TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("n", [24, 13])
def test_gradients_of_pairs(dtype: mx.Dtype, ordered: bool, indexed: bool, n: int) -> None:
    rng = np.random.default_rng(n)
    pairs, groups, k = 90, 5, 64
    x, w, y = normal(rng, (30, 2, k), dtype), normal(rng, (groups, n, k), dtype), normal(rng, (pairs, 2, n), dtype)
    lhs = rng.integers(0, 30, pairs) if indexed else np.arange(pairs) // 3
    rhs = rng.integers(0, groups, pairs)
    rhs = np.sort(rhs) if ordered else rhs
    left, right = mx.array(lhs.astype(np.uint32)) if indexed else None, mx.array(rhs.astype(np.uint32))
    _, (dx, dw) = mx.vjp(lambda x, w: gathered(x, w, left, right, ordered=ordered), [x, w], [y])
    expected_x, expected_w = np.zeros(x.shape), np.zeros(w.shape)
    rows, matrices, gradients = host(x), host(w), host(y)
    for left_at, right_at, gradient in zip(lhs, rhs, gradients, strict=True):
        expected_x[left_at] += gradient @ matrices[right_at]
        expected_w[right_at] += gradient.T @ rows[left_at]
    assert relative_error(dx, expected_x) <= GRADIENT_TOLERANCE[dtype]
    assert relative_error(dw, expected_w) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("experts", [1, 7, 3000])
def test_offsets_of_experts(rows: int, experts: int) -> None:
    indices = np.sort(np.random.default_rng(rows).integers(0, experts, rows))
    offsets: mx.array = native().expert_offsets(mx.array(indices.astype(np.uint32)), experts, mx.default_stream(mx.gpu))
    assert np.array_equal(np.array(offsets), np.searchsorted(indices, np.arange(experts + 1)))


def test_one_primitive() -> None:
    x, w = mx.ones((100, 64), mx.float16), mx.ones((3, 16, 64), mx.float16)
    offsets, rhs = mx.array([0, 30, 60, 100], mx.int32), mx.zeros((100,), mx.uint32)
    mx.eval(x, w, offsets, rhs)
    assert primitives(grouped(x, w, offsets)) == {"GroupedMatmul"}
    assert primitives(gathered(x[:, None], w, None, rhs)) - {"Reshape", "ExpandDims", "Slice"} == {"GatherMatmul"}


def test_compiled_and_vectorised() -> None:
    rng = np.random.default_rng(2)
    x, w = normal(rng, (2, 100, 64), mx.float16), normal(rng, (3, 16, 64), mx.float16)
    offsets = mx.array([0, 30, 60, 100], mx.int32)
    expected = np.stack([matmul(rows, host(w), [0, 30, 60, 100]) for rows in host(x)])
    step = mx.compile(lambda x, w: grouped(x, w, offsets) + grouped(x, w, offsets))
    for _ in range(3):
        assert relative_error(step(x[0], w), 2 * expected[0]) <= TOLERANCE[mx.float16]
    both = mx.vmap(lambda x: grouped(x, w, offsets))(x)
    assert relative_error(both, expected) <= TOLERANCE[mx.float16]
    _, (moved,) = mx.jvp(lambda x, w: grouped(x, w, offsets), [x[0], w], [x[1], w])
    assert relative_error(moved, expected[0] + expected[1]) <= 2 * TOLERANCE[mx.float16]
