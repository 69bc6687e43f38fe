"""Grouped GEMM: groups of tokens, each with its own matrix, as for MoE; dense and quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, cast, check_array, dense_dtype, require_arrays, require_flags, resolve, shape_text
from .._common.choice import Choice, Gpu, dtype_name
from .._common.errors import WrongValue
from .._common.gradients import with_gradients
from .._loader import native
from .._operation import Call, operation
from .formats import Format
from .quantized import parts_gradients, unpacked
from .rules import GROUPED_MULTIPLE, GroupedCase, choose_grouped, chosen
from .upstream import upstream_dense

if TYPE_CHECKING:
    from .._common.arrays import Shape, StreamOrDevice


class QuantizedExperts(NamedTuple):
    """Quantized weights ``[E, …]`` and their format."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    transpose: bool
    form: Format


class Plan(NamedTuple):
    """The plan of a call: the dtype and width of the result, and the engine."""

    dtype: mx.Dtype
    n: int
    choice: Choice


@dataclass(slots=True)
class GroupedCall(Call[mx.array]):
    """A call of :func:`grouped_matmul`."""

    x: mx.array
    w: mx.array
    offsets: mx.array
    transpose: bool
    stream: mx.Stream
    plan: Plan
    choice: Choice

    def result(self) -> mx.array:
        x, w, dtype = self.x, self.w, self.plan.dtype
        with mx.stream(self.stream):
            if 0 in (*x.shape, self.plan.n, w.shape[0]):
                return mx.zeros((x.shape[0], self.plan.n), dtype)
            return grouped_gemm(x.astype(dtype), w.astype(dtype), self.offsets, self.transpose, self.stream)

    def kernel(self) -> str:
        if self.choice.engine != "grouped":
            return ""
        x, w = (cast(array, self.plan.dtype, self.stream) for array in (self.x, self.w))
        return native.module(self.stream).grouped_kernel(x, w, None, self.transpose, self.stream)


@operation()
def grouped_matmul(x: mx.array, w: mx.array, offsets: mx.array, *, transpose: bool = True, stream: StreamOrDevice = None) -> GroupedCall:
    """Compute ``x[offsets[e]:offsets[e + 1]] @ w[e].T`` for each group e in one grouped GEMM.

    Args:
        x: Tokens sorted by group, ``[M, K]``.
        w: One matrix per group, ``[E, N, K]``, or ``[E, K, N]`` without ``transpose``.
        offsets: int32 ``[E + 1]``, non-decreasing from 0 to at most M. Groups may be empty. The offsets are read on the device, without
            synchronization.
        transpose: Whether to multiply by the transposed matrices.
        stream: Stream or device to run on.

    Returns:
        An array ``[M, N]`` in the dtype that x and w promote to. Tokens after the last group are zeros.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TypeError: An argument is not an MLX array, or ``transpose`` is not a bool.

    On a CUDA GPU, float16 and bfloat16 with K a multiple of 8 run in one grouped GEMM for any number of groups. Other calls run
    :func:`mlx.core.gather_mm`. x and w have gradients.
    """
    require_arrays("grouped_matmul", x=x, w=w, offsets=offsets)
    require_flags("grouped_matmul", transpose=transpose)
    on = resolve(stream)
    plan = _plan(x.shape, w.shape, x.dtype, w.dtype, transpose, native.gpu(on))
    with mx.stream(on):
        offsets = check_array("grouped_matmul", "offsets", offsets, (w.shape[0] + 1,), mx.int32)
    return GroupedCall(x, w, offsets, transpose, on, plan, plan.choice)


@lru_cache(CACHED_SHAPES)
def _plan(x: Shape, w: Shape, x_dtype: mx.Dtype, w_dtype: mx.Dtype, transpose: bool, gpu: Gpu) -> Plan:
    """Check shapes and dtypes, and return the plan."""
    if len(x) != 2 or len(w) != 3 or x[1] != w[2 if transpose else 1]:
        form = "[E, N, K]" if transpose else "[E, K, N]"
        raise WrongValue(f"[grouped_matmul] Shapes must be x [M, K] and w {form}, got {shape_text(x, w)}.")
    dtype, n = dense_dtype("grouped_matmul", x_dtype, w_dtype), w[1 if transpose else 2]
    case = GroupedCase(x[0], n, x[1], dtype_name(dtype), transpose, w[0])
    return Plan(dtype, n, chosen(choose_grouped, case, gpu, otherwise="fallback"))


