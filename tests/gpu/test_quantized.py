"""The native kernels of quantised weights: their values, and matmuls of few rows with them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda._loader.native
import numpy as np
import pytest

from . import quantized_cases as cases
from .formats import FORMS, Form
from .reference import Array
from .support import DTYPES, ROUNDOFF, assert_close, assert_fused, host, normal, poison

pytestmark = pytest.mark.gpu

# One rounding of a result whose sums are float32; float32 itself: those sums.
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 5e-6}

ONE_OF_EACH = [form for form in FORMS if form.mode != "affine" or form.group_size == 64]
FLOATS = [form for form in FORMS if form.mode != "affine"]

formats = pytest.mark.parametrize("form", FORMS, ids=str)
one_of_each = pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


def weights(rng: np.random.Generator, form: Form, shape: tuple[int, ...], dtype: mx.Dtype) -> cases.Weights:
    return cases.any_bits(rng, shape, form, dtype)


def values(given: cases.Weights, dtype: mx.Dtype) -> Array:
    """In float64, rounded to the dtype once."""
    return given.exact if dtype == mx.float32 else host(mx.array(given.exact.astype(np.float32)).astype(dtype))


def part_of(given: cases.Weights, cut: Any) -> cases.Weights:
    return cases.Weights(tuple(array[cut] for array in given.arrays), given.exact[cut], given.form)


def native() -> Any:
    module = mlx_cuda._loader.native.load()
    assert not isinstance(module, Exception), module
    return module


def arguments(given: cases.Weights) -> tuple[tuple[Any, ...], tuple[int, int, str]]:
    """Packed weights, scales and biases or None; and how they are quantised, in the order of MLX's arguments."""
    return (*given.arrays, None)[:3], (given.form.group_size, given.form.bits, given.form.mode)


def dequantize(given: cases.Weights, dtype: mx.Dtype) -> mx.array:
    parts, options = arguments(given)
    result: mx.array = native().dequantize(*parts, *options, dtype, mx.default_stream(mx.gpu))
    return result


def upstream(given: cases.Weights, dtype: mx.Dtype) -> mx.array:
    (w, scales, biases), options = arguments(given)
    return mx.dequantize(w, scales, biases, *options, dtype=dtype)


def matmul(x: mx.array, given: cases.Weights, lhs: mx.array | None = None, rhs: mx.array | None = None, transpose: bool = True) -> mx.array:
    parts, options = arguments(given)
    result: mx.array = native().quantized_small_m(x, *parts, *options, lhs, rhs, transpose, False, False, mx.default_stream(mx.gpu))
    return result


def check(x: mx.array, given: cases.Weights, transpose: bool = True) -> None:
    w = values(given, x.dtype)
    expected = host(x) @ (w.swapaxes(-1, -2) if transpose else w)
    poison(lambda: matmul(x * float("nan"), given, transpose=transpose), expected.shape, x.dtype)
    result = matmul(x, given, transpose=transpose)
    assert_fused(result, "QuantizedSmallM")
    assert result.dtype == x.dtype
    assert result.shape == expected.shape
    assert_close(result, expected, tolerance=TOLERANCE[x.dtype], about=(x.shape, given.exact.shape))


# ------------------------------------------------------------------------------------------------------------------------ values
@formats
@dtypes
def test_values_are_upstreams(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (3, 37, 384), dtype)
    result = dequantize(given, dtype)
    assert_fused(result, "Dequantize")
    assert np.array_equal(host(result), host(upstream(given, dtype)))
    assert_close(result, given.exact, tolerance=ROUNDOFF[dtype])


