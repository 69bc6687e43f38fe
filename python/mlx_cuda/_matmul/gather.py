"""Matmuls with selected matrices, as for MoE: dense and quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, cast, dense_dtype, require_arrays, require_flags, resolve, shape_text
from .._common.choice import Choice, Gpu, dtype_name
from .._common.errors import WrongValue
from .._common.limits import by_limits
from .._loader import native
from .._operation import Call, operation
from .formats import Format, Spec, computed_in, require_options, spec, weights
from .grouped import QuantizedExperts, grouped_quantized
from .quantized import OURS, SMALL_M, QuantizedCall, quantized_matmul
from .rules import GroupedCase, QuantizedCase, choose_gather_qmm, choose_grouped, chosen
from .upstream import upstream_dense, upstream_quantized

if TYPE_CHECKING:
    from .._common.arrays import Shape, StreamOrDevice

INDICES = ("lhs_indices", "rhs_indices")
CONSTANT_PAIRS = 64  # up to this many, default indices are kept as constants, and cost no kernel


class GatherPlan(NamedTuple):
    """The plan of a call: shapes, dtype and engine."""

    dtype: mx.Dtype
    form: Format | None  # None: dense
    pairs: Shape  # of the matmuls, in front of the result's last two dimensions
    stacked: Shape  # x in 3 dimensions
    out: Shape
    empty: bool
    in_turn: bool  # pair p takes the p-th matrix of x; or (dense) each matrix of x is taken by as many pairs in turn
    ordered: bool  # the indices of w rise
    choice: Choice

    @classmethod
    def of(
        cls, dtype: mx.Dtype, form: Format | None, shapes: tuple[Shape, Shape, Shape], in_turn: bool, ordered: bool, choice: Choice
    ) -> GatherPlan:
        """Plan for the shapes of x, w and the result."""
        x, w, out = shapes
        return cls(dtype, form, out[:-2], (math.prod(x[:-2]), *x[-2:]), out, 0 in (*out, *x, *w), in_turn, ordered, choice)


@dataclass(slots=True)
class GatherCall(Call[mx.array]):
    """A call of ``gather_mm`` or ``gather_qmm``."""

    x: mx.array
    w: mx.array
    scales: mx.array | None
    biases: mx.array | None
    lhs: mx.array | None
    rhs: mx.array | None
    transpose: bool
    global_scale: mx.array | None
    sorted_indices: bool
    stream: mx.Stream
    plan: GatherPlan
    choice: Choice
    vectors: tuple[int, ...] = ()  # the result's axes that come of vectors

    def result(self) -> mx.array:
        result = self._matrices()
        return result.squeeze(self.vectors, stream=self.stream) if self.vectors else result

    def _matrices(self) -> mx.array:
        plan, on = self.plan, self.stream
        if plan.empty and self.global_scale is None:
            return mx.zeros(plan.out, plan.dtype, stream=on)
        if self.choice.engine not in OURS:
            with mx.stream(on):
                return _upstream(self)
        if self.choice.engine in SMALL_M:
            return native.module(on).quantized_small_m(*_small_m(self)).reshape(plan.out, stream=on)
        x, w, scales, biases, lhs, rhs = _operands(self)
        if plan.form is None or scales is None:
            result = native.module(on).gather_mm(x, cast(w, plan.dtype, on), lhs, rhs, self.transpose, plan.ordered, on)
            return result.reshape(plan.out, stream=on)
        with mx.stream(on):
            experts = QuantizedExperts(w, scales, biases, self.transpose, plan.form)
            return _in_order(x, lhs, rhs, experts, plan, on).reshape(plan.out)

    def kernel(self) -> str:
        if self.choice.engine in SMALL_M:
            return native.module(self.stream).quantized_kernel(*_small_m(self))
        if self.choice.engine != "grouped" or self.plan.form is not None:
            return ""
        x, w, _, _, _, rhs = _operands(self)
        return native.module(self.stream).grouped_kernel(x, cast(w, self.plan.dtype, self.stream), rhs, self.transpose, self.stream)


@operation()
def gather_mm(
    a: mx.array,
    b: mx.array,
    /,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    stream: StreamOrDevice = None,
) -> GatherCall:
    """Compute ``a[lhs_indices] @ b[rhs_indices]`` without copies, as :func:`mlx.core.gather_mm`.

    Args:
        a: Matrices, ``[..., M, K]``.
        b: Matrices, ``[..., K, N]``, such as the weights of MoE experts.
        lhs_indices: Integers, flat indices of a's matrices; default: all in order. They broadcast with ``rhs_indices``.
        rhs_indices: Integers, flat indices of b's matrices; default: all in order.
        sorted_indices: Whether the indices are sorted, if only one of the two is given.
        stream: Stream or device to run on.

    Returns:
        An array of the shape of the indices and ``[M, N]``, in the dtype that a and b promote to.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TypeError: An argument is not an MLX array, or an option has a type that MLX does not accept.

    On a CUDA GPU, float16 and bfloat16 with K a multiple of 8 run in mlx-cuda's kernels: very few tokens in one that reads the selected
    matrices in place, more tokens in the grouped GEMM of :func:`grouped_matmul`, after they are sorted by ``rhs_indices``. Without indices
    the call is :func:`mlx.core.matmul`. a and b have gradients.
    """
    vectors = []  # are a row and a column, but in a plain matmul
    if (lhs_indices is not None or rhs_indices is not None) and isinstance(a, mx.array) and isinstance(b, mx.array):
        if a.ndim == 1:
            a = mx.expand_dims(a, 0, stream=stream)
            vectors.append(-2)
        if b.ndim == 1:
            b = mx.expand_dims(b, 1, stream=stream)
            vectors.append(-1)
    call = gather_dense(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, transpose=False, stream=stream)
    return replace(call, vectors=tuple(vectors)) if vectors else call


@operation()
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
) -> GatherCall | QuantizedCall:
    """Compute :func:`gather_mm` with quantized weights, as :func:`mlx.core.gather_qmm`.

    Args:
        x: Matrices, ``[..., M, K]``.
        w: Weights of E experts as :func:`mlx.core.quantize` returns them, uint32 ``[E, N, K * bits / 32]``, or ``[E, K, N * bits / 32]``
            without ``transpose``.
        scales: One scale for each group along the last axis of w, ``[E, N, K / group_size]``, or ``[E, K, N / group_size]`` without
            ``transpose``; uint8 except for ``"affine"``.
        biases: One bias for each group, in the shape of ``scales``, for ``"affine"`` only.
        lhs_indices: As in :func:`gather_mm`.
        rhs_indices: As in :func:`gather_mm`.
        transpose: Whether to multiply by the transposed weights.
        group_size: Values that share a scale; default: that of the mode.
        bits: Bits of a value; default: that of the mode.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        global_scale: float32 ``[E]``, one more scale per expert, for ``"nvfp4"`` on the GPU: computed by MLX.
        sorted_indices: As in :func:`gather_mm`.
        stream: Stream or device to run on.

    Returns:
        An array of the shape of the indices and ``[M, N]``, in the dtype that x and the affine scales and biases promote to.

    Raises:
        ValueError: Shapes, dtypes or the quantization do not fit.
        TypeError: An argument is not an MLX array, or an option has a type that MLX does not accept.

    On a CUDA GPU, up to 64 tokens in float16, bfloat16 or float32 run in kernels that read the weights of the selected experts only. More
    tokens in float16 or bfloat16 run in the grouped GEMM, whose weights are dequantized in the kernel (Hopper, K a multiple of 64) or
    before it. Other calls run MLX's function. x, and affine scales and biases, have gradients.
    """
    require_arrays("gather_qmm", ("global_scale",), global_scale=global_scale)
    if lhs_indices is None and rhs_indices is None and global_scale is None:  # one of quantized_matmul
        require_flags("gather_qmm", sorted_indices=sorted_indices)
        return quantized_matmul.prepare(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream)
    on = resolve(stream)
    try:
        arrays = spec(x), spec(w), spec(scales), spec(biases), spec(lhs_indices), spec(rhs_indices)
        require_flags("gather_qmm", sorted_indices=sorted_indices)
        plan = _quantized_plan(arrays, transpose, group_size, bits, mode, (global_scale is not None, sorted_indices, native.gpu(on)))
    except (AttributeError, TypeError, ValueError):
        named = {"x": x, "w": w, "scales": scales, "biases": biases, "lhs_indices": lhs_indices, "rhs_indices": rhs_indices}
        require_arrays("gather_qmm", ("biases", *INDICES), **named)
        require_options("gather_qmm", transpose, group_size, bits, mode)
        require_flags("gather_qmm", sorted_indices=sorted_indices)
        raise
    given = (x, w, scales, biases, lhs_indices, rhs_indices, transpose, global_scale, sorted_indices)
    return GatherCall(*given, on, plan, plan.choice)


def misread_by_mlx(call: Call[mx.array]) -> bool:
    """Whether a call that MLX computes must pass through mlx-cuda, which gives MLX operands in layouts that it reads right on CUDA."""
    if not isinstance(call, GatherCall) or (call.lhs is None and call.rhs is None):
        return False
    return call.choice.engine == "mlx" and call.stream.device.type == mx.gpu and native.on_cuda()


def gather_dense(
    a: mx.array, b: mx.array, lhs_indices: mx.array | None, rhs_indices: mx.array | None, *,
    sorted_indices: bool, transpose: bool, stream: StreamOrDevice = None,
) -> GatherCall:  # fmt: skip
    """Prepare a call of :func:`gather_mm` with dense matrices. With ``transpose``, b is ``[..., N, K]``."""
    on = resolve(stream)
    try:
        plan = _dense_plan((spec(a), spec(b), spec(lhs_indices), spec(rhs_indices)), transpose, sorted_indices, native.gpu(on))
    except (AttributeError, TypeError, ValueError):  # which may be of what is no array
        require_arrays("gather_mm", INDICES, a=a, b=b, lhs_indices=lhs_indices, rhs_indices=rhs_indices)
        require_flags("gather_mm", sorted_indices=sorted_indices)
        raise
    return GatherCall(a, b, None, None, lhs_indices, rhs_indices, transpose, None, sorted_indices, on, plan, plan.choice)


def _operands(call: GatherCall) -> tuple[mx.array, mx.array, mx.array | None, mx.array | None, mx.array | None, mx.array]:
    """Return x, w, scales, biases and the indices for the native module: in 3 dimensions, with one index per pair."""
    x, w, scales, biases, on, plan = call.x, call.w, call.scales, call.biases, call.stream, call.plan
    x = cast(x, plan.dtype, on)
    if x.ndim != 3:
        x = x.reshape(plan.stacked, stream=on)
    rhs = _flat(call.rhs, call.w.shape[:-2], plan.pairs, on)
    lhs = None if plan.in_turn else _flat(call.lhs, call.x.shape[:-2], plan.pairs, on)
    w, scales = stacked(w, on), None if scales is None else stacked(scales, on)
    if scales is not None and biases is not None:
        scales, biases = cast(scales, plan.dtype, on), cast(stacked(biases, on), plan.dtype, on)
    return x, w, scales, biases, lhs, rhs


def _small_m(call: GatherCall) -> tuple[Any, ...]:
    """Return the arguments of the native module's quantized_small_m."""
    assert call.plan.form is not None  # noqa: S101  (the weights are quantized)
    x, w, scales, biases, lhs, rhs = _operands(call)
    return x, w, scales, biases, *call.plan.form, lhs, rhs, call.transpose, False, call.plan.ordered, call.stream


