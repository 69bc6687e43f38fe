"""``gather_mm``, ``gather_qmm`` and ``grouped_matmul``: what MLX's own do, on the CPU and through a native module."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.gpu import quantized_cases as cases
from tests.gpu.formats import FORMS, Form, unpacked

from .matmuls import Matmuls
from .references import DTYPES, Array, assert_close, gradients, host, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

OURS: Any = mlx_cuda  # called with all kinds of arguments, wrong ones too
MLX: Any = mx
FORM = Form("affine", 4, 32)
EXPERTS = 4
NATIVE_ONLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

CALLS = [
    *cases.ways_to_name(EXPERTS), ((90,), None, (90,)), ((6,), (3, 1), (4,)), ((6,), (), ()), ((0,), None, (0,)), ((6,), (0,), (0,)),
]  # fmt: skip


def indices(shape: tuple[int, ...] | None, count: int, seed: int = 0) -> NDArray[Any] | None:
    return None if shape is None else np.random.default_rng((seed, *shape)).integers(0, max(count, 1), shape)


def expected(x: Array, dense: Array, lhs: NDArray[Any] | None, rhs: NDArray[Any] | None) -> Array:
    """One matmul after another."""
    lhs = np.arange(int(np.prod(x.shape[:-2]))).reshape(x.shape[:-2]) if lhs is None else lhs
    rhs = np.arange(len(dense)) if rhs is None else rhs
    lhs, rhs = np.broadcast_arrays(lhs, rhs)
    x = x.reshape(-1, *x.shape[-2:])
    result = np.zeros((*lhs.shape, x.shape[1], dense.shape[2]))
    for place in np.ndindex(lhs.shape):
        result[place] = x[lhs[place]] @ dense[rhs[place]]
    return result


def array(values: NDArray[Any] | None, dtype: mx.Dtype = mx.uint32) -> mx.array | None:
    return None if values is None else mx.array(values).astype(dtype)


def check_dense(call: Any, rows: int, dtype: mx.Dtype, *, rising: bool = False) -> None:
    batch, left, right = call
    lhs, rhs = indices(left, int(np.prod(batch))), indices(right, EXPERTS, 1)
    if rising and rhs is not None:
        rhs = np.sort(rhs, axis=None).reshape(rhs.shape)
    a, b = random((*batch, rows, 16), dtype), random((EXPERTS, 16, 9), dtype, seed=1)
    result = OURS.gather_mm(a, b, array(lhs), array(rhs), sorted_indices=rising)
    assert result.dtype == dtype
    assert_close(result, expected(host(a), host(b), lhs, rhs))


def check_quantised(call: Any, rows: int, dtype: mx.Dtype, form: Form, *, transpose: bool, rising: bool = False, other: int = 9) -> None:
    batch, left, right = call
    lhs, rhs = indices(left, int(np.prod(batch))), indices(right, EXPERTS, 1)
    if rising and rhs is not None:
        rhs = np.sort(rhs, axis=None).reshape(rhs.shape)
    weights = cases.draw(np.random.default_rng(2), (EXPERTS, other, 2 * form.group_size), form, dtype)
    dense = weights.exact.swapaxes(1, 2) if transpose else weights.exact
    x = random((*batch, rows, dense.shape[1]), dtype)
    options = weights.options | {"transpose": transpose, "sorted_indices": rising}
    result = OURS.gather_qmm(x, *weights.arrays, lhs_indices=array(lhs), rhs_indices=array(rhs, mx.int32), **options)
    assert result.dtype == dtype
    assert_close(result, expected(host(x), dense, lhs, rhs), slack=2)


calls = pytest.mark.parametrize("call", CALLS, ids=str)


@calls
@pytest.mark.parametrize("rows", [1, 3])
def test_dense(call: Any, rows: int) -> None:
    for dtype in DTYPES:
        check_dense(call, rows, dtype)


@calls
@pytest.mark.parametrize("rows", [1, 3])
def test_dense_natively(matmuls: Matmuls, call: Any, rows: int) -> None:
    check_dense(call, rows, mx.float32)
    assert not matmuls.calls  # MLX's own
    for dtype in mx.float16, mx.bfloat16:
        check_dense(call, rows, dtype)
        check_dense(call, rows, dtype, rising=call[1] is None)
    pairs = np.prod(np.broadcast_shapes(call[0] if call[1] is None else call[1], (EXPERTS,) if call[2] is None else call[2]))
    assert len(matmuls.calls) == (4 if pairs else 0)


@calls
@pytest.mark.parametrize("transpose", [True, False])
def test_quantised(call: Any, transpose: bool) -> None:
    check_quantised(call, 1, mx.float32, FORM, transpose=transpose)
    check_quantised(call, 3, mx.float32, Form("mxfp8", 8, 32), transpose=transpose)


@calls
@pytest.mark.parametrize("transpose", [True, False])
def test_quantised_natively(matmuls: Matmuls, call: Any, transpose: bool) -> None:
    for rows in 1, 3:
        matmuls.calls.clear()
        check_quantised(call, rows, mx.bfloat16, FORM, transpose=transpose, other=16)
        check_quantised(call, rows, mx.float16, Form("mxfp8", 8, 32), transpose=transpose, rising=call[1] is None, other=16)
        pairs = np.prod(np.broadcast_shapes(call[0] if call[1] is None else call[1], (EXPERTS,) if call[2] is None else call[2]))
        kinds = {name.rpartition(" ")[0].split(" (")[0] for name in matmuls.calls}
        assert kinds == (set() if pairs == 0 else {"grouped quantised"} if pairs * rows > 64 else {"small_m"})


@NATIVE_ONLY
@given(form=st.sampled_from(FORMS), pairs=st.sampled_from((5, 64, 65, 100)), rising=st.booleans(), transpose=st.booleans())
def test_every_form_natively(matmuls: Matmuls, form: Form, pairs: int, rising: bool, transpose: bool) -> None:
    check_quantised(((pairs,), None, (pairs,)), 1, mx.float16, form, transpose=transpose, rising=rising, other=16)


def test_what_the_kernel_of_gathers_is_told(matmuls: Matmuls) -> None:
    half = mx.float16
    a, b, rhs = random((80, 1, 16), half), random((EXPERTS, 9, 16), half).swapaxes(1, 2), mx.array(np.sort(np.arange(80) % 3))
    mlx_cuda.gather_mm(a, b, rhs_indices=rhs, sorted_indices=True)  # as mlx-lm calls it with many tokens
    mlx_cuda.gather_mm(random((2, 5, 1, 1, 16), half), b, rhs_indices=rhs.reshape(2, 5, 8))  # and with few
    mlx_cuda.gather_mm(a[:8, 0], b, rhs_indices=rhs[:5], lhs_indices=mx.array(0), sorted_indices=True)
    mlx_cuda.gather_mm(random((3, 1, 1, 16), half), b, rhs_indices=rhs[:5], sorted_indices=True)
    assert matmuls.calls == [
        "gather (80, 1, 16) (4, 16, 9) None (80,) False True",
        "gather (10, 1, 16) (4, 16, 9) None (80,) False False",
        "gather (1, 8, 16) (4, 16, 9) (5,) (5,) False False",  # whose indices are said to rise where only one side has some
        "gather (3, 1, 16) (4, 16, 9) None (15,) False False",  # which rise, but not three times over
    ]


def test_explain_names_the_kernel(matmuls: Matmuls) -> None:
    """Which the native module says of the operands as it takes them; of the kernels that quantised weights come to there is none."""
    x, w, rhs = random((6, 16), mx.float16), random((EXPERTS, 16, 9), mx.float16), mx.array([[0, 1, 2], [3, 3, 0]])
    few = random((2, 1, 1, 16), mx.float16)
    assert mlx_cuda.explain(OURS.gather_mm, few, w, rhs_indices=rhs).kernel == "source (2, 1, 16) (4, 16, 9) (6,) False"
    offsets = mx.array([0, 1, 2, 3, 6])
    for held, transpose in (w, False), (w.swapaxes(1, 2), True):
        wanted = f"source (6, 16) {held.shape} None {transpose}"
        assert mlx_cuda.explain(OURS.grouped_matmul, x, held, offsets, transpose=transpose).kernel == wanted
    weights = cases.draw(np.random.default_rng(2), (EXPERTS, 9, 64), FORM, mx.float16)
    many = {"rhs_indices": mx.array([0] * 100), **weights.options}
    named = [
        mlx_cuda.explain(OURS.gather_qmm, random((100, 1, 64), mx.float16), *weights.arrays, **many),
        mlx_cuda.explain(OURS.gather_mm, few.astype(mx.float32), w, rhs_indices=rhs),
        mlx_cuda.explain(OURS.grouped_matmul, x.astype(mx.float32), w, offsets, transpose=False),
    ]
    assert [(choice.engine, choice.kernel) for choice in named] == [("grouped", ""), ("mlx", ""), ("fallback", "")]
    assert matmuls.calls == []  # nothing was computed


def test_default_indices_cost_no_kernel(matmuls: Matmuls) -> None:
    weights = cases.draw(np.random.default_rng(2), (EXPERTS, 9, 64), FORM, mx.float32)
    OURS.gather_qmm(random((2, 1, 1, 1, 64)), *weights.arrays, rhs_indices=mx.zeros((2, 1, 8), mx.uint32), **weights.options)
    assert matmuls.calls == ["small_m (2, 1, 64) (16,) (16,)"]
    OURS.gather_qmm(random((8, 1, 64)), *weights.arrays, rhs_indices=mx.zeros((8,), mx.uint32), **weights.options)
    assert matmuls.calls[1:] == ["small_m (8, 1, 64) None (8,)"]


def test_without_indices() -> None:
    weights = cases.draw(np.random.default_rng(2), (9, 64), FORM, mx.float32)
    x, b = random((2, 5, 64)), random((2, 64, 3))
    assert mx.array_equal(OURS.gather_mm(x, b), x @ b)
    options = weights.options
    assert mx.array_equal(OURS.gather_qmm(x, *weights.arrays, **options), MLX.quantized_matmul(x, *weights.arrays, **options))


@pytest.mark.parametrize("natively", [False, True])
def test_vectors(natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    a, b, rhs = random((12, 8)), random((EXPERTS, 8, 9), seed=1), mx.arange(40) % EXPERTS
    for x, y in ((a[0], b), (a[:, None], b[0, :, 0]), (a[0], b[0, :, 0])):
        which = rhs if y.ndim > 1 else rhs * 0
        left = None if x.ndim == 1 else mx.arange(40) % 12
        actual, theirs = (f(x, y, left, which) for f in (OURS.gather_mm, MLX.gather_mm))
        assert_close(actual, host(theirs))


# ------------------------------------------------------------------------------------------------------------------- groups
def groups(x: Array, w: Array, offsets: list[int], *, transpose: bool) -> Array:
    result = np.zeros((len(x), w.shape[1 if transpose else 2]))
    for e, (begin, end) in enumerate(itertools.pairwise(offsets)):
        result[begin:end] = x[begin:end] @ (w[e].T if transpose else w[e])
    return result


OFFSETS = [[0, 3, 3, 8, 10], [0, 0, 10, 10, 10], [0, 2, 4, 6, 7], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_groups(offsets: list[int], transpose: bool, natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    for dtype in DTYPES:
        x, w = random((10, 8), dtype), random((4, 5, 8) if transpose else (4, 8, 5), dtype, seed=1)
        for kind in mx.int32, mx.uint32:
            result = OURS.grouped_matmul(x, w, mx.array(offsets, kind), transpose=transpose)
            assert_close(result, groups(host(x), host(w), offsets, transpose=transpose))


def test_empty_groups() -> None:
    for x, w in (((0, 6), (2, 5, 6)), ((3, 0), (2, 5, 0)), ((3, 6), (0, 5, 6)), ((3, 6), (2, 0, 6))):
        result = OURS.grouped_matmul(mx.ones(x), mx.ones(w), mx.zeros((w[0] + 1,), mx.int32))
        assert result.shape == (x[0], w[1])
        assert not host(result).any()


def one_by_one(x: mx.array, w: mx.array, offsets: list[int], *, transpose: bool) -> mx.array:
    parts = [x[begin:end] @ (w[e].T if transpose else w[e]) for e, (begin, end) in enumerate(itertools.pairwise(offsets))]
    width = w.shape[1 if transpose else 2]
    return mx.concatenate([*parts, mx.zeros((x.shape[0] - offsets[-1], width), x.dtype)])


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("transpose", [True, False])
def test_gradients_of_groups(transpose: bool, natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    offsets = [0, 3, 3, 8, 9]
    x, w, cotangent = random((10, 6)), random((4, 5, 6) if transpose else (4, 6, 5), seed=1), random((10, 5), seed=2)
    ends = mx.array(offsets)
    _, actual = mx.vjp(lambda x, w: OURS.grouped_matmul(x, w, ends, transpose=transpose), [x, w], [cotangent])
    for got, exact in zip(actual, gradients(lambda x, w: one_by_one(x, w, offsets, transpose=transpose), [x, w], cotangent), strict=True):
        assert_close(got, exact, slack=2)

    def twice(matmul: Any) -> Any:
        return lambda x, w: mx.vjp(lambda x, w: matmul(x, w) ** 2, [x, w], [mx.ones_like(matmul(x, w))])[1][1]

    second = random(w.shape, seed=3)
    _, actual = mx.vjp(twice(lambda x, w: OURS.grouped_matmul(x, w, ends, transpose=transpose)), [x, w], [second])
    exact_second = gradients(twice(lambda x, w: one_by_one(x, w, offsets, transpose=transpose)), [x, w], second)
    for got, exact in zip(actual, exact_second, strict=True):
        assert_close(got, exact, slack=3)


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_gathers(dtype: mx.Dtype, rising: bool, natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    rhs = mx.array(np.sort(np.arange(30) % 3) if rising else np.arange(30) % 3)
    a, b, cotangent = random((30, 2, 8), dtype), random((4, 8, 5), dtype, seed=1), random((30, 2, 5), dtype, seed=2)
    _, actual = mx.vjp(lambda a, b: OURS.gather_mm(a, b, rhs_indices=rhs, sorted_indices=rising), [a, b], [cotangent])
    for got, exact in zip(actual, gradients(lambda a, b: a @ b[rhs], [a, b], cotangent), strict=True):
        assert got.dtype == dtype
        assert_close(got, exact, slack=2)


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("right", [(EXPERTS,), ()], ids=str)
def test_gradients_of_a_single_matrix(right: tuple[int, ...], natively: bool, request: pytest.FixtureRequest) -> None:
    """For which MLX's own raise an error."""
    if natively:
        request.getfixturevalue("matmuls")
    weights = cases.draw(np.random.default_rng(2), (*right, 16, 64), FORM, mx.float32)
    a, cotangent = random((3, 64)), random((3, 16))
    for rhs in mx.array(0), mx.array([0, 0]):
        which = {"lhs_indices": mx.zeros_like(rhs), "rhs_indices": rhs}
        cotangents = mx.broadcast_to(cotangent, (*rhs.shape, 3, 16))
        _, (quantised,) = mx.vjp(lambda a, which=which: OURS.gather_qmm(a, *weights.arrays, **weights.options, **which), [a], [cotangents])
        b = mx.array(weights.exact.astype(np.float32)).swapaxes(-1, -2)
        _, (dense, _) = mx.vjp(lambda a, b, which=which: OURS.gather_mm(a, b, **which), [a, b], [cotangents])
        exact = rhs.size * host(cotangent) @ weights.exact.reshape(-1, 16, 64)[0]
        assert_close(quantised, exact, slack=2)
        assert_close(dense, exact, slack=2)


