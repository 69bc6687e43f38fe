"""The native kernels of quantised weights: their values, and products of few rows with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda._native
import numpy as np
import pytest

from .support import DTYPES, ROUNDOFF, assert_close, assert_fused, device, host, normal, poison

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reference import Array

pytestmark = pytest.mark.gpu

# One rounding of a result whose sums are float32; float32 itself: those sums.
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 5e-6}

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Format:
    """A mode of ``mx.quantize`` with its options."""

    mode: str
    group_size: int
    bits: int

    def __str__(self) -> str:
        return f"{self.mode}-{self.bits}-{self.group_size}"

    def options(self) -> tuple[int, int, str]:
        """In the order of MLX's arguments."""
        return self.group_size, self.bits, self.mode


FORMATS = [
    *(Format("affine", group_size, bits) for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64, 128)),
    Format("mxfp4", 32, 4),
    Format("mxfp8", 32, 8),
    Format("nvfp4", 16, 4),
]
ONE_OF_EACH = [form for form in FORMATS if form.group_size != 128 and (form.mode != "affine" or form.group_size == 64)]

formats = pytest.mark.parametrize("form", FORMATS, ids=str)
one_of_each = pytest.mark.parametrize("form", ONE_OF_EACH, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


@dataclass(frozen=True)
class Weights:
    """Random packed weights: every pattern of bits is one."""

    form: Format
    w: mx.array
    scales: mx.array
    biases: mx.array | None

    def values(self, dtype: mx.Dtype) -> Array:
        """In float64, from values that have been rounded to the dtype once."""
        exact = dequantized(self)
        return exact if dtype == mx.float32 else host(mx.array(exact.astype(np.float32)).astype(dtype))


def weights(rng: np.random.Generator, form: Format, shape: tuple[int, ...], dtype: mx.Dtype) -> Weights:
    *rows, inner = shape
    words = rng.integers(0, 2**32, (*rows, inner * form.bits // 32), dtype=np.uint32)
    if form.mode == "mxfp8":
        words = without_nans(words)
    groups = (*rows, inner // form.group_size)
    if form.mode != "affine":  # from 2^-12 on; e8m0 up to 2^-2, e4m3 up to 2
        low, high = (115, 126) if form.mode != "nvfp4" else (8, 64)
        return Weights(form, mx.array(words), mx.array(rng.integers(low, high, groups, dtype=np.uint8)), None)
    scales = rng.uniform(0.001, 0.02, groups)
    biases = -scales * (2**form.bits - 1) * rng.uniform(0.2, 0.8, groups)
    return Weights(form, mx.array(words), device(scales, dtype), device(biases, dtype))


def without_nans(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    numbers = words.view(np.uint8)
    return np.where((numbers & 127) == 127, numbers ^ 1, numbers).view(np.uint32)


def unpacked(words: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """A row is a stream of bits, the lowest first."""
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    result: NDArray[np.int64] = (stream.reshape(*words.shape[:-1], -1, bits).astype(np.int64) << np.arange(bits)).sum(-1)
    return result


def from_e4m3(codes: NDArray[Any]) -> Array:
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where((codes & 127) == 127, np.nan, np.where(codes & 128, -size, size))


def dequantized(given: Weights) -> Array:
    """In float64."""
    form = given.form
    codes = unpacked(np.array(given.w), form.bits)
    if given.biases is not None:
        scales, biases = (np.repeat(host(a), form.group_size, -1) for a in (given.scales, given.biases))
        return codes * scales + biases
    scales = np.array(given.scales).astype(np.int64)
    exact = from_e4m3(scales) if form.mode == "nvfp4" else 2.0 ** (scales - 127.0)
    values = np.where(codes & 8, -1, 1) * FP4[codes & 7] if form.bits == 4 else from_e4m3(codes)
    return values * np.repeat(exact, form.group_size, -1)


def native() -> Any:
    module = mlx_cuda._native.load()
    assert not isinstance(module, Exception), module
    return module


def dequantize(given: Weights, dtype: mx.Dtype) -> mx.array:
    result: mx.array = native().dequantize(given.w, given.scales, given.biases, *given.form.options(), dtype, mx.default_stream(mx.gpu))
    return result


def product(x: mx.array, given: Weights, lhs: mx.array | None = None, rhs: mx.array | None = None, transpose: bool = True) -> mx.array:
    parts = (given.w, given.scales, given.biases)
    result: mx.array = native().quantized_few(x, *parts, lhs, rhs, transpose, *given.form.options(), mx.default_stream(mx.gpu))
    return result


def check(x: mx.array, given: Weights, transpose: bool = True) -> None:
    values = given.values(x.dtype)
    expected = host(x) @ (values.swapaxes(-1, -2) if transpose else values)
    poison(lambda: product(x * float("nan"), given, transpose=transpose), expected.shape, x.dtype)
    result = product(x, given, transpose=transpose)
    assert_fused(result, "QuantizedFew")
    assert result.dtype == x.dtype
    assert result.shape == expected.shape
    assert_close(result, expected, tolerance=TOLERANCE[x.dtype])


# ------------------------------------------------------------------------------------------------------------------------ values
@formats
@dtypes
def test_values_are_upstreams(rng: np.random.Generator, form: Format, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (3, 37, 384), dtype)
    result = dequantize(given, dtype)
    assert_fused(result, "Dequantize")
    upstream = mx.dequantize(given.w, given.scales, given.biases, *given.form.options(), dtype=dtype)
    assert np.array_equal(host(result), host(upstream))
    assert_close(result, dequantized(given), tolerance=ROUNDOFF[dtype])


@pytest.mark.parametrize("form", [form for form in FORMATS if form.mode != "affine"], ids=str)
@dtypes
def test_every_scale_and_nan_is_upstreams(rng: np.random.Generator, form: Format, dtype: mx.Dtype) -> None:
    words = rng.integers(0, 2**32, (256, form.group_size * form.bits // 32), dtype=np.uint32)
    given = Weights(form, mx.array(words), mx.arange(256, dtype=mx.uint8)[:, None], None)
    upstream = mx.dequantize(given.w, given.scales, None, *given.form.options(), dtype=dtype)
    assert np.array_equal(host(dequantize(given, dtype)), host(upstream), equal_nan=True)


def test_what_mx_quantize_gives(rng: np.random.Generator) -> None:
    """The layout is MLX's, not only the tests'."""
    for form in ONE_OF_EACH:
        matrix = normal(rng, (33, 256), mx.bfloat16)
        given = Weights(form, *(*mx.quantize(matrix, *form.options()), None)[:3])
        assert_close(dequantize(given, mx.bfloat16), host(matrix), tolerance=0.6)
        assert np.allclose(host(dequantize(given, mx.bfloat16)), dequantized(given), rtol=2**-8, atol=1e-6)


@one_of_each
def test_values_of_views(rng: np.random.Generator, form: Format) -> None:
    """Every second matrix, a range of rows, and rows that are apart."""
    given = weights(rng, form, (5, 40, 512), mx.float16)
    for cut in (np.s_[1::2], np.s_[:, 7:19], np.s_[:, ::3], np.s_[::-1, 3:]):
        part = Weights(form, given.w[cut], given.scales[cut], None if given.biases is None else given.biases[cut])
        assert_close(dequantize(part, mx.float16), dequantized(given)[cut], tolerance=ROUNDOFF[mx.float16])


# ---------------------------------------------------------------------------------------------------------------------- products
@formats
@halves
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64])
def test_matches_float64(rng: np.random.Generator, form: Format, dtype: mx.Dtype, rows: int) -> None:
    for n, k in ((97, 384), (300, 1152), (33, 128)):
        check(normal(rng, (rows, k), dtype), weights(rng, form, (n, k), dtype))


@one_of_each
@pytest.mark.parametrize("rows", [1, 8, 12, 40])
@pytest.mark.parametrize(("n", "k"), [(4096, 512), (100, 14336), (9000, 1024), (1, 64), (31, 32), (65, 2880), (512, 4096)])
def test_sizes(rng: np.random.Generator, form: Format, rows: int, n: int, k: int) -> None:
    """Many columns and one, long rows, and rows that are no whole number of slices or of the scales' bytes."""
    check(normal(rng, (rows, k), mx.bfloat16), weights(rng, form, (n, k), mx.bfloat16))


@formats
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_float32(rng: np.random.Generator, form: Format, rows: int) -> None:
    check(normal(rng, (rows, 640), mx.float32), weights(rng, form, (77, 640), mx.float32))


@formats
@dtypes
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_not_transposed(rng: np.random.Generator, form: Format, dtype: mx.Dtype, rows: int) -> None:
    for k, n in ((1, 128), (77, 384), (1000, 256)):
        check(normal(rng, (rows, k), dtype), weights(rng, form, (k, n), dtype), transpose=False)


@pytest.mark.parametrize("k", [16, 48, 144, 1040])
@dtypes
def test_an_odd_number_of_small_groups(rng: np.random.Generator, k: int, dtype: mx.Dtype) -> None:
    check(normal(rng, (3, k), dtype), weights(rng, Format("nvfp4", 16, 4), (45, k), dtype))


@one_of_each
@dtypes
def test_layouts_of_x(rng: np.random.Generator, form: Format, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (50, 256), dtype)
    whole = normal(rng, (6, 4, 520), dtype)
    for x in (whole[..., :256], whole[..., 1:257], whole[::2, 1:3, 256:512], whole[0, 0, :256], whole[:, :, :256].swapaxes(0, 1)):
        check(x, given)
    check(mx.broadcast_to(whole[0, :1, :256], (5, 256)), given)
    check(normal(rng, (256, 6), dtype).T, given)


@one_of_each
@dtypes
def test_layouts_of_weights(rng: np.random.Generator, form: Format, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (3, 90, 512), dtype)
    x = normal(rng, (5, 512), dtype)
    for cut in (np.s_[1], np.s_[2, 11:70], np.s_[0, ::3], np.s_[1, ::-1]):
        part = Weights(form, given.w[cut], given.scales[cut], None if given.biases is None else given.biases[cut])
        expected = host(x) @ given.values(dtype)[cut].T
        assert_close(product(x, part), expected, tolerance=TOLERANCE[dtype])


@one_of_each
@dtypes
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("transpose", [True, False])
def test_gathered(rng: np.random.Generator, form: Format, dtype: mx.Dtype, rows: int, transpose: bool) -> None:
    given = weights(rng, form, (6, 128, 256), dtype)
    x = normal(rng, (5, rows, 256 if transpose else 128), dtype)
    values = given.values(dtype)
    if transpose:
        values = values.swapaxes(-1, -2)
    rhs = rng.integers(0, 6, 11)
    lhs = rng.integers(0, 5, 11)
    result = product(x, given, mx.array(lhs.astype(np.uint32)), mx.array(rhs.astype(np.uint32)), transpose)
    assert_close(result, host(x)[lhs] @ values[rhs], tolerance=TOLERANCE[dtype])
    result = product(x, given, None, mx.array(rhs[:5].astype(np.uint32)), transpose)
    assert_close(result, host(x) @ values[rhs[:5]], tolerance=TOLERANCE[dtype])


def test_many_products(rng: np.random.Generator) -> None:
    """More than run at once, each block with several tiles."""
    given = weights(rng, Format("affine", 64, 4), (9, 200, 768), mx.bfloat16)
    x = normal(rng, (64, 1, 768), mx.bfloat16)
    rhs = rng.integers(0, 9, 64)
    result = product(x, given, None, mx.array(rhs.astype(np.uint32)))
    expected = host(x) @ given.values(mx.bfloat16)[rhs].swapaxes(-1, -2)
    assert_close(result, expected, tolerance=TOLERANCE[mx.bfloat16])


@halves
def test_nans_reach_their_columns_only(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    given = weights(rng, Format("mxfp8", 32, 8), (70, 512), dtype)
    words = np.array(given.w)
    words.view(np.uint8)[[5, 40, 69], [0, 301, 511]] = [127, 255, 127]
    result = host(product(normal(rng, (3, 512), dtype), Weights(given.form, mx.array(words), given.scales, None)))
    assert np.array_equal(np.isnan(result).any(0), np.isnan(result).all(0))
    assert np.flatnonzero(np.isnan(result[0])).tolist() == [5, 40, 69]


@one_of_each
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
def test_infinite_and_missing_numbers_of_x_stay_in_their_rows(rng: np.random.Generator, form: Format, dtype: mx.Dtype) -> None:
    given = weights(rng, form, (40, 512), dtype)
    x = np.array(normal(rng, (9, 512), mx.float32))
    x[2, 100], x[7, 511] = np.nan, np.inf
    result = host(product(mx.array(x).astype(dtype), given))
    assert np.isnan(result[2]).all()
    assert not np.isfinite(result[7]).any()
    assert np.isfinite(np.delete(result, [2, 7], 0)).all()


@one_of_each
def test_gradient_of_x(rng: np.random.Generator, form: Format) -> None:
    given = weights(rng, form, (64, 256), mx.float16)
    x, cotangent = normal(rng, (3, 256), mx.float16), normal(rng, (3, 64), mx.float16)
    (gradient,) = mx.vjp(lambda x: product(x, given), [x], [cotangent])[1]
    assert_close(gradient, host(cotangent) @ given.values(mx.float16), tolerance=5e-3)


@pytest.mark.parametrize("form", [Format("mxfp4", 32, 4), Format("mxfp8", 32, 8), Format("nvfp4", 16, 4)], ids=str)
@pytest.mark.parametrize("transpose", [True, False])
def test_gradient_where_mlx_has_no_kernel(rng: np.random.Generator, form: Format, transpose: bool) -> None:
    given = weights(rng, form, (4, 40, 96), mx.float16)
    values = given.values(mx.float16)
    k, n = (96, 40) if transpose else (40, 96)
    x, cotangent = normal(rng, (4, 3, k), mx.float16), normal(rng, (4, 3, n), mx.float16)
    expected = host(cotangent) @ (values if transpose else values.swapaxes(-1, -2))
    (gradient,) = mx.vjp(lambda x: product(x, given, None, mx.arange(4, dtype=mx.uint32), transpose), [x], [cotangent])[1]
    assert_close(gradient, expected, tolerance=5e-3)
    one = Weights(form, given.w[0], given.scales[0], None)
    (gradient,) = mx.vjp(lambda x: product(x, one, transpose=transpose), [x[0]], [cotangent[0]])[1]
    assert_close(gradient, expected[0], tolerance=5e-3)


def test_many_dimensions_of_a_view(rng: np.random.Generator) -> None:
    """More than the kernel that copies knows."""
    given = weights(rng, Format("affine", 64, 4), (40, 128), mx.float16)
    x = normal(rng, (128, *[2] * 9), mx.float16).T
    assert_close(product(x, given), host(x) @ given.values(mx.float16).T, tolerance=TOLERANCE[mx.float16])


def test_vmap(rng: np.random.Generator) -> None:
    given = weights(rng, Format("affine", 64, 4), (64, 256), mx.float16)
    x = normal(rng, (3, 256, 5), mx.float16)
    result = mx.vmap(lambda x: product(x, given), in_axes=2)(x)
    assert_fused(result, "QuantizedFew")
    assert_close(result, np.moveaxis(host(x), 2, 0) @ given.values(mx.float16).T, tolerance=TOLERANCE[mx.float16])


def test_compiled_with_what_is_around_it(rng: np.random.Generator) -> None:
    given = weights(rng, Format("affine", 64, 4), (96, 256), mx.bfloat16)
    x = normal(rng, (4, 256), mx.bfloat16)
    function = mx.compile(lambda x: product(product(x * 2, given)[:, :64] @ mx.ones((64, 256), mx.bfloat16), given))
    values = given.values(mx.bfloat16)
    expected = np.repeat((2 * host(x) @ values.T)[:, :64].sum(-1, keepdims=True), 256, -1) @ values.T
    for _ in range(2):
        assert_close(function(x), expected, tolerance=4 * TOLERANCE[mx.bfloat16])
