"""Batch-invariant matmuls: dense, quantized and MoE. The right operand is treated as weights, the left one as tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from .._common.arrays import Shape, StreamOrDevice, resolve, shape_text
from .._matmul.batches import upstream_quantized_matmul
from .._matmul.formats import Format
from .._matmul.gather import gather_qmm as our_gather_qmm
from .._matmul.gather import stacked
from .._matmul.grouped import QuantizedExperts
from .._matmul.quantized import quantized_matmul as our_quantized_matmul
from .._matmul.upstream import upstream_gather_mm, upstream_gather_qmm
from . import grouped
from .rows import in_fixed_pairs, in_fixed_rows
from .state import NotInvariant, instead_of

upstream_matmul = mx.matmul
upstream_addmm = mx.addmm
upstream_operator = mx.array.__matmul__


@instead_of(upstream_matmul, "mx.matmul")
def matmul(a: mx.array, b: mx.array, /, *, stream: StreamOrDevice = None) -> mx.array:
    with mx.stream(resolve(stream)):
        return _matmul(a, b)


@instead_of(upstream_operator, "The operator @")
def operator(a: mx.array, b: mx.array) -> mx.array:
    return _matmul(a, b)


@instead_of(upstream_addmm, "mx.addmm")
def addmm(c: mx.array, a: mx.array, b: mx.array, /, alpha: float = 1.0, beta: float = 1.0, *, stream: StreamOrDevice = None) -> mx.array:
    with mx.stream(resolve(stream)):
        dtype = upstream_addmm(c, a, b, alpha, beta).dtype  # which looks at the arguments
        result = _matmul(a.astype(dtype), b.astype(dtype))
        return (result if alpha == 1 else alpha * result) + (c if beta == 1 else beta * c).astype(dtype)


def _matmul(a: mx.array, b: mx.array) -> mx.array:
    if min(a.ndim, b.ndim) > 1 and a.shape[-1] == 1 == b.shape[-2]:  # no sums; MLX's matmul rounds float32 to TF32 in some shapes
        upstream_matmul(a, b)  # which looks at the arguments
        return mx.multiply(a, b)
    left, right = a.shape, b.shape
    if b.ndim > 2:
        raise NotInvariant(
            f"The matmul of {shape_text(left)} and {shape_text(right)} has a batch of right operands: its kernel depends on how many rows "
            "and batches there are. Attention has mx.fast.scaled_dot_product_attention, experts mx.gather_mm."
        )
    if not left or not right or 0 in (*left, *right) or left[-1] != right[0]:
        return upstream_matmul(a, b)
    rows, w, dtype = a.reshape(-1, left[-1]), b if b.ndim == 2 else b[:, None], mx.result_type(a.dtype, b.dtype)
    if grouped.takes(dtype, rows.shape[0], w.shape[0], w.shape[1]):
        result = grouped.of_all(rows.astype(dtype), grouped.dense(w.astype(dtype)[None]))
    else:
        result = in_fixed_rows(rows, lambda part: upstream_matmul(part, w))
    return result.reshape((*left[:-1], *right[1:]))  # which may be nothing, and MLX takes no less than one argument


def quantized(by: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.quantized_matmul`` by a function that computes any number of tokens."""

    @instead_of(upstream_quantized_matmul, "mx.quantized_matmul")
    def quantized_matmul(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, transpose: bool = True,
        group_size: int | None = None, bits: int | None = None, mode: str = "affine", *,
        stream: StreamOrDevice = None,
    ) -> mx.array:  # fmt: skip
        if w.ndim > 2:
            raise NotInvariant(
                f"mx.quantized_matmul of {shape_text(x.shape)} and {shape_text(w.shape)} has a batch of right operands: its kernel "
                "depends on how many there are. Keys and values must not be quantized; experts have mx.gather_qmm."
            )
        given = (w, scales, biases, transpose, group_size, bits, mode)
        with mx.stream(resolve(stream)):
            if x.ndim == 0 or 0 in x.shape:
                return by(x, *given)
            rows = x.reshape(-1, x.shape[-1])
            plan = our_quantized_matmul.prepare(rows, *given).plan
            if grouped.takes(plan.dtype, rows.shape[0], rows.shape[1], plan.out[-1], plan.form):
                experts = _experts(plan.dtype, plan.form, w, scales, biases, transpose=transpose)
                result = grouped.of_all(rows.astype(plan.dtype), grouped.quantized(experts))
            else:
                result = in_fixed_rows(rows, lambda part: by(part, *given))
            return result.reshape(*x.shape[:-1], plan.out[-1])

    return quantized_matmul


