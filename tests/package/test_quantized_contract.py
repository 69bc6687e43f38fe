"""``quantized_matmul``: what MLX's own does, on the CPU and through a native module."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_cuda._common.choice import Gpu

from tests.gpu import quantized_cases as cases
from tests.gpu.formats import FORMS, Form

from .matmuls import Matmuls
from .references import DTYPES, assert_close, host, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

OURS: Any = mlx_cuda  # called with all kinds of arguments, wrong ones too
MLX: Any = mx
WITH_ONE_BIT = [*FORMS, Form("affine", 1, 64)]
NATIVE_ONLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn(form: Form, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, seed: int = 0) -> cases.Weights:
    return cases.draw(np.random.default_rng(seed), shape, form, dtype)


def check(x: mx.array, weights: cases.Weights, *, transpose: bool, slack: float = 2) -> mx.array:
    result: mx.array = OURS.quantized_matmul(x, *weights.arrays, transpose=transpose, **weights.options)
    expected = MLX.quantized_matmul(x, *weights.arrays, transpose=transpose, **weights.options)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    exact, size = (function(host(x), weights, transpose=transpose) for function in (cases.matmul, cases.size_of))
    assert_close(result, exact, slack=slack, size=size)
    return result


@given(
    form=st.sampled_from(WITH_ONE_BIT),
    rows=st.sampled_from(((), (1,), (3,), (70,), (2, 5), (2, 40), (1, 2, 3))),
    transpose=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    odd=st.sampled_from((1, 2, 7, 33)),
    groups=st.integers(1, 3),
)
def test_every_form(form: Form, rows: tuple[int, ...], transpose: bool, dtype: mx.Dtype, odd: int, groups: int) -> None:
    weights = drawn(form, (odd, groups * form.group_size), dtype)
    check(random((*rows, weights.exact.shape[1 if transpose else 0]), dtype), weights, transpose=transpose)


@NATIVE_ONLY
@given(
    form=st.sampled_from(FORMS),
    rows=st.sampled_from(((), (1,), (3,), (64,), (65,), (2, 5), (2, 40), (512,), (513,))),
    transpose=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    odd=st.sampled_from((1, 7, 33)),
)
def test_every_form_natively(matmuls: Matmuls, form: Form, rows: tuple[int, ...], transpose: bool, dtype: mx.Dtype, odd: int) -> None:
    matmuls.calls.clear()
    weights = drawn(form, (odd, 2 * form.group_size), dtype)
    x = random((*rows, weights.exact.shape[1 if transpose else 0]), dtype)
    check(x, weights, transpose=transpose)
    most = 4 if not transpose else 64 if dtype == mx.float32 else 512
    many = int(np.prod(rows)) > most
    assert matmuls.calls == [f"dequantize {x.shape} {transpose}" if many else f"small_m {x.shape} None None"]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_one_row_of_small_weights(matmuls: Matmuls, dtype: mx.Dtype) -> None:
    """The native module may call MLX's kernel for these: Python cannot know whether that takes what is not evaluated yet."""
    weights = drawn(Form("affine", 4, 64), (14, 512), dtype)
    other = cases.Weights(tuple(array[::2] for array in weights.arrays), weights.exact[::2], weights.form)
    for shape, those in (((512,), weights), ((1, 512), weights), ((1, 1, 512), other), ((1, 512), other)):
        check(random(shape, dtype), those, transpose=True)
        with mlx_cuda.patch():
            mx.quantized_matmul(random(shape, dtype), *those.arrays, **those.options)
    assert matmuls.calls == [f"small {shape} None None" for shape in ((512,), (1, 512), (1, 1, 512), (1, 512)) for _ in range(2)]


def test_gradients_of_a_vector() -> None:
    """MLX's kernels on CUDA take none, so it goes there as a row."""
    x, weights = random((64,)), drawn(Form("affine", 1, 32), (9, 64))
    w, *parts = weights.arrays
    gradients = mx.vjp(lambda x, *parts: OURS.quantized_matmul(x, w, *parts, **weights.options), [x, *parts], [mx.ones(9)])[1]
    rows = mx.vjp(lambda x, *parts: MLX.quantized_matmul(x, w, *parts, **weights.options), [x[None], *parts], [mx.ones((1, 9))])[1]
    for gradient, row in zip(gradients, (rows[0][0], *rows[1:]), strict=True):
        assert_close(gradient, host(row))


FORM = Form("affine", 4, 32)


def test_batches_broadcast() -> None:
    weights = drawn(FORM, (3, 7, 64))
    for batch in ((3,), (2, 1), (2, 3), (1,)):
        check(random((*batch, 5, 64)), weights, transpose=True)


def test_one_weight_for_all_is_no_batch(matmuls: Matmuls) -> None:
    weights = drawn(FORM, (1, 1, 7, 64))
    assert check(random((2, 5, 64)), weights, transpose=True).shape == (1, 2, 5, 7)
    check(random((2, 300, 64)), weights, transpose=True)
    assert matmuls.calls == ["small_m (1, 2, 5, 64) None None", "dequantize (1, 2, 300, 64) True"]
    check(random((2, 3, 5, 64)), drawn(FORM, (3, 7, 64)), transpose=True)
    assert len(matmuls.calls) == 2  # MLX's own


