"""``gather_qmm``, ``gather_mm`` and ``grouped_matmul`` against float64 of the very weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from . import quantized_cases as cases
from .formats import Form
from .reference import Array
from .support import DTYPES, GRADIENT_TOLERANCE, TOLERANCE, assert_close, host, normal, on_hopper
from .test_quantized_matmul import FEW_FORMS, FORM, OURS, dtypes, engine, few_forms, forms, halves, transposed

pytestmark = pytest.mark.gpu

EXPERTS = 6
# How many pairs each expert has: all of them, one alone, none between, and every one the same.
SPREADS = {
    "even": [4] * 6,
    "one has all": [0, 0, 24, 0, 0, 0],
    "gaps": [7, 0, 0, 11, 0, 6],
    "many": [100, 3, 0, 64, 65, 200],
    "one has all of many": [0, 0, 0, 0, 0, 333],
}


def experts_of(rng: np.random.Generator, spread: list[int], *, rising: bool) -> NDArray[Any]:
    each = np.repeat(np.arange(len(spread)), spread)
    return each if rising else rng.permutation(each)


def one_by_one(x: Array, dense: Array, lhs: NDArray[Any], rhs: NDArray[Any]) -> Array:
    result = np.empty((len(rhs), x.shape[1], dense.shape[2]))
    for expert in np.unique(rhs):
        those = rhs == expert
        result[those] = x[lhs[those]] @ dense[expert]
    return result


@forms
@transposed
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_quantised_experts(rng: np.random.Generator, form: Form, transpose: bool, spread: list[int]) -> None:
    n, k = 72, 2 * max(form.group_size, 64)
    for dtype, rising in itertools.product((mx.float16, mx.bfloat16), (True, False)):
        weights = cases.draw(rng, (EXPERTS, n, k) if transpose else (EXPERTS, k, 2 * form.group_size), form, dtype)
        dense = weights.exact.swapaxes(1, 2) if transpose else weights.exact
        rhs = experts_of(rng, spread, rising=rising)
        x = normal(rng, (len(rhs), 1, k), dtype)
        options = weights.options | {"transpose": transpose, "rhs_indices": mx.array(rhs), "sorted_indices": rising}
        wanted = "small_m" if len(rhs) <= 64 else "grouped"
        assert engine(OURS.gather_qmm, x, *weights.arrays, **options) == wanted
        result = OURS.gather_qmm(x, *weights.arrays, **options)
        exact = one_by_one(host(x), dense, np.arange(len(rhs)), rhs)
        assert_close(result, exact, tolerance=1.5 * TOLERANCE[dtype])


@pytest.mark.parametrize("form", [*FEW_FORMS, Form("mxfp4", 4, 32)], ids=str)
@transposed
@halves
def test_every_number_of_pairs(rng: np.random.Generator, form: Form, transpose: bool, dtype: mx.Dtype) -> None:
    """Unsorted ones, so repeated ones, of matrices with one row and two."""
    n, k = (75, 5 * max(form.group_size, 64)) if transpose else (3 * form.group_size, 72)
    weights = cases.draw(rng, (EXPERTS, n, k) if transpose else (EXPERTS, k, n), form, dtype)
    dense = weights.exact.swapaxes(1, 2) if transpose else weights.exact
    for pairs, rows in itertools.product(cases.ROWS, (1, 2)):
        rhs = rng.integers(0, EXPERTS, pairs)
        x = normal(rng, (pairs, rows, k), dtype)
        result = OURS.gather_qmm(x, *weights.arrays, rhs_indices=mx.array(rhs), transpose=transpose, **weights.options)
        exact = one_by_one(host(x), dense, np.arange(pairs), rhs)
        assert_close(result, exact, tolerance=1.5 * TOLERANCE[dtype], about=(pairs, rows))


# Experts, n, k and pairs: with n a multiple of 32 and enough of them, one row of each is what quantized_moe_sm90.cu is for.
SHARED = {
    "two pairs of each": (20, 160, 768, 40),
    "every pair shares": (5, 256, 1024, 64),
    "slices that warps do not share evenly": (9, 96, 1280, 64),
    "some alone": (40, 128, 768, 33),
    "one token's": (8, 1056, 768, 5),
    "long rows": (3, 352, 4096, 50),
}


@forms
@halves
@pytest.mark.parametrize("shape", SHARED.values(), ids=SHARED.keys())
def test_pairs_that_share_experts(rng: np.random.Generator, form: Form, dtype: mx.Dtype, shape: tuple[int, int, int, int]) -> None:
    """Rows of tokens and of the pairs' own, of every expert and every other one; numbers that rise and one expert for most."""
    experts, n, k, pairs = shape
    weights = cases.draw(rng, (experts, n, k), form, dtype)
    tokens = min(8, pairs)
    x = normal(rng, (pairs, 1, k), dtype)
    mostly = np.where(rng.random(pairs) < 0.7, experts - 1, rng.integers(0, experts, pairs))
    for rhs in (rng.integers(0, experts, pairs), np.sort(rng.integers(0, experts, pairs)), mostly):
        own = OURS.gather_qmm(x, *weights.arrays, rhs_indices=mx.array(rhs), **weights.options)
        exact = one_by_one(host(x), weights.exact.swapaxes(1, 2), np.arange(pairs), rhs)
        assert_close(own, exact, tolerance=1.5 * TOLERANCE[dtype])
        lhs = rng.integers(0, tokens, pairs)
        indices = {"lhs_indices": mx.array(lhs), "rhs_indices": mx.array(rhs)}
        of_tokens = OURS.gather_qmm(x[:tokens], *weights.arrays, **indices, **weights.options)
        exact = one_by_one(host(x), weights.exact.swapaxes(1, 2), lhs, rhs)
        assert_close(of_tokens, exact, tolerance=1.5 * TOLERANCE[dtype])
    rhs = rng.integers(0, (experts + 1) // 2, pairs)
    half = OURS.gather_qmm(x[::-1], *(part[::2] for part in weights.arrays), rhs_indices=mx.array(rhs), **weights.options)
    exact = one_by_one(host(x)[::-1], weights.exact[::2].swapaxes(1, 2), np.arange(pairs), rhs)
    assert_close(half, exact, tolerance=1.5 * TOLERANCE[dtype])


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {  # of [pairs, 4, 544]: some matrices of 256 columns
    "every other matrix": lambda x: x[::2, :1, :256],
    "columns of a wider matrix": lambda x: x[:, 1:2, 3:259],
    "every other column": lambda x: x[:, 2:3, : 2 * 256 : 2],
    "backwards": lambda x: x[::-1, :1, :256],
    "one for all": lambda x: mx.broadcast_to(x[:1, :1, :256], (x.shape[0], 1, 256)),
    "columns": lambda x: mx.contiguous(x[:, 3, :256].T).T[:, None],
    "two rows that are apart": lambda x: x[:, ::3, :256],
}


@few_forms
@halves
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(rng: np.random.Generator, form: Form, dtype: mx.Dtype, view: Callable[[mx.array], mx.array]) -> None:
    """Of x and of the stacks of weights, with few pairs and many, by one number for each pair or by two."""
    whole = cases.draw(rng, (2 * EXPERTS, 50, 256), form, dtype)
    parts = tuple(part[::2, 7:47] for part in whole.arrays)
    dense, b = whole.exact[::2, 7:47].swapaxes(1, 2), normal(rng, (2 * EXPERTS, 300, 50), dtype, 1 / 16)[::-2, 11:267, 3:43]
    mx.eval(parts, b)
    for pairs, named in itertools.product((12, 240), (False, True)):
        x = view(normal(rng, (pairs, 4, 544), dtype))
        mx.eval(x)
        rhs = rng.integers(0, EXPERTS, x.shape[0])
        lhs = rng.integers(0, x.shape[0], x.shape[0]) if named else np.arange(x.shape[0])
        indices = {"rhs_indices": mx.array(rhs)} | ({"lhs_indices": mx.array(lhs)} if named else {})
        quantised = OURS.gather_qmm(x, *parts, **whole.options, **indices)
        assert_close(quantised, one_by_one(host(x), dense, lhs, rhs), tolerance=1.5 * TOLERANCE[dtype], about=(pairs, named))
        result = OURS.gather_mm(x, b, **indices)
        assert_close(result, one_by_one(host(x), host(b), lhs, rhs), tolerance=TOLERANCE[dtype], about=(pairs, named))


@few_forms
@dtypes
def test_tokens_of_mlx_lm(rng: np.random.Generator, form: Form, dtype: mx.Dtype) -> None:
    """x ``[B, L, 1, 1, K]`` and some experts of each token, repeated ones too; many of float32 are MLX's."""
    weights = cases.draw(rng, (EXPERTS, 65, 256), form, dtype)
    for batch, length, each in (1, 1, 4), (2, 3, 4), (3, 20, 4) if dtype != mx.float32 else (4, 4, 4):
        x, rhs = normal(rng, (batch, length, 1, 1, 256), dtype), rng.integers(0, EXPERTS, (batch, length, each))
        result = OURS.gather_qmm(x, *weights.arrays, rhs_indices=mx.array(rhs), **weights.options)
        exact = host(x) @ weights.exact[rhs].swapaxes(-1, -2)
        assert_close(result, exact, tolerance=1.5 * TOLERANCE[dtype])


@pytest.mark.parametrize("call", cases.ways_to_name(EXPERTS), ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_way_to_name_matrices(rng: np.random.Generator, call: Any, rows: int) -> None:
    batch, left, right = call
    count = int(np.prod(batch))
    lhs = np.arange(count).reshape(batch) if left is None else rng.integers(0, count, left)
    rhs = np.arange(EXPERTS) if right is None else rng.integers(0, EXPERTS, right)
    given = {
        "lhs_indices": None if left is None else mx.array(lhs),
        "rhs_indices": None if right is None else mx.array(rhs),
    }
    lhs, rhs = np.broadcast_arrays(lhs, rhs)
    x = normal(rng, (*batch, rows, 128), mx.bfloat16)
    flat = host(x).reshape(count, rows, 128)
    weights = cases.draw(rng, (EXPERTS, 40, 128), FORM, mx.bfloat16)
    exact = one_by_one(flat, weights.exact.swapaxes(1, 2), lhs.reshape(-1), rhs.reshape(-1)).reshape(*lhs.shape, rows, 40)
    quantised = OURS.gather_qmm(x, *weights.arrays, **weights.options, **given)
    assert_close(quantised, exact, tolerance=1.5 * TOLERANCE[mx.bfloat16])
    b = normal(rng, (EXPERTS, 128, 40), mx.bfloat16, 128**-0.5)
    exact = one_by_one(flat, host(b), lhs.reshape(-1), rhs.reshape(-1)).reshape(*lhs.shape, rows, 40)
    assert_close(OURS.gather_mm(x, b, **given), exact, tolerance=TOLERANCE[mx.bfloat16])


@pytest.mark.parametrize("k", [8, 64, 72, 136])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_dense_experts(rng: np.random.Generator, spread: list[int], k: int) -> None:
    for dtype, rising, turned, n in itertools.product((mx.float16, mx.bfloat16), (True, False), (True, False), (1, 33, 256)):
        w = normal(rng, (EXPERTS, n, k) if turned else (EXPERTS, k, n), dtype, k**-0.5)
        b = w.swapaxes(1, 2) if turned else w  # as mlx-lm's layers give it, and as it lies
        rhs = experts_of(rng, spread, rising=rising)
        a = normal(rng, (len(rhs), 1, k), dtype)
        options = {"rhs_indices": mx.array(rhs), "sorted_indices": rising}
        assert engine(OURS.gather_mm, a, b, **options) == "grouped"
        assert_close(OURS.gather_mm(a, b, **options), one_by_one(host(a), host(b), np.arange(len(rhs)), rhs), tolerance=TOLERANCE[dtype])


def test_explain_names_the_kernel(rng: np.random.Generator) -> None:
    """As the weights lie now. On Hopper its tiles are as wide as there is work for; few rows are multiplied one by one."""

    def grouped(dtype: str, columns: int, end: str = "") -> str:
        return f"grouped_sm90 grouped_{dtype}_{columns}{end}" if on_hopper() else f"grouped grouped_{dtype}{end}"

    def gathered(rows: int, *shape: int, view: Callable[[mx.array], mx.array] = lambda w: w) -> str:
        mx.eval(w := view(normal(rng, (EXPERTS, *shape), mx.bfloat16)))
        a = normal(rng, (rows, 1, w.shape[1]), mx.bfloat16)
        return str(OURS.explain(OURS.gather_mm, a, w, rhs_indices=mx.array([0] * rows)).kernel)

    def turned(w: mx.array) -> mx.array:
        return w.swapaxes(1, 2)

    assert gathered(16, 64, 40) == gathered(17, 64, 40) == grouped("bfloat16", 64, "_not_transposed")
    assert gathered(16, 40, 64, view=turned) == "gather gather_mv_bfloat16"
    assert gathered(17, 40, 64, view=turned) == grouped("bfloat16", 64)
    assert gathered(17, 64, 33) == gathered(17, 64, 48, view=lambda w: w[..., 1:41]) == grouped("bfloat16", 64)  # copies
    offsets, x = mx.array([4096] * (EXPERTS + 1), mx.int32), normal(rng, (4096, 64), mx.float16)
    for transpose, end in (True, ""), (False, "_not_transposed"):
        w = normal(rng, (EXPERTS, 2048, 64) if transpose else (EXPERTS, 64, 2048), mx.float16)
        assert OURS.explain(OURS.grouped_matmul, x, w, offsets, transpose=transpose).kernel == grouped("float16", 256, end)


def groups(x: Array, w: Array, offsets: NDArray[Any], *, transpose: bool) -> Array:
    result = np.zeros((len(x), w.shape[1 if transpose else 2]))
    for e, (begin, end) in enumerate(itertools.pairwise(offsets)):
        result[begin:end] = x[begin:end] @ (w[e].T if transpose else w[e])
    return result


@transposed
@halves
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_groups(rng: np.random.Generator, spread: list[int], dtype: mx.Dtype, transpose: bool) -> None:
    offsets = np.concatenate([[0], np.cumsum(spread)])
    for n, k, beyond in (40, 72, 0), (128, 64, 9), (33, 56, 3):
        x = normal(rng, (int(offsets[-1]) + beyond, k), dtype)
        w = normal(rng, (EXPERTS, n, k) if transpose else (EXPERTS, k, n), dtype, k**-0.5)
        result = OURS.grouped_matmul(x, w, mx.array(offsets, mx.int32), transpose=transpose)
        assert_close(result, groups(host(x), host(w), offsets, transpose=transpose), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "k"), [(mx.float32, 72), (mx.bfloat16, 50)], ids=["float32", "odd k"])
def test_groups_that_are_left_to_mlx(rng: np.random.Generator, dtype: mx.Dtype, k: int) -> None:
    """A few: MLX compiles a kernel for each kind first."""
    offsets = np.concatenate([[0], np.cumsum(SPREADS["gaps"])])
    x, w = normal(rng, (int(offsets[-1]) + 2, k), dtype), normal(rng, (EXPERTS, 40, k), dtype, k**-0.5)
    result = OURS.grouped_matmul(x[::-1], w, mx.array(offsets, mx.int32))
    assert_close(result, groups(host(x)[::-1], host(w), offsets, transpose=True), tolerance=TOLERANCE[dtype])


@transposed
@halves
def test_gradients_of_groups(rng: np.random.Generator, dtype: mx.Dtype, transpose: bool) -> None:
    for spread, (n, k) in itertools.product(SPREADS.values(), ((64, 128), (40, 72))):
        offsets = np.concatenate([[0], np.cumsum(spread)])
        x, cotangent = normal(rng, (int(offsets[-1]) + 2, k), dtype), normal(rng, (int(offsets[-1]) + 2, n), dtype)
        w = normal(rng, (EXPERTS, n, k) if transpose else (EXPERTS, k, n), dtype, k**-0.5)
        ends = mx.array(offsets, mx.int32)
        dx, dw = mx.vjp(lambda x, w, ends=ends: OURS.grouped_matmul(x, w, ends, transpose=transpose), [x, w], [cotangent])[1]
        assert_close(dx, groups(host(cotangent), host(w), offsets, transpose=not transpose), tolerance=GRADIENT_TOLERANCE[dtype])
        exact = np.zeros(w.shape)
        for e, (begin, end) in enumerate(itertools.pairwise(offsets)):
            matmul = host(cotangent)[begin:end].T @ host(x)[begin:end]
            exact[e] = matmul if transpose else matmul.T
        assert_close(dw, exact, tolerance=GRADIENT_TOLERANCE[dtype])


@few_forms
def test_gradients_of_quantised_experts(rng: np.random.Generator, form: Form) -> None:
    weights = cases.draw(rng, (EXPERTS, 64, 256), form, mx.bfloat16)
    for count, rising in itertools.product((30, 200), (True, False)):
        rhs = rng.integers(0, EXPERTS, count)
        rhs = np.sort(rhs) if rising else rhs
        x, cotangent = normal(rng, (count, 1, 256), mx.bfloat16), normal(rng, (count, 1, 64), mx.bfloat16)
        options = weights.options | {"rhs_indices": mx.array(rhs), "sorted_indices": rising}
        (gradient,) = mx.vjp(lambda x, options=options: OURS.gather_qmm(x, *weights.arrays, **options), [x], [cotangent])[1]
        exact = host(cotangent) @ weights.exact[rhs]
        assert_close(gradient, exact, tolerance=GRADIENT_TOLERANCE[mx.bfloat16])


@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize(("dtype", "rising"), [(mx.float32, True), (mx.bfloat16, True), (mx.bfloat16, False)], ids=str)
def test_gradients_of_the_scales_of_experts(rng: np.random.Generator, dtype: mx.Dtype, rows: int, rising: bool) -> None:
    """Of indices that rise MLX computes them by segments: of others, its own ends in an error of CUDA's in float32."""
    rhs = rng.integers(0, EXPERTS, rows)
    rhs = np.sort(rhs) if rising else rhs
    gradients_of_scales(rng, dtype, rhs=rhs, lhs=None, rising=rising)


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_of_the_scales_of_all_experts_in_turn(rng: np.random.Generator, dtype: mx.Dtype, rising: bool) -> None:
    """Without rhs the experts rise, whatever rows lhs picks for them."""
    lhs = rng.integers(0, 5, EXPERTS)
    gradients_of_scales(rng, dtype, rhs=None, lhs=np.sort(lhs) if rising else lhs, rising=rising)


def gradients_of_scales(
    rng: np.random.Generator, dtype: mx.Dtype, rhs: NDArray[Any] | None, lhs: NDArray[Any] | None, *, rising: bool
) -> None:
    """Compare the gradients of x, scales and biases with float64's. ``rising``: what ``sorted_indices`` says."""
    weights = cases.draw(rng, (EXPERTS, 64, 256), FORM, dtype)
    w, scales, biases = weights.arrays
    experts, rows = np.arange(EXPERTS) if rhs is None else rhs, np.arange(0 if rhs is None else len(rhs)) if lhs is None else lhs
    x, cotangent = normal(rng, (rows.max() + 1, 1, 256), dtype), normal(rng, (len(experts), 1, 64), dtype)
    given = {name: mx.array(indices) for name, indices in (("rhs_indices", rhs), ("lhs_indices", lhs)) if indices is not None}
    options = weights.options | given | {"sorted_indices": rising}
    own = mx.vjp(lambda x, scales, biases: OURS.gather_qmm(x, w, scales, biases, **options), [x, scales, biases], [cotangent])[1]
    with mx.stream(mx.cpu):
        numbers = host(mx.dequantize(w, mx.ones_like(scales), mx.zeros_like(biases), **weights.options))
    of_x, of_weights = np.zeros(x.shape), np.zeros(numbers.shape)
    np.add.at(of_x, rows, host(cotangent) @ weights.exact[experts])
    np.add.at(of_weights, experts, host(cotangent).swapaxes(1, 2) @ host(x)[rows])
    of_groups = (*scales.shape, -1)
    assert_close(own[0], of_x, tolerance=GRADIENT_TOLERANCE[dtype])
    assert_close(own[1], (of_weights * numbers).reshape(of_groups).sum(-1), tolerance=GRADIENT_TOLERANCE[dtype])
    assert_close(own[2], of_weights.reshape(of_groups).sum(-1), tolerance=GRADIENT_TOLERANCE[dtype])


def test_more_experts_than_mlx_takes(rng: np.random.Generator) -> None:
    rhs = np.sort(rng.integers(0, 1500, 400))
    for dtype in DTYPES.values():
        w, a = normal(rng, (1500, 16, 32), dtype, 0.2), normal(rng, (400, 1, 32), dtype)
        result = OURS.gather_mm(a, w.swapaxes(1, 2), rhs_indices=mx.array(rhs), sorted_indices=True)
        assert_close(result, host(a) @ host(w)[rhs].swapaxes(1, 2), tolerance=TOLERANCE[dtype])
