"""Matmuls with quantized weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, cast, require_arrays, resolve, shape_text
from .._common.choice import Choice, Gpu, dtype_name
from .._common.errors import WrongValue
from .._common.gradients import with_gradients
from .._common.limits import by_limits
from .._loader import native
from .._operation import Call, operation
from .batches import batched_quantized_matmul
from .formats import Format, Spec, computed_in, require_options, spec, weights
from .rules import QuantizedCase, choose_quantized, chosen

Operands: TypeAlias = tuple[mx.array, mx.array, mx.array, mx.array | None]

SMALL_M = ("small_m", "gemv")
OURS = (*SMALL_M, "dequantize", "grouped")


class Plan(NamedTuple):
    """The plan of a call of ``quantized_matmul``: the dtype to compute in, the shape of the result, and the engine."""

    dtype: mx.Dtype
    form: Format
    out: Shape
    empty: bool
    choice: Choice


@dataclass(slots=True)
class QuantizedCall(Call[mx.array]):
    """A call of ``quantized_matmul``."""

    x: mx.array
    w: mx.array
    scales: mx.array
    biases: mx.array | None
    transpose: bool
    stream: mx.Stream
    plan: Plan
    choice: Choice

    def result(self) -> mx.array:
        if self.choice.engine not in OURS:
            with mx.stream(self.stream):
                return _upstream(self)
        if self.choice.engine in SMALL_M:
            return native.module(self.stream).quantized_small_m(*_small_m(self))
        return _dequantize(_operands(self), self.transpose, self.plan.form, self.stream)

    def kernel(self) -> str:
        return native.module(self.stream).quantized_kernel(*_small_m(self)) if self.choice.engine in SMALL_M else ""


@operation()
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
) -> QuantizedCall:
    """Compute ``x @ w.T`` (or ``x @ w``) with quantized weights, as :func:`mlx.core.quantized_matmul`.

    Source: "Marlin" (arXiv:2408.11743), on small-M GEMMs with 4-bit weights.

    Args:
        x: Inputs, ``[..., M, K]``.
        w: Weights as :func:`mlx.core.quantize` returns them, uint32 ``[N, K * bits / 32]``, or ``[K, N * bits / 32]`` without
            ``transpose``; leading dimensions broadcast with those of x.
        scales: One scale for each group along the last axis of w, ``[N, K / group_size]``, or ``[K, N / group_size]`` without
            ``transpose``; uint8 except for ``"affine"``.
        biases: One bias for each group, in the shape of ``scales``, for ``"affine"`` only.
        transpose: Whether to multiply by the transposed weights.
        group_size: Values that share a scale; default: that of the mode.
        bits: Bits of a value; default: that of the mode.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` (microscaling formats, arXiv:2310.10537) or ``"nvfp4"``.
        stream: Stream or device to run on.

    Returns:
        An array ``[..., M, N]`` in the dtype that x and the affine scales and biases promote to.

    Raises:
        ValueError: Shapes, dtypes or the quantization do not fit.
        TypeError: An argument is not an MLX array, or an option has a type that MLX does not accept.

    On a CUDA GPU, float16, bfloat16 and float32 with M up to 64 (512 for 16-bit x and transposed weights on Hopper) run in small-M GEMMs
    that dequantize weights in registers. For larger M, the weights are dequantized in parts for a dense GEMM. Other calls run MLX's
    function. ``mlx_cuda.explain(mlx_cuda.quantized_matmul, …)`` returns which, and why. x, and affine scales and biases, have gradients.
    """
    on = resolve(stream)
    try:
        arrays = spec(x), spec(w), spec(scales), spec(biases)
        plan = _plan(arrays, transpose, group_size, bits, mode, native.gpu(on))
    except (AttributeError, TypeError, ValueError):  # which may be of what is no array
        require_arrays("quantized_matmul", ("biases",), x=x, w=w, scales=scales, biases=biases)
        require_options("quantized_matmul", transpose, group_size, bits, mode)  # whose types may have no hash
        raise
    return QuantizedCall(x, w, scales, biases, transpose, on, plan, plan.choice)


def _upstream(call: QuantizedCall) -> mx.array:
    """Call MLX's function, or the fallback."""
    x, w, scales, biases, transpose, plan = call.x, call.w, call.scales, call.biases, call.transpose, call.plan
    if plan.empty:  # a division by zero inside MLX
        return mx.zeros(plan.out, plan.dtype)
    if call.choice.engine == "fallback":
        return composed(x.astype(plan.dtype), w, scales, biases, transpose, plan.form)
    if x.ndim == 1:  # which MLX's CUDA kernels refuse
        return batched_quantized_matmul(x[None], w, scales, biases, transpose, *plan.form)[0]
    return batched_quantized_matmul(x, w, scales, biases, transpose, *plan.form)


def _operands(call: QuantizedCall) -> Operands:
    """Return the operands for the native module: of one dtype, and w in 2 dimensions."""
    x, w, scales, biases, on, plan = call.x, call.w, call.scales, call.biases, call.stream, call.plan
    x = cast(x, plan.dtype, on)
    if biases is not None:
        scales, biases = cast(scales, plan.dtype, on), cast(biases, plan.dtype, on)
    if w.ndim > 2:  # batches of one
        w, scales = w.reshape(w.shape[-2:], stream=on), scales.reshape(scales.shape[-2:], stream=on)
        biases = None if biases is None else biases.reshape(scales.shape, stream=on)
        x = x.reshape(*plan.out[:-1], x.shape[-1], stream=on)
    return x, w, scales, biases


def _small_m(call: QuantizedCall) -> tuple[Any, ...]:
    """Return the arguments of the native module's quantized_small_m."""
    return (*_operands(call), *call.plan.form, None, None, call.transpose, call.choice.engine == "gemv", False, call.stream)


@by_limits(CACHED_SHAPES, typed=True)  # 64.0 is no 64
def _plan(
    arrays: tuple[Spec, Spec, Spec, Spec | None], transpose: bool, group_size: int | None, bits: int | None, mode: str, gpu: Gpu
) -> Plan:
    """Check shapes and dtypes, and return the plan."""
    x, w, scales, biases = arrays
    form, n, k = weights("quantized_matmul", (w, scales, biases), transpose, group_size, bits, mode)
    shape, batch = x[0], w[0][:-2]
    if len(shape) < 1 or shape[-1] != k:
        raise WrongValue(
            f"[quantized_matmul] x must be [..., {k}] for weights {shape_text(w[0])} of {form.bits} bit with "
            f"transpose={transpose}, got {shape_text(shape)}."
        )
    dtype = computed_in("quantized_matmul", x, scales, biases)
    batches = math.prod(batch)
    out = (*shape[:-1], n)
    if len(shape) > 2 and batch:
        try:
            out = (*mx.broadcast_shapes(shape[:-2], batch), shape[-2], n)
        except ValueError:
            raise WrongValue(f"[quantized_matmul] The batches of x and w must broadcast, got {shape_text(shape, w[0])}.") from None
    rows = math.prod(out[:-1])
    case = QuantizedCase(
        rows, n, k, dtype_name(dtype), form.mode, form.bits, form.group_size, transpose, batches=batches, tf32=native.tf32()
    )
    return Plan(dtype, form, out, 0 in (rows, n, k), chosen(choose_quantized, case, gpu, otherwise="mlx"))


def composed(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, transpose: bool, form: Format) -> mx.array:
    """Dequantize all weights and run a dense matmul."""
    dense = mx.dequantize(w, scales, biases, *form, dtype=x.dtype)
    if x.ndim < 3:  # as MLX's function, which takes the first of a batch then
        dense = dense.reshape(-1, *dense.shape[-2:])[0]
    return mx.matmul(x, dense.swapaxes(-1, -2) if transpose else dense)


def _dequantize(operands: Operands, transpose: bool, form: Format, stream: mx.Stream) -> mx.array:
    """Run dense GEMMs on tiles of dequantized weights. The gradient of x is one more of these."""
    x, w, scales, biases = operands

    def forward(x: mx.array, *parts: mx.array) -> mx.array:
        scales, biases = unpacked(parts)
        return native.module(stream).dequantize_then_gemm(x, w, scales, biases, *form, transpose, stream)

    def backward(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        x, *parts = primals
        scales, biases = unpacked(parts)
        gradient = quantized_matmul(cotangent, w, scales, biases, not transpose, *form, stream=stream)
        with mx.stream(stream):
            return [gradient, *parts_gradients(lambda scales, biases: composed(x, w, scales, biases, transpose, form), parts, cotangent)]

    return with_gradients(forward, backward)(x, *((scales,) if biases is None else (scales, biases)))


def unpacked(parts: tuple[mx.array, ...] | list[mx.array]) -> tuple[mx.array, mx.array | None]:
    """Return the scales, and biases if there are some."""
    return parts[0], parts[1] if len(parts) > 1 else None


def parts_gradients(multiply: Callable[[mx.array, mx.array], mx.array], parts: list[mx.array], cotangent: mx.array) -> list[mx.array]:
    """Return the gradients of affine scales and biases (zeros for 8-bit scales); MLX evaluates only those that are used."""
    if len(parts) < 2:
        return [mx.zeros_like(part) for part in parts]
    return mx.vjp(multiply, parts, [cotangent])[1]