def _in_order(x: mx.array, lhs: mx.array | None, rhs: mx.array, experts: QuantizedExperts, plan: GatherPlan, stream: mx.Stream) -> mx.array:
    """Sort the tokens ``[batches, M, K]`` by expert, run the grouped GEMM, and return the result in the order of the pairs."""
    order = None
    if not plan.ordered:
        order = mx.argsort(rhs)
        rhs = rhs[order]
        lhs = order if lhs is None else lhs[order]
    if lhs is not None:
        x = mx.take(x, lhs, axis=0)
    rows, width = x.shape[1:]
    offsets = native.module(stream).expert_offsets(rhs, experts.w.shape[0], stream)
    result = grouped_quantized(x.reshape(-1, width), experts, offsets if rows == 1 else offsets * rows, stream)
    result = result.reshape(-1, rows, result.shape[-1])
    return result if order is None else mx.take(result, mx.argsort(order), axis=0)


def _upstream(call: GatherCall) -> mx.array:
    """Call MLX's function, or the fallback."""
    plan, transpose = call.plan, call.transpose
    if call.lhs is None and call.rhs is None and plan.form is None:
        return mx.matmul(call.x, call.w.swapaxes(-1, -2) if transpose else call.w)
    x, w = _batch(call.x), _batch(call.w)
    if plan.form is None or call.scales is None:
        dense = w.astype(plan.dtype)
    else:
        scales, biases = _batch(call.scales), None if call.biases is None else _batch(call.biases)
        if call.choice.engine == "mlx":
            return upstream_quantized(
                x, w, scales, biases, call.lhs, call.rhs,
                transpose=transpose, form=plan.form, global_scale=call.global_scale, sorted_indices=call.sorted_indices,
            ).reshape(plan.out)  # fmt: skip
        dense = mx.dequantize(w, scales, biases, *plan.form, dtype=plan.dtype)
    result = upstream_dense(x.astype(plan.dtype), dense, call.lhs, call.rhs, transpose, sorted_indices=call.sorted_indices)
    return result.reshape(plan.out)