def test_strided_operands() -> None:
    weights = drawn(FORM, (14, 64))
    x = random((64, 2, 6)).T[::2]
    check(x, weights, transpose=True)
    other = cases.Weights(tuple(array[::2] for array in weights.arrays), weights.exact[::2], FORM)
    check(x, other, transpose=True)


@pytest.mark.parametrize("natively", [False, True])
def test_dtypes_promote(natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    for dtype, scales in ((mx.float16, mx.float32), (mx.bfloat16, mx.float16), (mx.float32, mx.bfloat16), (mx.int32, mx.float16)):
        w, s, b = drawn(FORM, (5, 64)).arrays
        arrays = w, s.astype(scales), b.astype(scales)
        weights = cases.weights_of(arrays, FORM)
        check((random((3, 64)) * 4).astype(dtype), weights, transpose=True)
        check((random((70, 64)) * 4).astype(dtype), weights, transpose=True)


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize(
    ("x", "w", "transpose", "shape"),
    [
        ((0, 64), (7, 64), True, (0, 7)),
        ((2, 0, 64), (7, 64), True, (2, 0, 7)),
        ((3, 64), (0, 64), True, (3, 0)),
        ((3, 0), (0, 64), False, (3, 64)),
        ((3, 7), (7, 0), False, (3, 0)),
    ],
)
def test_empty(
    natively: bool, x: tuple[int, ...], w: tuple[int, int], transpose: bool, shape: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """For some of these MLX divides by zero."""
    if natively:
        request.getfixturevalue("matmuls")
    arrays = mx.zeros((w[0], w[1] // 8), mx.uint32), mx.zeros((w[0], w[1] // 32)), mx.zeros((w[0], w[1] // 32))
    result = OURS.quantized_matmul(mx.ones(x), *arrays, transpose=transpose, group_size=32)
    assert result.shape == shape
    assert not host(result).any()


def test_defaults_are_those_of_the_mode() -> None:
    for mode in ("affine", "mxfp4", "mxfp8", "nvfp4"):
        arrays = MLX.quantize(random((5, 128)), mode=mode)
        x = random((3, 128), seed=1)
        assert mx.array_equal(OURS.quantized_matmul(x, *arrays, mode=mode), MLX.quantized_matmul(x, *arrays, mode=mode))


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("form", [FORM, Form("mxfp8", 8, 32)], ids=str)
def test_gradients(matmuls: Matmuls, form: Form, transpose: bool, rows: int) -> None:
    weights = drawn(form, (9, 64))
    x, cotangent = random((rows, 64 if transpose else 9)), random((rows, 9 if transpose else 64), seed=2)
    count = len(weights.arrays) if form.mode == "affine" else 1
    primals = [x, *weights.arrays[1:]][:count]

    def through(function: Any) -> list[mx.array]:
        def matmul(x: mx.array, *parts: mx.array) -> mx.array:
            scales, *biases = parts or weights.arrays[1:]
            result: mx.array = function(x, weights.arrays[0], scales, *biases, transpose=transpose, **weights.options)
            return result

        return mx.vjp(matmul, primals, [cotangent])[1]

    matmuls.calls.clear()
    for got, expected in zip(through(OURS.quantized_matmul), through(MLX.quantized_matmul), strict=True):
        assert_close(got, host(expected), slack=2)
    assert len(matmuls.calls) == (2 if not transpose or rows > 64 else 1)  # the gradient of x too


def test_compiled(matmuls: Matmuls) -> None:
    weights = drawn(FORM, (9, 64))
    call = mx.compile(lambda x: OURS.quantized_matmul(2 * x, *weights.arrays, **weights.options))
    for rows in (3, 70):
        assert_close(call(random((rows, 64))), cases.matmul(2 * host(random((rows, 64))), weights, transpose=True))


W, S, B = MLX.quantize(mx.ones((8, 128)))
Q, T = MLX.quantize(mx.ones((8, 128)), mode="mxfp4")
X = mx.ones((3, 128))


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((X, W, S), {}, "Mode 'affine' needs biases, got None."),
        ((X, Q, T, B), {"mode": "mxfp4"}, r"Mode 'mxfp4' has no biases, got some of the shape \(8,2\)."),
        ((X, W, S), {"mode": "mxfp4"}, "scales of mode 'mxfp4' must be uint8, got float32."),
        ((X, W, S, B), {"mode": "int4"}, "mode must be one of 'affine', 'mxfp4', 'mxfp8', 'nvfp4', got 'int4'."),
        ((X, W, S, B), {"bits": 7}, "Mode 'affine' takes group_size 32 or 64 or 128 and bits 1 or 2 or .* or 8, got 64 and 7."),
        ((X, W, S, B), {"group_size": 48}, "Mode 'affine' takes .*, got 48 and 4."),
        ((X, Q, T), {"mode": "mxfp4", "group_size": 64}, "Mode 'mxfp4' takes group_size 32 and bits 4, got 64 and 4."),
        ((X, W, S, B), {"bits": 8}, "w and scales do not belong together .*: 64 numbers and 2 scales in a row, got .*"),
        ((X, W, S, B), {"group_size": 32}, "w and scales do not belong together with group_size=32 and bits=4: .*"),
        ((X, W.astype(mx.int32), S, B), {}, "w must be packed in uint32, got int32."),
        ((X, W, S.astype(mx.int32), B.astype(mx.int32)), {}, "scales and biases must be of floating types, got int32 and int32."),
        ((X, W, S, B[:, :1]), {}, r"scales and biases must have the same shape, got \(8,2\) and \(8,1\)."),
        ((X, W[0], S, B), {}, r"w and scales must agree in all of 2 or more dimensions but the last, got \(16,\) and \(8,2\)."),
        ((X, W[0], S[0], B[0]), {}, r"w and scales must agree .*, got \(16,\) and \(2,\)."),
        ((X[:, :64], W, S, B), {}, r"x must be \[\.\.\., 128\] for weights \(8,16\) of 4 bit with transpose=True, got \(3,64\)."),
        ((X, W, S, B), {"transpose": False}, r"x must be \[\.\.\., 8\] for .* with transpose=False, got \(3,128\)."),
        ((mx.array(1.0), W, S, B), {}, r"x must be \[\.\.\., 128\] .*, got \(\)."),
        ((X.astype(mx.complex64), W, S, B), {}, "Only float16, bfloat16 and float32 are supported, got complex64."),
        ((X.astype(mx.int32), Q, T), {"mode": "mxfp4"}, "Only float16, bfloat16 and float32 are supported, got int32."),
        (
            (mx.ones((3, 1, 128)), *(mx.stack([part] * 2) for part in (W, S, B))),
            {},
            r"The batches of x and w must broadcast, got \(3,1,128\) and \(2,8,16\).",
        ),
    ],
)
def test_errors_where_mlx_has_one(arguments: tuple[mx.array, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[quantized_matmul\] {text}$"):
        OURS.quantized_matmul(*arguments, **options)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        mx.eval(MLX.quantized_matmul(*arguments, **options))


def test_errors_of_our_own() -> None:
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] w and scales must agree .*, got \(8,16\) and \(4,2\)\.$"):
        OURS.quantized_matmul(X, W, S[:4], B[:4])  # which MLX reads beyond their end
    with mx.stream(mx.cpu), pytest.raises(ValueError, match=r"Only float16, bfloat16 and float32 are supported, got float64\."):
        OURS.quantized_matmul(X.astype(mx.float64), W, S, B)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] w must be an mlx\.core\.array, got list\.$"):
        OURS.quantized_matmul(X, [1], S, B)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] biases must be an mlx\.core\.array, got float\.$"):
        OURS.quantized_matmul(X, W, S, 1.0)


def test_what_is_composed_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA kernels do not take such a width, and no native module is there."""
    monkeypatch.setattr("mlx_cuda._loader.native.gpu", lambda _: Gpu((9, 0), "there is none"))
    weights = drawn(Form("nvfp4", 4, 16), (10, 48))
    explained = mlx_cuda.explain(OURS.quantized_matmul, random((5, 48)), *weights.arrays, **weights.options)
    assert (explained.engine, explained.reason) == ("fallback", "there is none")
    check(random((5, 48)), weights, transpose=True)
    batch = drawn(Form("nvfp4", 4, 16), (3, 10, 48))  # of which MLX takes the first for a single matrix
    for x in random((5, 48)), random((48,)):
        result = OURS.quantized_matmul(x, *batch.arrays, **batch.options)
        assert_close(result, host(x) @ batch.exact[0].T, slack=2)
    check(random((3, 5, 48)), batch, transpose=True)


def test_explain_names_the_kernel(matmuls: Matmuls) -> None:
    """Which the native module says of the operands as it takes them; of what no kernel of ours for few rows computes there is none."""
    weights = drawn(Form("affine", 4, 64), (10, 64))
    named = [
        mlx_cuda.explain(OURS.quantized_matmul, random(x), *arrays, **weights.options)
        for x in ((5, 64), (2, 64), (600, 64))
        for arrays in (weights.arrays, tuple(part[None] for part in weights.arrays))
    ]
    assert [(choice.engine, choice.kernel) for choice in named] == [
        ("small_m", "source (5, 64) None True"),
        ("small_m", "source (5, 64) None True"),
        ("small_m", "source (2, 64) None True"),
        ("small_m", "source (2, 64) None True"),
        ("dequantize", ""),
        ("dequantize", ""),
    ]
    stack = drawn(Form("affine", 4, 64), (3, 10, 64))
    rhs = mx.array([[0, 2], [1, 1]])
    options: dict[str, Any] = stack.options | {"rhs_indices": rhs}
    assert mlx_cuda.explain(OURS.gather_qmm, random((2, 2, 1, 64)), *stack.arrays, **options).kernel == "source (4, 1, 64) (4,) True"
    assert matmuls.calls == []  # nothing was computed
