"""Matmuls by the grouped GEMM: for any number of rows it sums over K from the first number to the last, whatever its tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from .._common.arrays import resolve
from .._common.choice import dtype_name
from .._loader import native
from .._matmul.formats import Format
from .._matmul.grouped import QuantizedExperts, grouped_gemm, grouped_quantized
from .._matmul.rules import NATIVE_BITS, GroupedCase, choose_grouped, chosen

Multiply = Callable[[mx.array, mx.array], mx.array]  # of rows [M, K] and the offsets of groups


def takes(dtype: mx.Dtype, rows: int, inner: int, columns: int, form: Format | None = None) -> bool:
    """Return whether the kernel supports such matmuls: 16 bits, K a multiple of 8, and weights that it can dequantize."""
    if form is not None and form.mode == "affine" and form.bits not in NATIVE_BITS:
        return False
    case = GroupedCase(rows, columns, inner, dtype_name(dtype), transpose=True, experts=1)
    return chosen(choose_grouped, case, native.gpu(resolve(None)), otherwise="fallback").engine == "grouped"


def dense(w: mx.array) -> Multiply:
    """Multiply tokens by matrices ``[E, K, N]``."""
    return lambda rows, offsets: grouped_gemm(rows, w, offsets, False, resolve(None))


def quantized(experts: QuantizedExperts) -> Multiply:
    """Multiply tokens by quantized matrices."""
    return lambda rows, offsets: grouped_quantized(rows, experts, offsets, resolve(None))


def of_all(rows: mx.array, multiply: Multiply) -> mx.array:
    """Multiply all tokens by one matrix."""
    return multiply(rows, _all_of(rows.shape[0]))


def of_each(rows: mx.array, numbers: mx.array, count: int, multiply: Multiply) -> mx.array:
    """Multiply each token by its own one of ``count`` matrices."""
    order = mx.argsort(numbers)
    before = numbers < mx.arange(count + 1, dtype=mx.uint32)[:, None]  # whose sums are where each one's rows begin
    result = multiply(mx.take(rows, order, axis=0), before.sum(axis=1).astype(mx.int32))
    return mx.take(result, mx.argsort(order), axis=0)


@lru_cache(1024)
def _all_of(count: int) -> mx.array:
    return mx.array([0, count], mx.int32)