def _batch(matrices: mx.array) -> mx.array:
    """Return an array with at least 3 dimensions: MLX 0.32.4 has no gradient of a single matrix."""
    return matrices[None] if matrices.ndim == 2 else matrices


@lru_cache(CACHED_SHAPES, typed=True)
def _dense_plan(arrays: tuple[Any, ...], transpose: bool, sorted_indices: bool, gpu: Gpu) -> GatherPlan:
    a, b, lhs, rhs = arrays
    require_flags("gather_mm", sorted_indices=sorted_indices)
    left, right = a[0], b[0]
    if lhs is None and rhs is None:  # of whose operands MLX says itself what is wrong
        choice = Choice("mlx", "without indices it is a plain matmul")
        return GatherPlan(mx.result_type(a[1], b[1]), None, (), left, (), False, False, False, choice)
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-1 if transpose else -2]:
        form = "[..., N, K]" if transpose else "[..., K, N]"
        raise WrongValue(f"[gather_mm] Shapes must be a [..., M, K] and b {form}, got {shape_text(left, right)}.")
    dtype, n = dense_dtype("gather_mm", a[1], b[1]), right[-2 if transpose else -1]
    pairs, ordered = _pairs("gather_mm", left[:-2], right[:-2], lhs, rhs, sorted_indices=sorted_indices)
    case = GroupedCase(
        math.prod(pairs) * left[-2], n, left[-1], dtype_name(dtype), transpose, math.prod(right[:-2]), gathered=True, ordered=ordered
    )
    choice = chosen(choose_grouped, case, gpu, otherwise="mlx")
    in_turn = lhs is None and _rises(left[:-2], pairs)
    return GatherPlan.of(dtype, None, (left, right, (*pairs, left[-2], n)), in_turn, ordered, choice)


