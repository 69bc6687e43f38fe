"""Matmuls of groups of rows with quantised matrices: on Hopper the kernel that unpacks them itself, elsewhere dequantised ones."""

from __future__ import annotations

import itertools
import random

import mlx.core as mx
import numpy as np
import pytest

from . import quantized_cases as cases
from .formats import Form
from .reference import Array
from .support import TOLERANCE, assert_close, assert_fused, host, normal, poison
from .test_quantized import FLOATS, arguments, formats, halves, native, one_of_each, part_of, upstream, values, weights

pytestmark = pytest.mark.gpu


def grouped(x: mx.array, given: cases.Weights, bounds: list[int], *, transpose: bool = True) -> mx.array:
    parts, options = arguments(given)
    offsets = mx.array(bounds, mx.int32)
    result: mx.array = native().grouped_quantized(x, *parts, *options, offsets, transpose, mx.default_stream(mx.gpu))
    return result


def matmul(x: mx.array, given: cases.Weights) -> mx.array:
    """As one group of all rows."""
    return grouped(x, part_of(given, np.s_[None]), [0, x.shape[0]])


def of_groups(x: Array, matrices: Array, bounds: list[int]) -> Array:
    out = np.zeros((len(x), matrices.shape[1]))
    for (begin, end), matrix in zip(itertools.pairwise(bounds), matrices, strict=True):
        out[begin:end] = x[begin:end] @ matrix.T
    return out


def check(x: mx.array, given: cases.Weights) -> None:
    expected = host(x) @ values(given, x.dtype).T
    poison(lambda: matmul(x * float("nan"), given), expected.shape, x.dtype)
    result = matmul(x, given)
    assert_fused(result, "GroupedQuantized")
    assert result.dtype == x.dtype
    assert_close(result, expected, tolerance=TOLERANCE[x.dtype])


@formats
@halves
@pytest.mark.parametrize("rows", [1, 63, 65, 129, 300])
def test_matches_float64(rng: np.random.Generator, form: Form, dtype: mx.Dtype, rows: int) -> None:
    for n, k in ((97, 384), (520, 1152), (8, 128)):
        check(normal(rng, (rows, k), dtype), weights(rng, form, (n, k), dtype))


@one_of_each
@pytest.mark.parametrize(("rows", "n", "k"), [(1000, 4096, 256), (128, 9000, 512), (70, 1, 64), (4000, 1200, 128), (513, 515, 4096)])
def test_sizes(rng: np.random.Generator, form: Form, rows: int, n: int, k: int) -> None:
    """Blocks with several tiles and with none, and one step."""
    check(normal(rng, (rows, k), mx.bfloat16), weights(rng, form, (n, k), mx.bfloat16))


@one_of_each
@halves
def test_layouts(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (3, 90, 512), dtype)
    whole = normal(rng, (150, 2, 1040), dtype)
    for x in (whole[:, 0, :512], whole[:, 1, 1:513], whole[::-1, 0, 8:520], whole[:, 0, : 2 * 512 : 2]):
        check(x, part_of(given, np.s_[1]))
    x = whole[:, 0, :512]
    for cut in (np.s_[2, 11:70], np.s_[0, ::3], np.s_[1, ::-1]):
        assert_close(matmul(x, part_of(given, cut)), host(x) @ values(given, dtype)[cut].T, tolerance=TOLERANCE[dtype])