@pytest.mark.parametrize("pairs", [20, 80])
@pytest.mark.parametrize("n", [9, 16])
@pytest.mark.parametrize("form", [FORM, Form("mxfp8", 8, 32)], ids=str)
def test_gradients_of_quantised_gathers(matmuls: Matmuls, form: Form, n: int, pairs: int) -> None:
    weights = cases.draw(np.random.default_rng(2), (EXPERTS, n, 64), form, mx.float16)
    rhs, cotangent = mx.arange(pairs) % 3, random((pairs, 1, n), mx.float16, seed=2)
    primals = [random((pairs, 1, 64), mx.float16), *weights.arrays[1:]][: 3 if form.mode == "affine" else 1]

    def matmul(x: mx.array, *parts: mx.array) -> mx.array:
        scales, *biases = parts or weights.arrays[1:]
        result: mx.array = OURS.gather_qmm(x, weights.arrays[0], scales, *biases, rhs_indices=rhs, **weights.options)
        return result

    def plain(x: mx.array, *parts: mx.array) -> mx.array:
        if not parts:
            return x @ mx.array(weights.exact.swapaxes(1, 2))[rhs]
        codes = mx.array(unpacked(np.array(weights.arrays[0]), form.bits).astype(np.float64))
        scales, biases = (mx.repeat(part, form.group_size, axis=-1) for part in parts)
        return x @ (codes * scales + biases).swapaxes(1, 2)[rhs]

    matmuls.calls.clear()
    _, actual = mx.vjp(matmul, primals, [cotangent])
    for got, exact in zip(actual, gradients(plain, primals, cotangent), strict=True):
        assert_close(got, exact, slack=3)
    kinds = [name.split(" (")[0] for name in matmuls.calls]
    assert kinds.count("grouped quantised") == (0 if pairs < 64 else 2 if n % 8 == 0 else 1)