@by_limits(CACHED_SHAPES, typed=True)
def _quantized_plan(
    arrays: tuple[Any, ...], transpose: bool, group_size: int | None, bits: int | None, mode: str, options: tuple[bool, bool, Gpu]
) -> GatherPlan:
    x, w, scales, biases, lhs, rhs = arrays
    global_scale, sorted_indices, gpu = options
    left, right = x[0], w[0]
    form, n, k = weights("gather_qmm", (w, scales, biases), transpose, group_size, bits, mode)
    if len(left) < 2 or left[-1] != k:
        raise WrongValue(
            f"[gather_qmm] x must be [..., M, {k}] for weights {shape_text(right)} of {form.bits} bit with transpose={transpose}, "
            f"got {shape_text(left)}."
        )
    dtype = computed_in("gather_qmm", x, scales, biases)
    pairs, ordered = _pairs("gather_qmm", left[:-2], right[:-2], lhs, rhs, sorted_indices=sorted_indices)
    case = QuantizedCase(
        math.prod(pairs) * left[-2], n, k, dtype_name(dtype), form.mode, form.bits, form.group_size, transpose,
        experts=max(math.prod(right[:-2]), 1), ordered=ordered, global_scale=global_scale, tf32=native.tf32(),
    )  # fmt: skip
    choice = chosen(choose_gather_qmm, case, gpu, otherwise="mlx")
    return GatherPlan.of(dtype, form, (left, right, (*pairs, left[-2], n)), lhs is None and left[:-2] == pairs, ordered, choice)