@one_of_each
@halves
@pytest.mark.parametrize("seed", range(4))
def test_groups(rng: np.random.Generator, form: Form, dtype: mx.Dtype, seed: int) -> None:
    """Even ones, empty ones, one with all rows, and rows before the first and behind the last, which are zeros."""
    chance = random.Random(seed)  # noqa: S311
    for rows, count in ((1, 3), (200, 40), (700, 5), (3000, 9)):
        n, k = chance.choice((8, 67, 264, 520)), chance.choice((128, 384))
        which = chance.randrange(count)
        cuts = sorted(chance.choice((chance.randint(0, rows), rows // 3)) for _ in range(count + 1))
        bounds = chance.choice((cuts, [0] * (which + 1) + [rows] * (count - which), [rows * i // count for i in range(count + 1)]))
        given = weights(rng, form, (count, n, k), dtype)
        x = normal(rng, (rows, k), dtype)
        poison(lambda x=x, given=given, bounds=bounds: grouped(x * float("nan"), given, bounds), (rows, n), dtype)  # type: ignore[misc]
        assert_close(grouped(x, given, bounds), of_groups(host(x), values(given, dtype), bounds), tolerance=TOLERANCE[dtype])


def test_many_groups(rng: np.random.Generator) -> None:
    given = weights(rng, Form("affine", 4, 64), (1500, 16, 64), mx.float16)
    x = normal(rng, (3000, 64), mx.float16)
    bounds = sorted(int(cut) for cut in rng.integers(0, 3000, 1501))
    assert_close(grouped(x, given, bounds), of_groups(host(x), values(given, mx.float16), bounds), tolerance=TOLERANCE[mx.float16])


@one_of_each
@halves
def test_nothing_leaks(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """NaN in a row stays in it, and that of another group's rows or scales has no effect."""
    given = weights(rng, form, (3, 70, 256), dtype)
    x = np.array(normal(rng, (300, 256), mx.float32))
    x[3, 100] = np.inf
    x[100:200] = np.nan
    result = host(grouped(mx.array(x).astype(dtype), given, [0, 100, 200, 300]))
    assert not np.isfinite(result[3]).any()
    assert np.isnan(result[100:200]).all()
    assert np.isfinite(np.delete(result, [3, *range(100, 200)], axis=0)).all()


def test_nans_of_weights_reach_their_columns_only(rng: np.random.Generator) -> None:
    for dtype in (mx.float16, mx.bfloat16):
        given = weights(rng, Form("mxfp8", 8, 32), (70, 512), dtype)
        words = np.array(given.arrays[0])
        words.view(np.uint8)[[5, 40, 69], [0, 301, 511]] = [127, 255, 127]
        result = host(matmul(normal(rng, (130, 512), dtype), given._replace(arrays=(mx.array(words), given.arrays[1]))))
        assert np.array_equal(np.isnan(result).any(0), np.isnan(result).all(0))
        assert np.flatnonzero(np.isnan(result[0])).tolist() == [5, 40, 69]


@pytest.mark.parametrize("form", FLOATS, ids=str)
@halves
def test_every_scale(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """One value of each column meets a 1: the results are the values themselves, whatever the scale."""
    given = weights(rng, form, (256, 128), dtype)
    scales = np.array(given.arrays[1])
    scales[:] = np.arange(256)[:, None]
    given = given._replace(arrays=(given.arrays[0], mx.array(scales)))
    expected = host(upstream(given, dtype))
    good = np.isfinite(expected).all(axis=1)  # 0 times infinity is none
    one = np.zeros((65, 128))
    one[np.arange(65), np.arange(65)] = 1
    result = host(matmul(mx.array(one.astype(np.float32)).astype(dtype), given))
    assert np.array_equal(result[:, good], expected[good, :65].T)
    assert np.isnan(result[:, ~good]).any(axis=0).all()


@one_of_each
def test_steps_that_the_kernel_does_not_take(rng: np.random.Generator, form: Form) -> None:
    """Rows of weights that are no whole number of steps, and weights that are not transposed: dequantised on every GPU."""
    given = weights(rng, form, (3, 264, 5 * max(form.group_size, 32)), mx.bfloat16)
    bounds = [0, 70, 70, 200]
    x = normal(rng, (200, values(given, mx.bfloat16).shape[2]), mx.bfloat16)
    assert_close(grouped(x, given, bounds), of_groups(host(x), values(given, mx.bfloat16), bounds), tolerance=TOLERANCE[mx.bfloat16])
    y = normal(rng, (200, 264), mx.bfloat16)
    expected = of_groups(host(y), values(given, mx.bfloat16).swapaxes(1, 2), bounds)
    assert_close(grouped(y, given, bounds, transpose=False), expected, tolerance=TOLERANCE[mx.bfloat16])


def test_compiled(rng: np.random.Generator) -> None:
    given = weights(rng, Form("affine", 4, 64), (2, 128, 256), mx.float16)
    x = normal(rng, (100, 256), mx.float16)
    first = grouped(x, given, [0, 30, 100])
    assert mx.array_equal(mx.compile(lambda x: grouped(x, given, [0, 30, 100]))(x), first)
