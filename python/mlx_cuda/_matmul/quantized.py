"""Products with quantised weights."""

from __future__ import annotations

import math
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, cast

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, dtype_name, dtype_text, promoted, require_arrays, require_flags, resolve, shape_text
from .._common.arrays import cast as cast_to
from .._loader import native as _native
from .._loader.graph_cache import cached
from .rules import QuantizedCase, choose_quantized, chosen

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._common.arrays import Shape, StreamOrDevice
    from .._common.choice import Choice, Gpu
    from .._loader.module import NativeModule

upstream_quantized_matmul = mx.quantized_matmul  # whatever patch() puts in its place later

OURS = ("few", "small", "dequantised", "grouped")

FORMATS = {  # mode: group sizes and bits, the defaults first
    "affine": ((64, 32, 128), (4, 1, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


class Format(NamedTuple):
    """How weights are quantised."""

    mode: str
    group_size: int
    bits: int


class Plan(NamedTuple):
    """What a call of ``quantized_matmul`` comes to: the dtype to compute in, the sizes, the shape of the result, and who computes it."""

    dtype: mx.Dtype
    form: Format
    rows: int
    n: int
    k: int
    out: Shape
    choice: Choice


class Call(NamedTuple):
    """A call, checked."""

    x: mx.array
    w: mx.array
    scales: mx.array
    biases: mx.array | None
    transpose: bool
    stream: mx.Stream
    plan: Plan
    choice: Choice

    def result(self) -> mx.array:
        """The result, by whoever is chosen."""
        return _run(self)


@cached
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
    """``x @ w.T`` (or ``x @ w``) with quantised weights, as :func:`mlx.core.quantized_matmul`.

    Args:
        x: Inputs, ``[..., K]``.
        w: Weights as :func:`mlx.core.quantize` packs them, in uint32: ``[N, K * bits / 32]``, or ``[K, N * bits / 32]`` without
            ``transpose``; further dimensions before them broadcast with those of x.
        scales: A scale for each group of numbers in a row of w.
        biases: Likewise a bias, for ``"affine"`` only.
        transpose: Whether to multiply with the transposed weights.
        group_size: Numbers that share a scale; default that of the mode.
        bits: Bits of a number; default that of the mode.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` (of the microscaling formats, arXiv:2310.10537) or ``"nvfp4"``.
        stream: Stream or device to run on.

    Returns:
        An array ``[..., N]`` in the dtype that x and the affine scales and biases promote to.

    Raises:
        ValueError: The shapes, dtypes or the quantisation do not fit.
        TypeError: An argument is no MLX array, or an option not of the type that MLX takes.

    float16, bfloat16 and float32 on a CUDA GPU: up to 64 rows by kernels that read each weight once (512 of 16 bits with transposed
    weights on Hopper), more by dequantising tiles of the weights for a dense product. The rest is MLX's own.
    ``mlx_cuda.explain(mlx_cuda.quantized_matmul, …)`` says which, and why.
    Gradients reach x, and affine scales and biases.
    """
    return prepare(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream).result()


def prepare(
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
) -> Call:
    """A call of :func:`quantized_matmul`, checked, and who computes it."""
    on = resolve(stream)
    try:
        parts = None if biases is None else (biases.shape, biases.dtype)
        plan = _plan(
            x.shape, x.dtype, w.shape, w.dtype, scales.shape, scales.dtype, parts, transpose, group_size, bits, mode, _native.gpu(on)
        )
    except (AttributeError, TypeError, ValueError):  # which may be of what is no array
        require_arrays("quantized_matmul", ("biases",), x=x, w=w, scales=scales, biases=biases)
        require_options("quantized_matmul", transpose, group_size, bits, mode)  # whose types may have no hash
        raise
    return Call(x, w, scales, biases, transpose, on, plan, plan.choice)


def _run(call: Call) -> mx.array:
    x, w, scales, biases, transpose, on, plan, choice = call
    mode, group_size, bits = plan.form
    if choice.engine not in OURS:
        with mx.stream(on):
            if 0 in (plan.rows, plan.n, plan.k):  # a division by zero inside MLX
                return mx.zeros(plan.out, plan.dtype)
            if choice.engine == "composed":
                return composed(x.astype(plan.dtype), w, scales, biases, transpose, plan.form)
            if x.ndim == 1:  # which MLX's CUDA kernels refuse
                return upstream_quantized_matmul(x[None], w, scales, biases, transpose, group_size, bits, mode)[0]
            return upstream_quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode)
    x = cast_to(x, plan.dtype, on)
    if biases is not None:
        scales, biases = cast_to(scales, plan.dtype, on), cast_to(biases, plan.dtype, on)
    if w.ndim > 2:  # batches of one
        w, scales = w.reshape(w.shape[-2:], stream=on), scales.reshape(scales.shape[-2:], stream=on)
        biases = None if biases is None else biases.reshape(scales.shape, stream=on)
        x = x.reshape(*plan.out[:-1], plan.k, stream=on)
    module = _native.module(on)
    if choice.engine in {"few", "small"}:
        small = choice.engine == "small"
        return module.quantized_few(x, w, scales, biases, None, None, transpose, group_size, bits, mode, small, on)
    return _many(module, x, w, scales, biases, transpose, plan.form, on)


@lru_cache(CACHED_SHAPES, typed=True)  # 64.0 is no 64
def _plan(
    x: Shape,
    x_dtype: mx.Dtype,
    w: Shape,
    w_dtype: mx.Dtype,
    scales: Shape,
    scales_dtype: mx.Dtype,
    biases: tuple[Shape, mx.Dtype] | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    gpu: Gpu,
) -> Plan:
    """The call, where its shapes and dtypes fit, and who computes it."""
    form, n, k = weights("quantized_matmul", w, w_dtype, scales, scales_dtype, biases, transpose, group_size, bits, mode)
    if len(x) < 1 or x[-1] != k:
        raise ValueError(
            f"[quantized_matmul] x must be [..., {k}] for weights {shape_text(w)} of {form.bits} bit with "
            f"transpose={transpose}, got {shape_text(x)}."
        )
    dtype = computed_in("quantized_matmul", x_dtype, scales_dtype, biases)
    batch = w[:-2]
    batches = math.prod(batch)
    out = (*x[:-1], n)
    if len(x) > 2 and batch:
        try:
            out = (*mx.broadcast_shapes(x[:-2], batch), x[-2], n)
        except ValueError:
            raise ValueError(f"[quantized_matmul] The batches of x and w must broadcast, got {shape_text(x, w)}.") from None
    rows = math.prod(out[:-1])
    case = QuantizedCase(
        rows, n, k, dtype_name(dtype), form.mode, form.bits, form.group_size, transpose, batches=batches, tf32=_native.tf32()
    )
    return Plan(dtype, form, rows, n, k, out, chosen(choose_quantized, case, gpu, otherwise="upstream"))


def require_options(operation: str, transpose: object, group_size: object, bits: object, mode: object) -> None:
    """Raise a TypeError that names the first of these that is of another type than MLX's function takes."""
    require_flags(operation, transpose=transpose)
    for name, value in (("group_size", group_size), ("bits", bits)):
        if value is not None and not isinstance(value, SupportsIndex):
            raise TypeError(f"[{operation}] {name} must be an integer or None, got {value!r}.")
    if not isinstance(mode, str):
        raise TypeError(f"[{operation}] mode must be a string, got {mode!r}.")


def weights(
    operation: str,
    w: Shape,
    w_dtype: mx.Dtype,
    scales: Shape,
    scales_dtype: mx.Dtype,
    biases: tuple[Shape, mx.Dtype] | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
) -> tuple[Format, int, int]:
    """How the weights are quantised, and the sizes n and k, where all parts fit together."""
    require_options(operation, transpose, group_size, bits, mode)
    if mode not in FORMATS:
        raise ValueError(f"[{operation}] mode must be one of {', '.join(map(repr, FORMATS))}, got {mode!r}.")
    groups, widths = FORMATS[mode]
    form = Format(mode, groups[0] if group_size is None else index(group_size), widths[0] if bits is None else index(bits))
    if form.group_size not in groups or form.bits not in widths:
        takes = f"group_size {_either(groups)} and bits {_either(widths)}"
        raise ValueError(f"[{operation}] Mode {mode!r} takes {takes}, got {form.group_size} and {form.bits}.")
    if w_dtype != mx.uint32:
        raise ValueError(f"[{operation}] w must be packed in uint32, got {dtype_name(w_dtype)}.")
    if mode == "affine":
        if biases is None:
            raise ValueError(f"[{operation}] Mode 'affine' needs biases, got None.")
        if not mx.issubdtype(promoted(scales_dtype, biases[1]), mx.floating):
            raise ValueError(f"[{operation}] scales and biases must be of floating types, got {dtype_text(scales_dtype, biases[1])}.")
        if biases[0] != scales:
            raise ValueError(f"[{operation}] scales and biases must have the same shape, got {shape_text(scales, biases[0])}.")
    elif biases is not None:
        raise ValueError(f"[{operation}] Mode {mode!r} has no biases, got some of the shape {shape_text(biases[0])}.")
    elif scales_dtype != mx.uint8:
        raise ValueError(f"[{operation}] scales of mode {mode!r} must be uint8, got {dtype_name(scales_dtype)}.")
    if len(w) < 2 or w[:-1] != scales[:-1]:
        raise ValueError(f"[{operation}] w and scales must agree in all of 2 or more dimensions but the last, got {shape_text(w, scales)}.")
    columns = w[-1] * 32 // form.bits
    if columns != scales[-1] * form.group_size:
        raise ValueError(
            f"[{operation}] w and scales do not belong together with group_size={form.group_size} and bits={form.bits}: {columns} numbers "
            f"and {scales[-1]} scales in a row, got {shape_text(w, scales)}."
        )
    return (form, w[-2], columns) if transpose else (form, columns, w[-2])


def computed_in(operation: str, x: mx.Dtype, scales: mx.Dtype, biases: tuple[Shape, mx.Dtype] | None) -> mx.Dtype:
    """The dtype of the result, which has to be one that MLX computes in."""
    dtype = x if biases is None else promoted(x, promoted(scales, biases[1]))
    if not mx.issubdtype(dtype, mx.floating) or dtype == mx.float64:
        raise ValueError(f"[{operation}] Only float16, bfloat16 and float32 are supported, got {dtype_name(dtype)}.")
    return dtype


def composed(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, transpose: bool, form: Format) -> mx.array:
    """A dense product with all of the weights dequantised."""
    dense = mx.dequantize(w, scales, biases, form.group_size, form.bits, form.mode, dtype=x.dtype)
    if x.ndim < 3:  # as MLX's function, which takes the first of a batch then
        dense = dense.reshape(-1, *dense.shape[-2:])[0]
    return mx.matmul(x, dense.swapaxes(-1, -2) if transpose else dense)


def _many(
    module: NativeModule,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    transpose: bool,
    form: Format,
    stream: mx.Stream,
) -> mx.array:
    """Weights dequantised in tiles, for dense products. The gradient of x is one more of these."""

    def forward(x: mx.array, *parts: mx.array) -> mx.array:
        scales, biases = unpacked(parts)
        return module.quantized_many(x, w, scales, biases, transpose, form.group_size, form.bits, form.mode, stream)

    call = mx.custom_function(forward)

    @call.vjp
    def backward(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        x, *parts = primals
        scales, biases = unpacked(parts)
        slope = quantized_matmul(cotangent, w, scales, biases, not transpose, form.group_size, form.bits, form.mode, stream=stream)
        with mx.stream(stream):
            return [slope, *parts_slopes(lambda scales, biases: composed(x, w, scales, biases, transpose, form), parts, cotangent)]

    return cast("mx.array", call(x, scales) if biases is None else call(x, scales, biases))


def unpacked(parts: tuple[mx.array, ...] | list[mx.array]) -> tuple[mx.array, mx.array | None]:
    """Scales, and biases where there are some."""
    return parts[0], parts[1] if len(parts) > 1 else None


def parts_slopes(product: Callable[[mx.array, mx.array], mx.array], parts: list[mx.array], cotangent: mx.array) -> list[mx.array]:
    """The gradients of affine scales and biases (those of 8-bit scales are zeros), which are evaluated only where they are used."""
    if len(parts) < 2:
        return [mx.zeros_like(part) for part in parts]
    return mx.vjp(product, parts, [cotangent])[1]


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, sorted(numbers)))