def grouped_gemm(x: mx.array, w: mx.array, offsets: mx.array, transpose: bool, stream: mx.Stream) -> mx.array:
    """Return the result of the chosen engine."""
    if _plan(x.shape, w.shape, x.dtype, w.dtype, transpose, native.gpu(stream)).choice.engine == "grouped":
        return native.module(stream).grouped_matmul(x, w, offsets, transpose, stream)

    def forward(x: mx.array, w: mx.array) -> mx.array:
        with mx.stream(stream):
            return _composed_groups(x, w, offsets, transpose)

    def backward(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        # Because the gradient of MLX's own for w is as large as all rows' matrices together.
        x, w = primals
        left, right = (cotangent, x) if transpose else (x, cotangent)
        return [grouped_gemm(cotangent, w, offsets, not transpose, stream), _segments(left, right, offsets, stream)]

    return with_gradients(forward, backward)(x, w)


def _segments(a: mx.array, b: mx.array, offsets: mx.array, stream: mx.Stream) -> mx.array:
    """Compute ``a[tokens of e].T @ b[tokens of e]`` for each group: ``[E, columns of a, columns of b]``."""

    def forward(a: mx.array, b: mx.array) -> mx.array:
        bounds = mx.stack([offsets[:-1], offsets[1:]], axis=1, stream=stream)
        dtype = a.dtype
        if stream.device.type == mx.cpu:  # where MLX 0.32.4 computes 16 bits wrongly that are broadcast
            a, b = a.astype(mx.float32, stream=stream), b.astype(mx.float32, stream=stream)
        return mx.segmented_mm(a.swapaxes(0, 1), b, bounds, stream=stream).astype(dtype, stream=stream)

    def backward(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        a, b = primals
        return [grouped_gemm(b, cotangent, offsets, True, stream), grouped_gemm(a, cotangent, offsets, False, stream)]

    return with_gradients(forward, backward)(a, b)


def _composed_groups(x: mx.array, w: mx.array, offsets: mx.array, transpose: bool) -> mx.array:
    row = mx.arange(x.shape[0])
    expert = (row[:, None] >= offsets[1:]).sum(axis=1)
    inside = mx.logical_and(expert < w.shape[0], row >= offsets[0])
    out = upstream_dense(x[:, None], w, None, mx.minimum(expert, w.shape[0] - 1), transpose, sorted_indices=True)
    return mx.where(inside[:, None], out.squeeze(1), 0)


def grouped_quantized(x: mx.array, experts: QuantizedExperts, offsets: mx.array, stream: mx.Stream) -> mx.array:
    """Run the grouped GEMM with quantized weights on mlx-cuda's kernel; its gradient too, if the kernel supports it."""
    module, w, transpose, form = native.module(stream), experts.w, experts.transpose, experts.form

    def forward(x: mx.array, *parts: mx.array) -> mx.array:
        scales, biases = unpacked(parts)
        return module.grouped_quantized(x, w, scales, biases, *form, offsets, transpose, stream)

    def dense_groups(x: mx.array, transpose: bool, scales: mx.array, biases: mx.array | None) -> mx.array:
        dense = mx.dequantize(w, scales, biases, *form, dtype=x.dtype, stream=stream)
        return grouped_gemm(x, dense, offsets, transpose, stream)

    def backward(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        x, *parts = primals
        scales, biases = unpacked(parts)
        if cotangent.shape[1] % GROUPED_MULTIPLE:
            gradient = dense_groups(cotangent, not transpose, scales, biases)
        else:
            gradient = grouped_quantized(cotangent, QuantizedExperts(w, scales, biases, not transpose, form), offsets, stream)
        with mx.stream(stream):
            return [gradient, *parts_gradients(partial(dense_groups, x, transpose), parts, cotangent)]

    parts = (experts.scales,) if experts.biases is None else (experts.scales, experts.biases)
    return with_gradients(forward, backward)(x, *parts)
