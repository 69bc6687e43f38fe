"""Products of matrices: dense, quantized, and of experts. The right operand is taken for weights, the rows of the left for tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from .._common.arrays import resolve, shape_text
from .._matmul.batches import upstream_quantized_matmul
from .._matmul.upstream import upstream_gather_mm, upstream_gather_qmm
from .rows import in_fixed_pairs, in_fixed_rows
from .state import NotInvariant, instead_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._common.arrays import Shape, StreamOrDevice

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
        if b.ndim == 2 and c.shape in {(), (1,), b.shape[1:]}:  # the same for all rows
            return _by_rows(a, b, lambda rows, w: upstream_addmm(c, rows, w, alpha, beta))
        dtype = upstream_addmm(c, a, b, alpha, beta).dtype  # which looks at the arguments
        result = _matmul(a.astype(dtype), b.astype(dtype))
        return (result if alpha == 1 else alpha * result) + (c if beta == 1 else beta * c).astype(dtype)


def _matmul(a: mx.array, b: mx.array) -> mx.array:
    if min(a.ndim, b.ndim) > 1 and a.shape[-1] == 1 == b.shape[-2]:  # no sums; MLX's product rounds float32 to TF32 in some shapes
        upstream_matmul(a, b)  # which looks at the arguments
        return mx.multiply(a, b)
    return _by_rows(a, b, upstream_matmul)


def _by_rows(a: mx.array, b: mx.array, product: Callable[[mx.array, mx.array], mx.array]) -> mx.array:
    """The product of each row of ``[..., K]`` and a matrix ``[K, N]``, or a vector of K."""
    left, right = a.shape, b.shape
    if b.ndim > 2:
        raise NotInvariant(
            f"The product of {shape_text(left)} and {shape_text(right)} has a batch of right operands: its kernel depends on how many rows "
            "and batches there are. Attention has mx.fast.scaled_dot_product_attention, experts mx.gather_mm."
        )
    if not left or not right or 0 in (*left, *right) or left[-1] != right[0]:
        return product(a, b)
    w = b if b.ndim == 2 else b[:, None]
    result = in_fixed_rows(a.reshape(-1, left[-1]), lambda rows: product(rows, w))
    return result.reshape((*left[:-1], *right[1:]))  # which may be nothing, and MLX takes no less than one argument


def quantized(by: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.quantized_matmul`` by a function that computes as many rows as it is given."""

    @instead_of(upstream_quantized_matmul, "mx.quantized_matmul")
    def quantized_matmul(
        x: mx.array,
        w: mx.array,
        /,
        scales: mx.array,
        biases: mx.array | None = None,
        transpose: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        *,
        stream: StreamOrDevice = None,
    ) -> mx.array:
        if w.ndim > 2:
            raise NotInvariant(
                f"mx.quantized_matmul of {shape_text(x.shape)} and {shape_text(w.shape)} has a batch of right operands: its kernel "
                "depends on how many there are. Keys and values must not be quantized; experts have mx.gather_qmm."
            )
        given = (w, scales, biases, transpose, group_size, bits, mode)
        with mx.stream(resolve(stream)):
            if x.ndim == 0 or 0 in x.shape:
                return by(x, *given)
            result = in_fixed_rows(x.reshape(-1, x.shape[-1]), lambda rows: by(rows, *given))
            return result.reshape(*x.shape[:-1], result.shape[-1])

    return quantized_matmul


def gathered(by: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.gather_mm`` likewise."""

    @instead_of(upstream_gather_mm, "mx.gather_mm")
    def gather_mm(
        a: mx.array,
        b: mx.array,
        /,
        lhs_indices: mx.array | None = None,
        rhs_indices: mx.array | None = None,
        *,
        sorted_indices: bool = False,
        stream: StreamOrDevice = None,
    ) -> mx.array:
        with mx.stream(resolve(stream)):
            if lhs_indices is None and rhs_indices is None:
                return _matmul(a, b)
            alike = upstream_gather_mm(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices)
            return _by_pairs(a, b, lhs_indices, rhs_indices, lambda rows, experts: by(rows, b, None, experts), alike)

    return gather_mm


def gathered_quantized(by: Callable[..., mx.array], without_indices: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.gather_qmm`` likewise."""

    @instead_of(upstream_gather_qmm, "mx.gather_qmm")
    def gather_qmm(
        x: mx.array,
        w: mx.array,
        /,
        scales: mx.array,
        biases: mx.array | None = None,
        lhs_indices: mx.array | None = None,
        rhs_indices: mx.array | None = None,
        transpose: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        global_scale: mx.array | None = None,
        *,
        sorted_indices: bool = False,
        stream: StreamOrDevice = None,
    ) -> mx.array:
        form = (transpose, group_size, bits, mode)
        with mx.stream(resolve(stream)):
            if lhs_indices is None and rhs_indices is None and global_scale is None:
                return without_indices(x, w, scales, biases, *form)
            indices = (lhs_indices, rhs_indices)
            alike = upstream_gather_qmm(
                x, w, scales, biases, *indices, transpose, group_size, bits, mode, global_scale, sorted_indices=sorted_indices
            )

            def by_experts(rows: mx.array, experts: mx.array) -> mx.array:
                return by(rows, w, scales, biases, None, experts, *form, global_scale)

            return _by_pairs(x, w, *indices, by_experts, alike)

    return gather_qmm


def _by_pairs(
    x: mx.array,
    w: mx.array,
    lhs: mx.array | None,
    rhs: mx.array | None,
    product: Callable[[mx.array, mx.array], mx.array],
    alike: mx.array,
) -> mx.array:
    """The products of all pairs that the indices name, row by row. ``alike``: MLX's own, which has looked at the arguments."""
    if min(x.ndim, w.ndim) < 2:
        raise NotInvariant(f"Products by indices are of matrices, got {shape_text(x.shape, w.shape)}: give them two dimensions.")
    if 0 in (*alike.shape, *x.shape):
        return mx.zeros(alike.shape, alike.dtype)
    lhs = _numbers(x.shape[:-2]) if lhs is None else lhs
    rhs = _numbers(w.shape[:-2]) if rhs is None else rhs
    pairs = mx.broadcast_shapes(lhs.shape, rhs.shape)
    height, width = x.shape[-2:]
    matrices, experts = (mx.broadcast_to(each, pairs).reshape(-1) for each in (lhs, rhs))
    if height > 1:
        matrices = (matrices[:, None] * height + mx.arange(height, dtype=matrices.dtype)).reshape(-1)
        experts = mx.repeat(experts, height)
    return in_fixed_pairs(mx.take(x.reshape(-1, width), matrices, axis=0), experts, product).reshape(alike.shape)


def _numbers(batch: Shape) -> mx.array:
    """Those of all matrices."""
    return mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
