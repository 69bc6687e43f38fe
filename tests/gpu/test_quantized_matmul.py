"""Matmuls with quantised weights and of 8-bit numbers against float64 of the very weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native as _native

from . import quantized_cases as cases
from .formats import FORMS, Form, e4m3, spread, unpacked
from .reference import Array
from .support import DTYPES, GRADIENT_TOLERANCE, LAYOUT, ROUNDOFF, TOLERANCE, assert_close, device, host, normal, poison, primitives

pytestmark = pytest.mark.gpu

OURS: Any = mlx_cuda
FORM = Form("affine", 4, 64)
FEW_FORMS = [FORM, Form("affine", 3, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)]

forms = pytest.mark.parametrize("form", FORMS, ids=str)
few_forms = pytest.mark.parametrize("form", FEW_FORMS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
transposed = pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])


def tolerance(dtype: mx.Dtype, *, few: bool) -> float:
    """Weights are rounded to 16 bits before a dense matmul; float32 stays itself for few rows and goes through TF32 for many."""
    return 1e-5 if dtype == mx.float32 and few else 1.5 * TOLERANCE[dtype]


def most_few(x: mx.array, *, transpose: bool) -> int:
    """The most rows that the kernels for few rows take."""
    if not transpose:
        return 4
    on_hopper = _native.capability(mx.Device(mx.gpu, 0)) == (9, 0)
    return 512 if on_hopper and x.dtype != mx.float32 and x.shape[-1] % 32 == 0 else 64


def engine(*arguments: Any, **options: Any) -> str:
    return str(mlx_cuda.explain(*arguments, **options).engine)


def check(
    x: mx.array,
    weights: cases.Weights,
    *,
    transpose: bool,
    wanted: str | None = None,
    upstream: bool = False,
    known: tuple[Array, Array] | None = None,
) -> None:
    """Hold a matmul to float64; ``known`` is what is right, and the size that errors are relative to."""
    options = weights.options | {"transpose": transpose}
    rows = x.size // x.shape[-1]
    few = rows <= most_few(x, transpose=transpose)
    if wanted is None:
        wanted = "small_m" if few else "dequantize"
    assert engine(OURS.quantized_matmul, x, *weights.arrays, **options) == wanted
    result = OURS.quantized_matmul(x, *weights.arrays, **options)
    assert result.dtype == x.dtype
    exact, size = known or (function(host(x), weights, transpose=transpose) for function in (cases.matmul, cases.size_of))
    assert_close(
        result,
        exact,
        size=size,
        tolerance=tolerance(x.dtype, few=few),
        upstream=mx.quantized_matmul(x, *weights.arrays, **options) if upstream else None,
        floor=ROUNDOFF[x.dtype],
        about=(x.shape, weights.arrays[0].shape),
    )


@forms
@transposed
@dtypes
def test_every_number_of_rows(rng: np.random.Generator, form: Form, transpose: bool, dtype: mx.Dtype) -> None:
    for n, k in cases.sizes(form, transpose=transpose):
        weights = cases.draw(rng, (n, k) if transpose else (k, n), form, dtype)
        x = normal(rng, (max(cases.ROWS), k), dtype)
        exact, size = (function(host(x), weights, transpose=transpose) for function in (cases.matmul, cases.size_of))
        for rows in cases.ROWS:
            last = slice(len(exact) - rows, None)
            check(x[last], weights, transpose=transpose, known=(exact[last], size[last]))


@forms
@halves
def test_whole_tiles(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """What models have: N and K that all tiles divide; one row beside MLX's own result (for more MLX compiles kernels first)."""
    weights = cases.draw(rng, (2560, 1024), form, dtype)
    for rows in 1, 6, 33, 256:
        check(normal(rng, (rows, 1024), dtype), weights, transpose=True, upstream=rows == 1)


