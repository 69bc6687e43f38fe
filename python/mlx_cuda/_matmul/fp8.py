"""FP8 (E4M3) matmul and quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Literal

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, dense_dtype, require_arrays, resolve, shape_text, value_text
from .._common.choice import Choice, dtype_name
from .._common.errors import WrongType, WrongValue
from .._loader import native
from .._operation import Call, DirectCall, operation
from .rules import Fp8Case, choose_fp8, choose_quantize_fp8, chosen

Axis = Literal[-1, "block128", "block128x128"] | None

MOST_BLOCKS = 65535
BLOCK = 128
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-126  # of the scales
HOW = {None: "tensor", -1: "row", "block128": "block128", "block128x128": "block128x128"}  # what the native module calls them


@dataclass(slots=True)
class Fp8Call(Call[mx.array]):
    """A call of :func:`fp8_matmul`, with scales in float32."""

    a: mx.array
    b: mx.array
    scale_a: mx.array | None
    scale_b: mx.array | None
    bias: mx.array | None
    out_dtype: mx.Dtype
    blocked: tuple[bool, bool]  # whether the scales of a, of b are those of blocks
    stream: mx.Stream
    choice: Choice

    def result(self) -> mx.array:
        on = self.stream
        with mx.stream(on):
            if self.choice.engine == "cublaslt":
                return native.module(on).fp8_matmul(self.a, self.b, self.scale_a, self.scale_b, self.bias, self.out_dtype, on)
            return _composed(self)


@operation()
def fp8_matmul(
    a: mx.array, b: mx.array, *, scale_a: mx.array | None = None, scale_b: mx.array | None = None, bias: mx.array | None = None,
    out_dtype: mx.Dtype = mx.bfloat16, stream: StreamOrDevice = None,
) -> Fp8Call:  # fmt: skip
    """Compute ``(scale_a * a) @ (scale_b * b).T + bias`` for FP8 (E4M3) operands, in uint8 as :func:`mlx.core.to_fp8` returns them.

    Source: "FP8 Formats for Deep Learning" (arXiv:2209.05433).

    Args:
        a: FP8 ``[..., M, K]``.
        b: FP8 ``[N, K]``, in the layout of :class:`mlx.nn.Linear`.
        scale_a: One scale for all (``[]`` or ``[1]``), per token (``[..., M, 1]``), or per 128 values of a token
            (``[..., M, ceil(K / 128)]``): as :func:`quantize_fp8` returns them with ``axis`` None, -1 and ``"block128"``.
        scale_b: One scale for all, per output (``[N, 1]``), or per tile of 128 x 128
            (``[ceil(N / 128), ceil(K / 128)]``, ``axis="block128x128"``).
        bias: Bias, ``[N]``; default none.
        out_dtype: bfloat16, float16 or float32.
        stream: Stream or device to run on.

    Returns:
        An array ``[..., M, N]`` of ``out_dtype``, accumulated in float32. Only the bias has gradients.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TypeError: An argument is not an MLX array, or ``out_dtype`` is not a dtype.

    From sm_89 on, cuBLASLt multiplies in FP8; on other devices the operands are converted to float32.
    """
    optional = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    require_arrays("fp8_matmul", tuple(optional), a=a, b=b, **optional)
    shapes = [None if array is None else array.shape for array in (scale_a, scale_b, bias)]
    blocked = _blocked(a.shape, b.shape, *shapes)
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != mx.uint8:
            raise WrongValue(f"[fp8_matmul] {name} must hold e4m3 numbers in uint8, got {dtype_name(operand.dtype)}.")
    for name, array in optional.items():
        if array is not None and not mx.issubdtype(array.dtype, mx.floating):
            raise WrongValue(f"[fp8_matmul] {name} must be of a floating type, got {dtype_name(array.dtype)}.")
    if not isinstance(out_dtype, mx.Dtype):
        raise WrongType(f"[fp8_matmul] out_dtype must be an mlx.core.Dtype, got {value_text(out_dtype)}.")
    if out_dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise WrongValue(f"[fp8_matmul] out_dtype must be float16, bfloat16 or float32, got {dtype_name(out_dtype)}.")
    on = resolve(stream)
    with mx.stream(on):
        scale_a, scale_b = (None if scale is None else scale.astype(mx.float32) for scale in (scale_a, scale_b))
        bias = None if bias is None else bias.astype(out_dtype)
    case = Fp8Case(math.prod(a.shape[:-1]), b.shape[0], b.shape[1], dtype_name(out_dtype))
    choice = chosen(choose_fp8, case, native.gpu(on), otherwise="fallback")
    return Fp8Call(a, b, scale_a, scale_b, bias, out_dtype, blocked, on, choice)


@lru_cache(CACHED_SHAPES)
def _blocked(a: Shape, b: Shape, scale_a: Shape | None, scale_b: Shape | None, bias: Shape | None) -> tuple[bool, bool]:
    """Check all shapes, and return whether the scales are per block."""
    if len(a) < 1 or len(b) != 2 or a[-1] != b[1]:
        raise WrongValue(f"[fp8_matmul] Shapes must be a [..., M, K] and b [N, K], got {shape_text(a, b)}.")
    if bias is not None and bias != b[:1]:
        raise WrongValue(f"[fp8_matmul] bias must have the shape ({b[0]},) of b's rows, got {shape_text(bias)}.")
    blocks = -(-b[1] // BLOCK)
    return (
        _of_blocks("scale_a", scale_a, (*a[:-1], 1), (*a[:-1], blocks)),
        _of_blocks("scale_b", scale_b, (b[0], 1), (-(-b[0] // BLOCK), blocks)),
    )


def _of_blocks(name: str, scale: Shape | None, rows: Shape, blocks: Shape) -> bool:
    if scale is None or scale in ((), (1,), rows):  # of few numbers, a shape may be that of blocks too, which then means the same
        return False
    if scale == blocks:
        return True
    takes = " or ".join(dict.fromkeys((shape_text(rows), shape_text(blocks))))
    raise WrongValue(f"[fp8_matmul] {name} must be one number, or have the shape {takes}, got {shape_text(scale)}.")


def _composed(call: Fp8Call) -> mx.array:
    """Compute the call in float32. Scales per token or per tensor are applied after the matmul, which then is exact in TF32."""
    a, b = mx.from_fp8(call.a, mx.float32), mx.from_fp8(call.b, mx.float32)
    rows, columns = (None if scale is None else mx.stop_gradient(scale) for scale in (call.scale_a, call.scale_b))
    if rows is not None and call.blocked[0]:
        a, rows = a * _spread(rows, a.shape), None
    if columns is not None and call.blocked[1]:
        b, columns = b * _spread(columns, b.shape), None
    out = mx.zeros((*a.shape[:-1], b.shape[0])) if 0 in (a.size, b.size) else mx.matmul(a, b.T)
    if rows is not None:
        out = out * rows
    if columns is not None:
        out = out * columns.reshape(-1)
    if call.bias is not None:
        out = out + call.bias
    return out.astype(call.out_dtype)


def _spread(scales: mx.array, shape: Shape) -> mx.array:
    """Broadcast each scale to the values of this shape that share it: 128 along each axis with fewer scales."""
    for axis, size in enumerate(shape):
        if scales.shape[axis] != size:
            scales = mx.repeat(scales, BLOCK, axis)
    return scales[tuple(map(slice, shape))]


@operation("tuple[mx.array, mx.array]", is_cached=False)
def quantize_fp8(x: mx.array, *, axis: Axis = None, stream: StreamOrDevice = None) -> DirectCall[tuple[mx.array, mx.array]]:
    """Quantize an array to FP8 (E4M3) and return the values with their scales.

    Args:
        x: Values, ``[..., K]``; with ``axis="block128x128"`` ``[N, K]``.
        axis: The values that share a scale: None: all; -1: the last axis; ``"block128"``: 128 values of the last axis (for
            activations); ``"block128x128"``: a tile of 128 x 128 (for weights).
        stream: Stream or device to run on.

    Returns:
        The values in uint8, as :func:`mlx.core.to_fp8` returns them, and float32 scales ``[1]``, ``[..., 1]``, ``[..., ceil(K / 128)]``
        or ``[ceil(N / 128), ceil(K / 128)]``: the largest finite magnitude divided by 448 (the maximum of E4M3), at least 2 ** -126.

    Raises:
        ValueError: The shape, dtype or axis does not fit.
        TypeError: x is not an MLX array.

    E4M3 is that of arXiv:2209.05433, without infinities: values above 448 times the scale saturate, NaN stays NaN. float16, bfloat16 and
    float32 on a CUDA GPU are quantized by a kernel that reads them once or twice; other calls run on MLX's operations.
    """
    require_arrays("quantize_fp8", x=x)
    if not isinstance(axis, (int, str, NoneType)) or axis not in HOW:
        raise WrongValue(f"[quantize_fp8] axis must be None, -1, 'block128' or 'block128x128', got {value_text(axis)}.")
    dense_dtype("quantize_fp8", x.dtype)
    if x.ndim < 1 or (axis == "block128x128" and x.ndim != 2):
        form = "[N, K]" if axis == "block128x128" else "[..., K]"
        raise WrongValue(f"[quantize_fp8] x must be {form}, got {shape_text(x.shape)}.")
    on = resolve(stream)
    side = {"block128": x.shape[-1], "block128x128": x.shape[0]}.get(str(axis), 0)  # whose blocks are a grid's second dimension
    choice = choose_quantize_fp8(native.gpu(on), empty=x.size == 0, fits=side <= BLOCK * MOST_BLOCKS)
    return DirectCall(choice, "quantize_fp8", _composed_quantize, (x, HOW[axis]), on)


def _composed_quantize(x: mx.array, how: str) -> tuple[mx.array, mx.array]:
    x = mx.stop_gradient(x).astype(mx.float32)
    size = mx.where(mx.abs(x) < mx.inf, mx.abs(x), 0)  # 0 for NaN too
    if how in {"tensor", "row"}:
        if x.size == 0:
            return x.astype(mx.uint8), mx.full((1,) if how == "tensor" else (*x.shape[:-1], 1), SMALLEST)
        largest = size.max().reshape(1) if how == "tensor" else size.max(axis=-1, keepdims=True)
    else:
        largest = _largest(size, axis=-1)
        largest = _largest(largest, axis=-2) if how == "block128x128" else largest
    scales = mx.maximum(largest / LARGEST, SMALLEST)
    x = x / (scales if how in {"tensor", "row"} else _spread(scales, x.shape))
    return mx.where(mx.isnan(x), mx.array(127, mx.uint8), mx.to_fp8(x)), scales  # to_fp8 saturates on the CPU, NaN too


def _largest(x: mx.array, *, axis: int) -> mx.array:
    """Return the largest of each 128 values along an axis; the last block may be smaller."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % BLOCK)
    return mx.unflatten(mx.pad(x, padding), axis, (-(-x.shape[axis] // BLOCK), BLOCK)).max(axis=axis)