def _pairs(operation: str, x: Shape, w: Shape, lhs: Spec | None, rhs: Spec | None, *, sorted_indices: bool) -> tuple[Shape, bool]:
    """Return the broadcast shape of the indices, defaults included, and whether the experts are sorted over all pairs."""
    for name, indices in (("lhs_indices", lhs), ("rhs_indices", rhs)):
        if indices is not None and not mx.issubdtype(indices[1], mx.integer):
            raise WrongValue(f"[{operation}] {name} must be integers, got {dtype_name(indices[1])}.")
    left, right = x if lhs is None else lhs[0], w if rhs is None else rhs[0]
    try:
        pairs = tuple(mx.broadcast_shapes(left, right))
    except ValueError:
        raise WrongValue(f"[{operation}] lhs_indices and rhs_indices must broadcast, got {shape_text(left, right)}.") from None
    return pairs, (rhs is None or (sorted_indices and lhs is None)) and _rises(right, pairs)


def _rises(indices: Shape, pairs: Shape) -> bool:
    """Return whether sorted indices of this shape are still sorted after broadcasting."""
    sizes = (1,) * (len(pairs) - len(indices)) + indices
    same = next((i for i, (size, wanted) in enumerate(zip(sizes, pairs, strict=True)) if size != wanted), len(pairs))
    return set(sizes[same:]) <= {1}


def _flat(indices: mx.array | None, batch: Shape, pairs: Shape, stream: mx.Stream) -> mx.array:
    """Return the indices, or those of all matrices in order, broadcast to all pairs: uint32 ``[pairs]``."""
    if indices is None:
        if math.prod(pairs) <= CONSTANT_PAIRS:
            return _default_indices(batch, pairs)
        indices = mx.arange(math.prod(batch), dtype=mx.uint32, stream=stream).reshape(batch, stream=stream)
    if indices.shape != pairs:
        indices = mx.broadcast_to(indices, pairs, stream=stream)
    if indices.ndim != 1:
        indices = indices.reshape(-1, stream=stream)
    return cast(indices, mx.uint32, stream)


@lru_cache(CACHED_SHAPES)
def _default_indices(batch: Shape, pairs: Shape) -> mx.array:
    numbers, stride = [0], math.prod(batch)
    for size, wanted in zip((1,) * (len(pairs) - len(batch)) + batch, pairs, strict=True):
        stride //= size
        numbers = [number + (stride * i if size > 1 else 0) for number in numbers for i in range(wanted)]
    return mx.array(numbers, mx.uint32)


def stacked(w: mx.array, stream: mx.Stream) -> mx.array:
    """Return the matrices in one dimension, ``[E, …]``."""
    return w if w.ndim == 3 else w.reshape(-1, *w.shape[-2:], stream=stream)