@forms
@halves
def test_sizes_that_no_tile_divides(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """Several tiles of rows and of columns, and not all of the last."""
    weights = cases.draw(rng, (1031, 640), form, dtype)
    x = normal(rng, (700, 640), dtype)
    exact, size = (function(host(x), weights, transpose=True) for function in (cases.matmul, cases.size_of))
    for rows in 130, 257, 511, 700:
        check(x[:rows], weights, transpose=True, known=(exact[:rows], size[:rows]))


def test_values_of_weights_do_not_pile_up() -> None:
    """However far the host is ahead of the device; and each matmul reads its own."""
    weights = [mx.quantize(mx.random.normal((2048, 2048)).astype(mx.bfloat16) / 64) for _ in range(40)]
    x, waiting = mx.random.normal((520, 2048)).astype(mx.bfloat16), mx.full((16384, 16384), 2**-14, mx.float16)
    assert engine(OURS.quantized_matmul, x, *weights[0]) == "dequantize"
    mx.eval(weights, x, waiting)

    def chain(each: Callable[[mx.array], object]) -> mx.array:
        result = x
        for parts in weights:
            result = OURS.quantized_matmul(result, *parts)
            each(result)
        return result

    expected = chain(mx.eval)
    mx.eval(expected)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.async_eval(waiting @ waiting)  # type: ignore[no-untyped-call]
    result = chain(lambda _: None)
    mx.eval(result)
    assert mx.array_equal(result, expected)
    assert mx.get_peak_memory() - before - waiting.nbytes < len(weights) * 2048 * 2048 * 2 // 2


@few_forms
@dtypes
def test_shapes_of_x(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    weights = cases.draw(rng, (40, 256), form, dtype)
    for shape in (256,), (1, 1, 256), (2, 3, 256), (2, 50, 256), (1, 2, 1, 2, 256):
        check(normal(rng, shape, dtype), weights, transpose=True)
    one = cases.Weights(tuple(part[None, None] for part in weights.arrays), weights.exact[None, None], form)
    check(normal(rng, (2, 3, 256), dtype), one, transpose=True)


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "every other row": lambda x: x[::2, 0, :256],
    "columns of a wider matrix": lambda x: x[:, 0, 3:259],
    "outer dimensions swapped": lambda x: x[:, :, :256].swapaxes(0, 1),
    "every other column": lambda x: x[:, 1, : 2 * 256 : 2],
    "a row repeated": lambda x: mx.broadcast_to(x[:1, 0, :256], (70, 256)),
    "an outer dimension repeated": lambda x: mx.broadcast_to(x[:1, :, :256], (4, 3, 256)),
    "backwards": lambda x: x[::-1, 0, :256],
    "transposed": lambda x: x.reshape(-1)[: 256 * x.shape[0]].reshape(256, -1).T,
}


@few_forms
@dtypes
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_of_x(rng: np.random.Generator, form: Form, dtype: mx.Dtype, view: Callable[[mx.array], mx.array]) -> None:
    weights = cases.draw(rng, (40, 256), form, dtype)
    for rows in 10, 140:
        x = view(normal(rng, (rows, 3, 520), dtype))
        mx.eval(x)
        check(x, weights, transpose=True)


@few_forms
@transposed
def test_views_of_weights(rng: np.random.Generator, form: Form, transpose: bool) -> None:
    """Slices of rows, and rows that begin in the middle of others."""
    whole = cases.draw(rng, (3, 80, 256), form, mx.bfloat16)
    for index in (1, slice(None, None, 2)), (2, slice(7, 50)), (slice(1, 2), slice(0, 80)):
        parts = tuple(part[index] for part in whole.arrays)
        mx.eval(parts)
        weights = cases.Weights(parts, whole.exact[index], form)
        for rows in 3, 70:
            k = weights.exact.shape[-1 if transpose else -2]
            check(normal(rng, (*[2] * (weights.exact.ndim - 2), rows, k), mx.bfloat16), weights, transpose=transpose)


def test_batches_of_weights_are_left_to_mlx(rng: np.random.Generator) -> None:
    weights = cases.draw(rng, (3, 128, 256), FORM, mx.bfloat16)
    check(normal(rng, (3, 5, 256), mx.bfloat16), weights, transpose=True, wanted="mlx")


SMALL = (512, 1024)  # where MLX's kernel for one row begins sooner, if it takes what there is
SMALL_ROWS: dict[str, Callable[[mx.array], mx.array]] = {  # of [3, 5, 2 * 1024 + 9]
    "a vector": lambda x: x[0, 0, :1024],
    "a row": lambda x: x[:1, 0, :1024],
    "one of a batch": lambda x: x[1:2, 2:3, :1024],
    "not on 16 bytes": lambda x: x[:1, 1, 3:1027],
    "every other number": lambda x: x[:1, 1, :2048:2],
    "backwards": lambda x: x[:1, 1, 1023::-1],
    "a number repeated": lambda x: mx.broadcast_to(x[:1, 0, :1], (1, 1024)),
}
SMALL_WEIGHTS: dict[str, tuple[Any, ...]] = {  # of [3, 1024, 1024]
    "a matrix": (1, slice(0, 512)),
    "every other row": (1, slice(None, None, 2)),
    "backwards": (1, slice(511, None, -1)),
    "one row": (1, slice(6, 7)),
    "one of every other": (1, slice(1020, None, 4)),
}


def test_explain_names_the_kernel(rng: np.random.Generator) -> None:
    """As the arrays lie: MLX's kernel for one row takes no vector and no weights with gaps."""

    def kernel(rows: tuple[int, ...], form: Form = FORM, dtype: mx.Dtype = mx.bfloat16, step: int = 1, **options: Any) -> str:
        weights = cases.draw(rng, (512, 1024 * step), form, dtype)
        arrays = [part[:, : part.shape[1] // step] for part in weights.arrays]
        mx.eval(arrays)
        x = normal(rng, (*rows, 1024 if options.get("transpose", True) else 512), dtype)
        return str(OURS.explain(OURS.quantized_matmul, x, *arrays, **weights.options, **options).kernel)

    on_hopper = _native.capability(mx.Device(mx.gpu, 0)) == (9, 0)
    assert kernel((1,)) == ""
    assert kernel(()) == kernel((1,), step=2) == "quantized_small_m quantized_small_m_affine4_bfloat16_1"
    assert kernel((16,)) == "quantized_small_m quantized_small_m_affine4_bfloat16_2"
    assert kernel((3,), dtype=mx.float32) == "quantized_plain quantized_transposed_affine4_float32_4"
    assert kernel((1,), dtype=mx.float32) == "quantized_plain quantized_transposed_affine4_float32_1"
    assert kernel((3,), Form("nvfp4", 4, 16), transpose=False) == "quantized_plain quantized_plain_nvfp4_bfloat16_4"
    many = "quantized_sm90 quantized_sm90_mxfp8_bfloat16_64" if on_hopper else "quantized_small_m quantized_small_m_mxfp8_bfloat16_4"
    assert kernel((64,), Form("mxfp8", 8, 32)) == many
    assert kernel((600,)) == ""
    stack = cases.draw(rng, (64, 2048, 1024), FORM, mx.bfloat16)
    rhs = mx.array([1, 5, 9, 13, 17, 21, 25, 29])
    explained = OURS.explain(OURS.gather_qmm, normal(rng, (8, 1, 1024), mx.bfloat16), *stack.arrays, rhs_indices=rhs, **stack.options)
    wanted = "quantized_moe_sm90 quantized_moe_affine4_bfloat16" if on_hopper else "quantized_small_m quantized_small_m_affine4_bfloat16_1"
    assert (explained.engine, explained.kernel) == ("small_m", wanted)


@halves
@pytest.mark.parametrize("row", SMALL_ROWS.values(), ids=SMALL_ROWS.keys())
@pytest.mark.parametrize("part", SMALL_WEIGHTS.values(), ids=SMALL_WEIGHTS.keys())
def test_one_row_of_small_weights(
    rng: np.random.Generator, dtype: mx.Dtype, row: Callable[[mx.array], mx.array], part: tuple[Any, ...]
) -> None:
    """MLX's kernel takes no vector, and only what lies row after row: else the call is ours."""
    whole = cases.draw(rng, (3, 1024, 1024), Form("affine", 4, 128), dtype)
    weights = cases.Weights(tuple(array[part] for array in whole.arrays), whole.exact[part], whole.form)
    x = row(normal(rng, (3, 5, 2 * 1024 + 9), dtype))
    check(x, weights, transpose=True, wanted="gemv")
    ours = OURS.quantized_matmul(x, *weights.arrays, **weights.options)
    with OURS.patch():
        assert mx.array_equal(mx.quantized_matmul(x, *weights.arrays, **weights.options), ours)
    (moved,) = mx.jvp(lambda x: OURS.quantized_matmul(x, *weights.arrays, **weights.options), [x], [2 * x])[1]
    exact, size = (2 * function(host(x), weights, transpose=True) for function in (cases.matmul, cases.size_of))
    assert_close(moved, exact, size=size, tolerance=tolerance(dtype, few=True))


def test_one_row_of_small_weights_is_mlx_s(rng: np.random.Generator) -> None:
    """Where it lies in order, and with another row it is not: the same bits as MLX's, or not."""
    weights, x = cases.draw(rng, SMALL, Form("affine", 4, 64), mx.bfloat16), normal(rng, (1, 1024), mx.bfloat16)
    theirs = mx.quantized_matmul(x, *weights.arrays, **weights.options)
    assert mx.array_equal(OURS.quantized_matmul(x, *weights.arrays, **weights.options), theirs)
    ours = OURS.quantized_matmul(mx.repeat(x, 2, axis=0), *weights.arrays, **weights.options)[:1]
    assert not mx.array_equal(ours, theirs)


@dtypes
def test_gradients_of_a_vector(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Of everything that has one: MLX's own function raises an error for vectors here."""
    weights, cotangent = cases.draw(rng, (64, 256), FORM, dtype), normal(rng, (64,), dtype)
    x, (packed, *parts) = normal(rng, (256,), dtype), weights.arrays

    def matmul(x: mx.array, *parts: mx.array) -> mx.array:
        result: mx.array = OURS.quantized_matmul(x, packed, *parts, **weights.options)
        return result

    by_x, by_scales, by_biases = mx.vjp(matmul, [x, *parts], [cotangent])[1]
    codes = unpacked(np.array(packed), 4).astype(np.float64)
    dense = np.outer(host(cotangent), host(x))
    assert_close(by_x, host(cotangent) @ weights.exact, tolerance=GRADIENT_TOLERANCE[dtype])
    for gradient, each in ((by_scales, dense * codes), (by_biases, dense)):
        assert_close(gradient, each.reshape(64, -1, 64).sum(axis=2), tolerance=GRADIENT_TOLERANCE[dtype])


def seldom(rng: np.random.Generator) -> dict[str, Callable[[Any], mx.array]]:
    """Calls that models seldom make, as functions of the module that has them. Without rows MLX divides by zero."""
    x, w = normal(rng, (5, 256), mx.float16), normal(rng, (64, 256), mx.float16, 1 / 16)
    stack, wide = normal(rng, (3, 64, 256), mx.float16, 1 / 16), normal(rng, (3, 5, 256), mx.float32)
    pairs = {"rhs_indices": mx.array([2, 0, 0])}
    nvfp4: dict[str, Any] = {"mode": "nvfp4", "group_size": 16, "bits": 4}
    parts = mx.quantize(w)
    packed, scales, biases = parts
    experts = mx.quantize(stack, **nvfp4)
    return {
        "1 bit": lambda m: m.quantized_matmul(x, *mx.quantize(w, bits=1), bits=1),
        "a single row": lambda m: m.quantized_matmul(x[0], *parts),
        "one matrix and a batch of weights": lambda m: m.quantized_matmul(x, *mx.quantize(stack)),
        "integers": lambda m: m.quantized_matmul(x.astype(mx.int32), *parts),
        "other scales": lambda m: m.quantized_matmul(x, packed, scales.astype(mx.float32), biases.astype(mx.bfloat16)),
        "batches that broadcast": lambda m: m.quantized_matmul(wide[:, None], *(part[:2] for part in mx.quantize(stack))),
        "weights in a batch of one": lambda m: m.quantized_matmul(wide, *(part[None, None] for part in parts)),
        "positional options": lambda m: m.quantized_matmul(x, *parts, True, 64, 4, "affine"),
        "columns of weights": lambda m: m.quantized_matmul(x[:, 64:192], packed[:, 8:24], scales[:, 1:3], biases[:, 1:3]),
        "gathered without indices": lambda m: m.gather_qmm(x, *parts),
        "scales of experts": lambda m: m.gather_qmm(wide, *experts, **pairs, **nvfp4, global_scale=mx.array([300.0, 700.0, 2688.0])),
        "indices of 64 bits": lambda m: m.gather_qmm(wide, *mx.quantize(stack), rhs_indices=mx.array([2, 0, 1], mx.int64)),
        "dense, vectors": lambda m: m.gather_mm(x[0], stack.swapaxes(1, 2), **pairs),
    }


class Dense:
    """In the place of the module where MLX's own is wrong: it takes the first of weights that are broadcast for all of them."""

    WRONG = ("batches that broadcast",)

    @staticmethod
    def quantized_matmul(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return x @ mx.dequantize(w, scales, biases).swapaxes(-1, -2)


def test_what_mlx_computes_raises_no_error(rng: np.random.Generator) -> None:
    computed = 0
    for name, call in seldom(rng).items():
        try:
            theirs = call(mx)
            mx.eval(theirs)
        except (IndexError, RuntimeError, ValueError):
            continue
        ours = call(OURS)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        expected = call(Dense) if name in Dense.WRONG else theirs
        assert_close(ours, host(expected), tolerance=3 * TOLERANCE[theirs.dtype], about=name)
        computed += 1
    assert computed >= 8


@few_forms
@transposed
@dtypes
def test_gradient_of_x(rng: np.random.Generator, form: Form, transpose: bool, dtype: mx.Dtype) -> None:
    n, k = (128, 256) if transpose else (256, 128)
    weights = cases.draw(rng, (n, k) if transpose else (k, n), form, dtype)
    for rows in 5, 100:
        x, cotangent = normal(rng, (rows, k), dtype), normal(rng, (rows, n), dtype)
        (gradient,) = mx.vjp(lambda x: OURS.quantized_matmul(x, *weights.arrays, transpose=transpose, **weights.options), [x], [cotangent])[
            1
        ]
        assert gradient.dtype == dtype
        exact = cases.matmul(host(cotangent), weights, transpose=not transpose)
        assert_close(gradient, exact, tolerance=GRADIENT_TOLERANCE[dtype])


def test_gradients_of_scales_and_biases(rng: np.random.Generator) -> None:
    weights = cases.draw(rng, (64, 256), FORM, mx.float32)
    codes = unpacked(np.array(weights.arrays[0]), 4).astype(np.float64)
    for rows in 5, 100:
        x, cotangent = normal(rng, (rows, 256), mx.float32), normal(rng, (rows, 64), mx.float32)
        gradients = mx.vjp(
            lambda scales, biases, x=x: OURS.quantized_matmul(x, weights.arrays[0], scales, biases, **weights.options),
            list(weights.arrays[1:]),
            [cotangent],
        )[1]
        dense = host(cotangent).T @ host(x)
        for gradient, each in zip(gradients, (dense * codes, dense), strict=True):
            assert_close(gradient, each.reshape(64, -1, 64).sum(axis=2), tolerance=GRADIENT_TOLERANCE[mx.float32])


@few_forms
@halves
def test_writes_all_of_its_output(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    weights = cases.draw(rng, (131, 256), form, dtype)
    for rows in 1, 9, 100:
        nan = mx.full((rows, 256), float("nan"), dtype)
        poison(lambda nan=nan: OURS.quantized_matmul(nan, *weights.arrays, **weights.options), (rows, 131), dtype)  # type: ignore[misc]
        check(normal(rng, (rows, 256), dtype), weights, transpose=True)


def test_same_bits_and_compiled(rng: np.random.Generator) -> None:
    for form, rows in itertools.product(FEW_FORMS, (1, 12, 100)):
        weights, x = cases.draw(rng, (2560, 1024), form, mx.bfloat16), normal(rng, (rows, 1024), mx.bfloat16)

        def call(x: mx.array, weights: cases.Weights = weights) -> mx.array:
            result: mx.array = OURS.quantized_matmul(x, *weights.arrays, **weights.options)
            return result

        first = call(x)
        assert all(mx.array_equal(first, call(x)) for _ in range(5))
        assert mx.array_equal(mx.compile(call)(x), first)


def test_nan_and_infinities_stay_in_their_rows(rng: np.random.Generator) -> None:
    weights = cases.draw(rng, (64, 256), FORM, mx.bfloat16)
    for rows in 6, 100:
        x = normal(rng, (rows, 256), mx.bfloat16)
        x[2, 7] = float("nan")
        result = host(OURS.quantized_matmul(x, *weights.arrays, **weights.options))
        assert np.isnan(result[2]).all()
        assert np.isfinite(np.delete(result, 2, axis=0)).all()


def test_patched_calls_take_our_kernels(rng: np.random.Generator) -> None:
    weights, x = cases.draw(rng, (128, 256), FORM, mx.bfloat16), normal(rng, (3, 256), mx.bfloat16)
    with mlx_cuda.patch():
        ours = mx.quantized_matmul(x, *weights.arrays, **weights.options)
    assert "QuantizedMatmul" not in primitives(ours) - LAYOUT
    assert "QuantizedMatmul" in primitives(mx.quantized_matmul(x, *weights.arrays, **weights.options))
    assert_close(ours, cases.matmul(host(x), weights, transpose=True), tolerance=1.5 * TOLERANCE[mx.bfloat16])


# -------------------------------------------------------------------------------------------------------------- 8-bit numbers
AXES: list[tuple[Any, Any]] = [(None, None), (-1, -1), ("block128", "block128x128"), (-1, None), ("block128", -1), (None, "block128x128")]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize(
    ("shape", "n"), [((3, 256), 128), ((1, 16), 16), ((300,), 24), ((100, 384), 200), ((2, 65, 130), 33), ((129, 48), 7)], ids=str
)
def test_fp8(rng: np.random.Generator, shape: tuple[int, ...], n: int, axes: tuple[Any, Any]) -> None:
    if _native.capability(mx.Device(mx.gpu, 0)) < (9, 0):
        pytest.skip("needs a GPU that multiplies 8-bit numbers, with all kinds of scales")
    x, w, bias = normal(rng, shape, mx.bfloat16), normal(rng, (n, shape[-1]), mx.bfloat16), normal(rng, (n,), mx.bfloat16)
    (a, scale_a), (b, scale_b) = OURS.quantize_fp8(x, axis=axes[0]), OURS.quantize_fp8(w, axis=axes[1])
    for codes, scales, dense, axis in (a, scale_a, x, axes[0]), (b, scale_b, w, axes[1]):
        each = spread(host(scales), dense.shape, axis)
        got = e4m3(np.array(codes)) * each
        assert (np.abs(got - host(dense)) <= np.maximum(np.abs(host(dense)) * 2**-4, each * 2**-10) * 1.01).all()
    exact = (e4m3(np.array(a)) * spread(host(scale_a), a.shape, axes[0])) @ (e4m3(np.array(b)) * spread(host(scale_b), b.shape, axes[1])).T
    for dtype, with_bias in itertools.product((mx.bfloat16, mx.float16, mx.float32), (True, False)):
        options = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias if with_bias else None, "out_dtype": dtype}
        assert engine(OURS.fp8_matmul, a, b, **options) == "cublaslt"
        result = OURS.fp8_matmul(a, b, **options)
        assert result.dtype == dtype
        # Sums of cuBLASLt's e4m3 matmuls may be kept in fewer bits than float32 has.
        assert_close(result, exact + (host(bias) if with_bias else 0), tolerance=max(TOLERANCE[dtype], 2e-3))


def test_fp8_extremes() -> None:
    x = device(np.array([[1.0, np.inf, -np.inf, np.nan, 2.0] * 32]), mx.float32)
    for axis in (None, -1, "block128", "block128x128"):
        codes, scales = OURS.quantize_fp8(x, axis=axis)
        got = e4m3(np.array(codes)) * spread(host(scales), x.shape, axis)
        assert np.allclose(got[0, [0, 1, 2, 4]], [1, 2, -2, 2], rtol=2**-4)
        assert np.isnan(got[0, 3])
        codes, scales = OURS.quantize_fp8(mx.zeros((3, 200)), axis=axis)
        assert not np.array(codes).any()
        assert (host(scales) > 0).all()