def test_compiled(matmuls: Matmuls) -> None:
    rhs = mx.arange(80) % EXPERTS
    a, b = random((80, 1, 16), mx.float16), random((EXPERTS, 16, 9), mx.float16, seed=1)
    call = mx.compile(lambda a, b: OURS.gather_mm(2 * a, b, rhs_indices=rhs))
    assert_close(call(a, b), expected(2 * host(a), host(b), None, np.array(rhs)))


# ------------------------------------------------------------------------------------------------------------------- errors
A, M = mx.ones((5, 1, 12)), mx.ones((4, 12, 9))
W, S, B = MLX.quantize(mx.ones((4, 8, 64)), group_size=32)
X, RHS = mx.ones((5, 1, 64)), mx.zeros((5,), mx.int32)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((A, M[:, :5], None, RHS), r"Shapes must be a \[\.\.\., M, K\] and b \[\.\.\., K, N\], got \(5,1,12\) and \(4,5,9\)."),
        ((A, mx.array(1.0), None, RHS), r"Shapes must be .*, got \(5,1,12\) and \(\)."),
        ((A, M, None, RHS * 1.0), "rhs_indices must be integers, got float32."),
        ((A, M, RHS > 0, RHS), "lhs_indices must be integers, got bool."),
        ((A, M, RHS[:3], RHS), r"lhs_indices and rhs_indices must broadcast, got \(3,\) and \(5,\)."),
        ((A.astype(mx.int32), M.astype(mx.int32), None, RHS), "Only float16, bfloat16 and float32 are supported, got int32 and int32."),
        ((A.astype(mx.complex64), M, None, RHS), "Only float16, .*, got complex64 and float32."),
    ],
)
def test_errors_of_gather_mm(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[gather_mm\] {text}$"):
        OURS.gather_mm(*arguments)
    with pytest.raises(ValueError, match=r"."):
        MLX.gather_mm(*arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((X, W, S), {}, "Mode 'affine' needs biases, got None."),
        ((X[..., :32], W, S, B), {}, r"x must be \[\.\.\., M, 64\] for weights \(4,8,8\) of 4 bit with transpose=True, got \(5,1,32\)."),
        ((X[0, 0], W, S, B), {}, r"x must be \[\.\.\., M, 64\] .*, got \(64,\)."),
        ((X, W, S, B), {"rhs_indices": RHS * 1.0}, "rhs_indices must be integers, got float32."),
        ((X, W, S, B), {"lhs_indices": RHS[:3]}, r"lhs_indices and rhs_indices must broadcast, got \(3,\) and \(5,\)."),
        ((X.astype(mx.complex64), W, S, B), {}, "Only float16, bfloat16 and float32 are supported, got complex64."),
    ],
)
def test_errors_of_gather_qmm(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    options = {"rhs_indices": RHS, "group_size": 32} | options
    with pytest.raises(ValueError, match=rf"^\[gather_qmm\] {text}$"):
        OURS.gather_qmm(*arguments, **options)
    with pytest.raises(ValueError, match=r"."):
        MLX.gather_qmm(*arguments, **options)


def test_global_scales_are_left_to_mlx(matmuls: Matmuls) -> None:
    w, s = MLX.quantize(mx.ones((4, 8, 64)), mode="nvfp4")
    with pytest.raises(ValueError, match=r"^\[gather_qmm\] Global scale is only supported on the GPU\.$"):
        OURS.gather_qmm(X, w, s, rhs_indices=RHS, mode="nvfp4", global_scale=mx.ones(4), stream=mx.cpu)
    with pytest.raises(ValueError, match=r"^\[gather_qmm\] Global scale is only supported for 'nvfp4'"):
        OURS.gather_qmm(X, W, S, B, rhs_indices=RHS, group_size=32, global_scale=mx.ones(4))
    with pytest.raises(ValueError, match=r"^\[gather_qmm\] Global scale is not supported without indices"):
        OURS.gather_qmm(mx.ones((4, 1, 64)), w, s, mode="nvfp4", global_scale=mx.ones(4))
    assert not matmuls.calls


def test_errors_of_groups() -> None:
    x, w, offsets = mx.ones((5, 12)), mx.ones((4, 9, 12)), mx.zeros((5,), mx.int32)
    for arguments, options, text in (
        ((x[None], w, offsets), {}, r"Shapes must be x \[M, K\] and w \[E, N, K\], got \(1,5,12\) and \(4,9,12\)."),
        ((x, w, offsets), {"transpose": False}, r"Shapes must be x \[M, K\] and w \[E, K, N\], got \(5,12\) and \(4,9,12\)."),
        ((x, w, offsets[:4]), {}, r"offsets must have the shape \(5,\), got \(4,\)."),
        ((x, w, offsets * 1.0), {}, "offsets must be of a type such as int32, got float32."),
        ((x.astype(mx.int32), w.astype(mx.int32), offsets), {}, "Only float16, bfloat16 and float32 are supported, .*"),
    ):
        for call in OURS.grouped_matmul, partial(mlx_cuda.explain, OURS.grouped_matmul):
            with pytest.raises(ValueError, match=rf"^\[grouped_matmul\] {text}$"):
                call(*arguments, **options)
    with pytest.raises(TypeError, match=r"^\[grouped_matmul\] offsets must be an mlx\.core\.array, got list\.$"):
        OURS.grouped_matmul(x, w, [0])
