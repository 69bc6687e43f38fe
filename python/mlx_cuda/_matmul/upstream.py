"""MLX's gather_mm and gather_qmm, without the calls for which they fail on CUDA: layouts that they misread, more matmuls than a grid holds.

docs/results/upstream-issues.md lists these issues and the affected version.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from .._common.arrays import Shape, resolve
from .._loader import native
from .formats import Format

upstream_gather_mm = mx.gather_mm  # whatever patch() puts in its place later
upstream_gather_qmm = mx.gather_qmm

MOST_MATMULS = 65535  # of a call: they are blocks in the last dimension of a grid
MOST_SORTED = 1024  # matrices, of the kernel for indices that rise
MOST_COUNTED = 2**31 - 1  # elements or bytes that kernels count in an int


def upstream_dense(
    x: mx.array, w: mx.array, lhs: mx.array | None, rhs: mx.array | None, transpose: bool, *, sorted_indices: bool
) -> mx.array:
    """Call MLX's gather_mm, which on the CPU computes only float32, and on CUDA is wrong for many layouts of its operands."""
    on, dtype = resolve(None), x.dtype
    w = w.swapaxes(-1, -2) if transpose else w
    if on.device.type == mx.cpu:
        x, w = x.astype(mx.float32), w.astype(mx.float32)
    engine = native.engine(on)
    if isinstance(engine, str):
        x = x if on.device.type == mx.cpu else mx.contiguous(x)
        return upstream_gather_mm(x, w, lhs, rhs, sorted_indices=sorted_indices and not native.on_cuda()).astype(dtype)
    if w.ndim > 3:
        rhs = _numbers(w.shape[:-2]) if rhs is None else rhs
        w = w.reshape(-1, *w.shape[-2:])
    x, w = engine.module.upstream_operand(x, False, on), engine.module.upstream_operand(w, True, on)
    left, right = x.shape[:-2] if lhs is None else lhs.shape, w.shape[:-2] if rhs is None else rhs.shape
    pairs = math.prod(mx.broadcast_shapes(left, right))
    in_order = sorted_indices and lhs is None and math.prod(left) == pairs and _takes_sorted(x, w)
    call = partial(upstream_gather_mm, x, w, sorted_indices=in_order)
    most = max(min(MOST_MATMULS, MOST_COUNTED // max(x.shape[-2] * w.shape[-1], 1)), 1)
    out = call(lhs, rhs) if in_order or pairs <= most else _in_parts(call, left, right, lhs, rhs, most)
    if engine.module.traced([x, w]):  # the gradient is as much an operand
        out = engine.module.upstream_operand(out, False, on)
    return out.astype(dtype)


def upstream_quantized(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, lhs: mx.array | None, rhs: mx.array | None, *,
    transpose: bool, form: Format, global_scale: mx.array | None, sorted_indices: bool,
) -> mx.array:  # fmt: skip
    """Call MLX's gather_qmm, whose CUDA kernels read 16 bytes of x at once, whatever its alignment, and need contiguous matrices."""
    on = resolve(None)
    engine = native.engine(on)
    if not isinstance(engine, str):
        x, w, scales = (engine.module.upstream_operand(array, False, on) for array in (x, w, scales))
        biases = None if biases is None else engine.module.upstream_operand(biases, False, on)

    def call(lhs: mx.array | None, rhs: mx.array | None) -> mx.array:
        return upstream_gather_qmm(x, w, scales, biases, lhs, rhs, transpose, *form, global_scale, sorted_indices=sorted_indices)

    left, right = x.shape[:-2] if lhs is None else lhs.shape, w.shape[:-2] if rhs is None else rhs.shape
    few = isinstance(engine, str) or math.prod(mx.broadcast_shapes(left, right)) <= MOST_MATMULS
    return call(lhs, rhs) if few else _in_parts(call, left, right, lhs, rhs, MOST_MATMULS)


def _takes_sorted(x: mx.array, w: mx.array) -> bool:
    """Return whether MLX's kernel for single tokens in the order of their matrices supports these counts."""
    rows = x.size // max(x.shape[-1], 1)
    bytes_of_largest = max(w.size, x.size, rows * w.shape[-1]) * w.itemsize
    return x.shape[-2] == 1 and math.prod(w.shape[:-2]) <= MOST_SORTED and bytes_of_largest <= MOST_COUNTED


def _in_parts(
    call: Callable[[mx.array, mx.array], mx.array], left: Shape, right: Shape, lhs: mx.array | None, rhs: mx.array | None, most: int
) -> mx.array:
    """Compute the matmuls of all pairs, so many per call."""
    pairs = mx.broadcast_shapes(left, right)
    first, second = (
        mx.broadcast_to(_numbers(shape) if indices is None else indices, pairs).flatten() for shape, indices in ((left, lhs), (right, rhs))
    )
    out = mx.concatenate([call(first[at : at + most], second[at : at + most]) for at in range(0, first.size, most)])
    return out.reshape(*pairs, *out.shape[1:])


def _numbers(batch: Shape) -> mx.array:
    """Return the indices of all matrices."""
    return mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