def gathered(by: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.gather_mm`` in the same way."""

    @instead_of(upstream_gather_mm, "mx.gather_mm")
    def gather_mm(
        a: mx.array, b: mx.array, /, lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None, *,
        sorted_indices: bool = False, stream: StreamOrDevice = None,
    ) -> mx.array:  # fmt: skip
        with mx.stream(resolve(stream)):
            if lhs_indices is None and rhs_indices is None:
                return _matmul(a, b)
            alike = upstream_gather_mm(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices)

            def in_one(rows: mx.array, numbers: mx.array) -> mx.array:
                w = stacked(b.astype(alike.dtype), resolve(None))
                return grouped.of_each(rows.astype(alike.dtype), numbers, w.shape[0], grouped.dense(w))

            def by_experts(rows: mx.array, numbers: mx.array) -> mx.array:
                return in_fixed_pairs(rows, numbers, lambda part, some: by(part, b, None, some))

            takes = b.ndim > 1 and grouped.takes(alike.dtype, alike.size, b.shape[-2], b.shape[-1])
            return _by_pairs(a, b, lhs_indices, rhs_indices, in_one if takes else by_experts, alike)

    return gather_mm


def gathered_quantized(by: Callable[..., mx.array], without_indices: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.gather_qmm`` in the same way."""

    @instead_of(upstream_gather_qmm, "mx.gather_qmm")
    def gather_qmm(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None,
        lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None, transpose: bool = True,
        group_size: int | None = None, bits: int | None = None, mode: str = "affine", global_scale: mx.array | None = None, *,
        sorted_indices: bool = False, stream: StreamOrDevice = None,
    ) -> mx.array:  # fmt: skip
        form = (transpose, group_size, bits, mode)
        with mx.stream(resolve(stream)):
            if lhs_indices is None and rhs_indices is None and global_scale is None:
                return without_indices(x, w, scales, biases, *form)
            indices = (lhs_indices, rhs_indices)
            given = (x, w, scales, biases, *indices, *form, global_scale)
            alike = upstream_gather_qmm(*given, sorted_indices=sorted_indices)
            plan = our_gather_qmm.prepare(*given, sorted_indices=sorted_indices).plan

            def in_one(rows: mx.array, numbers: mx.array) -> mx.array:
                experts = _experts(plan.dtype, plan.form, w, scales, biases, transpose=transpose)
                return grouped.of_each(rows.astype(plan.dtype), numbers, experts.w.shape[0], grouped.quantized(experts))

            def by_experts(rows: mx.array, numbers: mx.array) -> mx.array:
                return in_fixed_pairs(rows, numbers, lambda part, some: by(part, w, scales, biases, None, some, *form, global_scale))

            takes = global_scale is None and grouped.takes(plan.dtype, alike.size, x.shape[-1], alike.shape[-1], plan.form)
            return _by_pairs(x, w, *indices, in_one if takes else by_experts, alike)

    return gather_qmm


def _by_pairs(
    x: mx.array,
    w: mx.array,
    lhs: mx.array | None,
    rhs: mx.array | None,
    multiply: Callable[[mx.array, mx.array], mx.array],
    alike: mx.array,
) -> mx.array:
    """Compute the matmuls of all pairs that the indices select, one by one. ``alike``: MLX's function, which has checked the call."""
    if min(x.ndim, w.ndim) < 2:
        raise NotInvariant(f"mx.gather_mm and mx.gather_qmm take matrices, got {shape_text(x.shape, w.shape)}: give them two dimensions.")
    if 0 in (*alike.shape, *x.shape):
        return mx.zeros(alike.shape, alike.dtype)
    lhs = _numbers(x.shape[:-2]) if lhs is None else lhs
    rhs = _numbers(w.shape[:-2]) if rhs is None else rhs
    pairs = mx.broadcast_shapes(lhs.shape, rhs.shape)
    height, width = x.shape[-2:]
    matrices, experts = (mx.broadcast_to(each, pairs).reshape(-1).astype(mx.uint32) for each in (lhs, rhs))  # which 8 bits may not hold
    if height > 1:
        matrices = (matrices[:, None] * height + mx.arange(height, dtype=mx.uint32)).reshape(-1)
        experts = mx.repeat(experts, height)
    return multiply(mx.take(x.reshape(-1, width), matrices, axis=0), experts).reshape(alike.shape)


def _experts(
    dtype: mx.Dtype, form: Format | None, w: mx.array, scales: mx.array, biases: mx.array | None, *, transpose: bool
) -> QuantizedExperts:
    """Return the weights as the kernel reads them: stacked, with affine scales in the dtype of the tokens."""
    assert form is not None  # noqa: S101  (the weights are quantized)
    stream = resolve(None)
    if biases is not None:
        scales, biases = scales.astype(dtype), stacked(biases.astype(dtype), stream)
    return QuantizedExperts(stacked(w, stream), stacked(scales, stream), biases, transpose, form)


def _numbers(batch: Shape) -> mx.array:
    """Return the indices of all matrices."""
    return mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