@pytest.mark.parametrize("form", FLOATS, ids=str)
@dtypes
def test_every_scale_and_nan_is_upstreams(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    words = rng.integers(0, 2**32, (256, form.group_size * form.bits // 32), dtype=np.uint32)
    given = cases.weights_of((mx.array(words), mx.arange(256, dtype=mx.uint8)[:, None]), form)
    assert np.array_equal(host(dequantize(given, dtype)), host(upstream(given, dtype)), equal_nan=True)


def test_what_mx_quantize_gives(rng: np.random.Generator) -> None:
    """The layout is MLX's, not only the tests'."""
    for form in ONE_OF_EACH:
        matrix = normal(rng, (33, 256), mx.bfloat16)
        given = cases.weights_of(tuple(mx.quantize(matrix, **form.options)), form)
        assert_close(dequantize(given, mx.bfloat16), host(matrix), tolerance=0.6)
        assert np.allclose(host(dequantize(given, mx.bfloat16)), given.exact, rtol=2**-8, atol=1e-6)


@one_of_each
def test_values_of_views(rng: np.random.Generator, form: Form) -> None:
    """Every second matrix, a range of rows, and rows that are apart."""
    given = weights(rng, form, (5, 40, 512), mx.float16)
    for cut in (np.s_[1::2], np.s_[:, 7:19], np.s_[:, ::3], np.s_[::-1, 3:]):
        assert_close(dequantize(part_of(given, cut), mx.float16), given.exact[cut], tolerance=ROUNDOFF[mx.float16])


# ---------------------------------------------------------------------------------------------------------------------- matmuls
@formats
@halves
@pytest.mark.parametrize(("n", "k"), [(97, 384), (300, 1152), (33, 128)])
def test_matches_float64(rng: np.random.Generator, form: Form, dtype: mx.Dtype, n: int, k: int) -> None:
    given = weights(rng, form, (n, k), dtype)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 137):
        check(normal(rng, (rows, k), dtype), given)


@one_of_each
@pytest.mark.parametrize(("n", "k"), [(4096, 512), (100, 14336), (9000, 1024), (1, 64), (31, None), (65, 2880), (512, 4096)])
def test_sizes(rng: np.random.Generator, form: Form, n: int, k: int | None) -> None:
    """Many columns and one, long rows, a single group, and rows that are no whole number of slices or of the scales' bytes."""
    k = k or form.group_size
    given = weights(rng, form, (n, k), mx.bfloat16)
    for rows in (1, 8, 12, 40, 90):
        check(normal(rng, (rows, k), mx.bfloat16), given)


@formats
def test_float32(rng: np.random.Generator, form: Form) -> None:
    given = weights(rng, form, (77, 640), mx.float32)
    for rows in (1, 2, 4, 7, 64):
        check(normal(rng, (rows, 640), mx.float32), given)


@formats
@dtypes
def test_not_transposed(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    for k, n in ((1, 128), (77, 384), (1000, 256)):
        given = weights(rng, form, (k, n), dtype)
        for rows in (1, 4, 9):
            check(normal(rng, (rows, k), dtype), given, transpose=False)


@pytest.mark.parametrize("k", [16, 48, 144, 1040])
@dtypes
def test_an_odd_number_of_small_groups(rng: np.random.Generator, k: int, dtype: mx.Dtype) -> None:
    check(normal(rng, (3, k), dtype), weights(rng, Form("nvfp4", 4, 16), (45, k), dtype))


@pytest.mark.parametrize("bits", [3, 5, 6])
@halves
@pytest.mark.parametrize("k", [32, 96, 160, 192, 1120])
def test_rows_that_are_no_whole_pieces(rng: np.random.Generator, bits: int, dtype: mx.Dtype, k: int) -> None:
    """Rows of packed weights that 8 or 16 bytes do not divide, or that end within what is copied at once."""
    given = weights(rng, Form("affine", bits, 32), (133, k), dtype)
    for rows in (1, 7, 9, 40, 70, 130):
        check(normal(rng, (rows, k), dtype), given)


@one_of_each
@dtypes
def test_layouts_of_x(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (50, 256), dtype)
    whole = normal(rng, (6, 4, 520), dtype)
    for x in (whole[..., :256], whole[..., 1:257], whole[::2, 1:3, 256:512], whole[0, 0, :256], whole[:, :, :256].swapaxes(0, 1)):
        check(x, given)
    for rows in 5, 50:
        check(mx.broadcast_to(whole[0, :1, :256], (rows, 256)), given)
    check(normal(rng, (256, 6), dtype).T, given)


@one_of_each
@dtypes
def test_layouts_of_weights(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (3, 90, 512), dtype)
    x = normal(rng, (50, 512), dtype)
    for cut in (np.s_[1], np.s_[2, 11:70], np.s_[0, ::3], np.s_[1, ::-1]):
        part = part_of(given, cut)
        expected = host(x) @ values(part, dtype).T
        for rows in 5, 50:
            assert_close(matmul(x[:rows], part), expected[:rows], tolerance=TOLERANCE[dtype], about=cut)


@one_of_each
@dtypes
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("transpose", [True, False])
def test_gathered(rng: np.random.Generator, form: Form, dtype: mx.Dtype, rows: int, transpose: bool) -> None:
    given = weights(rng, form, (6, 128, 256), dtype)
    x = normal(rng, (5, rows, 256 if transpose else 128), dtype)
    dense = values(given, dtype)
    if transpose:
        dense = dense.swapaxes(-1, -2)
    rhs = rng.integers(0, 6, 11)
    lhs = rng.integers(0, 5, 11)
    result = matmul(x, given, mx.array(lhs.astype(np.uint32)), mx.array(rhs.astype(np.uint32)), transpose)
    assert_close(result, host(x)[lhs] @ dense[rhs], tolerance=TOLERANCE[dtype])
    result = matmul(x, given, None, mx.array(rhs[:5].astype(np.uint32)), transpose)
    assert_close(result, host(x) @ dense[rhs[:5]], tolerance=TOLERANCE[dtype])


def test_many_matmuls(rng: np.random.Generator) -> None:
    """More than run at once, each block with several tiles."""
    given = weights(rng, Form("affine", 4, 64), (9, 200, 768), mx.bfloat16)
    x = normal(rng, (64, 1, 768), mx.bfloat16)
    rhs = rng.integers(0, 9, 64)
    result = matmul(x, given, None, mx.array(rhs.astype(np.uint32)))
    expected = host(x) @ values(given, mx.bfloat16)[rhs].swapaxes(-1, -2)
    assert_close(result, expected, tolerance=TOLERANCE[mx.bfloat16])


@one_of_each
@pytest.mark.parametrize("rows", [1, 20])
def test_indices_after_the_last_are_the_last(rng: np.random.Generator, form: Form, rows: int) -> None:
    given, x = weights(rng, form, (3, 40, 512), mx.bfloat16), normal(rng, (2, rows, 512), mx.bfloat16)
    lhs, rhs = mx.array([0, 1, 5, 2**32 - 1], mx.uint32), mx.array([0, 3, 2**32 - 1, 2], mx.uint32)
    expected = matmul(x, given, mx.minimum(lhs, 1), mx.minimum(rhs, 2))
    assert mx.array_equal(matmul(x, given, lhs, rhs), expected)


@one_of_each
def test_indices_after_the_last_of_pairs_that_share(rng: np.random.Generator, form: Form) -> None:
    given, x = weights(rng, form, (3, 256, 768), mx.bfloat16), normal(rng, (2, 1, 768), mx.bfloat16)
    lhs, rhs = rng.integers(0, 2**32, (2, 60), np.uint32)
    lhs[:20], rhs[:40] = 1, rng.integers(0, 3, 40)
    result = matmul(x, given, mx.array(lhs), mx.array(rhs))
    assert mx.array_equal(result, matmul(x, given, mx.array(np.minimum(lhs, 1)), mx.array(np.minimum(rhs, 2))))
    expected = host(x)[np.minimum(lhs, 1)] @ values(given, mx.bfloat16)[np.minimum(rhs, 2)].swapaxes(-1, -2)
    assert_close(result, expected, tolerance=TOLERANCE[mx.bfloat16])


@one_of_each
@halves
def test_infinite_numbers_stay_in_their_pairs(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """Columns of one matmul: pairs that name the same expert."""
    given = weights(rng, form, (4, 128, 768), dtype)
    x = np.array(normal(rng, (64, 1, 768), mx.float32))
    x[5, 0, 100], x[40, 0, 767] = np.nan, np.inf
    result = host(matmul(mx.array(x).astype(dtype), given, None, mx.array(rng.integers(0, 4, 64).astype(np.uint32))))
    assert np.isnan(result[5]).all()
    assert not np.isfinite(result[40]).any()
    assert np.isfinite(np.delete(result, [5, 40], 0)).all()


@halves
@pytest.mark.parametrize("rows", [3, 20, 70])
def test_nans_reach_their_columns_only(rng: np.random.Generator, dtype: mx.Dtype, rows: int) -> None:
    given = weights(rng, Form("mxfp8", 8, 32), (70, 512), dtype)
    words = np.array(given.arrays[0])
    words.view(np.uint8)[[5, 40, 69], [0, 301, 511]] = [127, 255, 127]
    result = host(matmul(normal(rng, (rows, 512), dtype), given._replace(arrays=(mx.array(words), given.arrays[1]))))
    assert np.array_equal(np.isnan(result).any(0), np.isnan(result).all(0))
    assert np.flatnonzero(np.isnan(result[0])).tolist() == [5, 40, 69]


@one_of_each
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [9, 60])
def test_infinite_and_missing_numbers_of_x_stay_in_their_rows(rng: np.random.Generator, form: Form, dtype: mx.Dtype, rows: int) -> None:
    given = weights(rng, form, (40, 512), dtype)
    x = np.array(normal(rng, (rows, 512), mx.float32))
    x[2, 100], x[7, 511] = np.nan, np.inf
    result = host(matmul(mx.array(x).astype(dtype), given))
    assert np.isnan(result[2]).all()
    assert not np.isfinite(result[7]).any()
    assert np.isfinite(np.delete(result, [2, 7], 0)).all()


@one_of_each
def test_gradient_of_x(rng: np.random.Generator, form: Form) -> None:
    given = weights(rng, form, (64, 256), mx.float16)
    x, cotangent = normal(rng, (3, 256), mx.float16), normal(rng, (3, 64), mx.float16)
    (gradient,) = mx.vjp(lambda x: matmul(x, given), [x], [cotangent])[1]
    assert_close(gradient, host(cotangent) @ values(given, mx.float16), tolerance=5e-3)


@pytest.mark.parametrize("form", [Form("mxfp4", 4, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)], ids=str)
@pytest.mark.parametrize("transpose", [True, False])
def test_gradient_where_mlx_has_no_kernel(rng: np.random.Generator, form: Form, transpose: bool) -> None:
    given = weights(rng, form, (4, 40, 96), mx.float16)
    dense = values(given, mx.float16)
    k, n = (96, 40) if transpose else (40, 96)
    x, cotangent = normal(rng, (4, 3, k), mx.float16), normal(rng, (4, 3, n), mx.float16)
    expected = host(cotangent) @ (dense if transpose else dense.swapaxes(-1, -2))
    (gradient,) = mx.vjp(lambda x: matmul(x, given, None, mx.arange(4, dtype=mx.uint32), transpose), [x], [cotangent])[1]
    assert_close(gradient, expected, tolerance=5e-3)
    one = part_of(given, 0)
    (gradient,) = mx.vjp(lambda x: matmul(x, one, transpose=transpose), [x[0]], [cotangent[0]])[1]
    assert_close(gradient, expected[0], tolerance=5e-3)


def test_many_dimensions_of_a_view(rng: np.random.Generator) -> None:
    """More than the kernel that copies knows."""
    given = weights(rng, Form("affine", 4, 64), (40, 128), mx.float16)
    x = normal(rng, (128, *[2] * 9), mx.float16).T
    assert_close(matmul(x, given), host(x) @ values(given, mx.float16).T, tolerance=TOLERANCE[mx.float16])


def test_vmap(rng: np.random.Generator) -> None:
    given = weights(rng, Form("affine", 4, 64), (64, 256), mx.float16)
    x = normal(rng, (3, 256, 5), mx.float16)
    result = mx.vmap(lambda x: matmul(x, given), in_axes=2)(x)
    assert_fused(result, "QuantizedSmallM")
    assert_close(result, np.moveaxis(host(x), 2, 0) @ values(given, mx.float16).T, tolerance=TOLERANCE[mx.float16])


def test_compiled_with_what_is_around_it(rng: np.random.Generator) -> None:
    given = weights(rng, Form("affine", 4, 64), (96, 256), mx.bfloat16)
    x = normal(rng, (4, 256), mx.bfloat16)
    function = mx.compile(lambda x: matmul(matmul(x * 2, given)[:, :64] @ mx.ones((64, 256), mx.bfloat16), given))
    dense = values(given, mx.bfloat16)
    expected = np.repeat((2 * host(x) @ dense.T)[:, :64].sum(-1, keepdims=True), 256, -1) @ dense.T
    for _ in range(2):
        assert_close(function(x), expected, tolerance=4 * TOLERANCE[mx.bfloat16])
