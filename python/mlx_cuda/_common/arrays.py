"""What every operation does first: resolve the stream, see that arrays are arrays, promote dtypes.

An operation costs a few microseconds of host time before its kernel is launched, so what depends on shapes and dtypes alone is cached.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import mlx.core as mx

from .errors import WrongType, WrongValue

StreamOrDevice: TypeAlias = "mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None"

Shape: TypeAlias = tuple[int, ...]

CACHED_SHAPES = 1024  # of each operation; a miss only costs the checks


def resolve(stream: StreamOrDevice) -> mx.Stream:
    """The stream that MLX's own operations would run on, given this argument."""
    if stream is None:
        return mx.default_stream(mx.default_device())
    if isinstance(stream, mx.Stream):
        return stream
    with mx.stream(stream):
        return mx.default_stream(mx.default_device())


def require_arrays(operation: str, optional: tuple[str, ...] = (), /, **arrays: object) -> None:
    """Raise a TypeError that names the first argument that is not an MLX array; the optional ones may be None."""
    for name, value in arrays.items():
        if not isinstance(value, mx.array) and (value is not None or name not in optional):
            raise WrongType(f"[{operation}] {name} must be an mlx.core.array, got {type(value).__name__}.")


def require_flags(operation: str, /, **flags: object) -> None:
    """Raise a TypeError that names the first argument that is not True or False, as MLX's own functions do."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise WrongType(f"[{operation}] {name} must be True or False, got {value!r}.")


def check_array(operation: str, name: str, values: mx.array, shape: Shape, dtype: mx.Dtype) -> mx.array:
    """An array of this shape and of the dtype; only integers for an integer dtype, and for another none."""
    if isinstance(values, mx.array) and values.dtype == dtype and values.shape == shape:
        return values.astype(dtype)  # another handle, which a caller may change in place
    require_arrays(operation, **{name: values})
    if values.shape != shape:
        raise WrongValue(f"[{operation}] {name} must have the shape {shape_text(shape)}, got {shape_text(values.shape)}.")
    if mx.issubdtype(dtype, mx.integer) != mx.issubdtype(values.dtype, mx.integer):
        raise WrongValue(f"[{operation}] {name} must be of a type such as {dtype_name(dtype)}, got {dtype_name(values.dtype)}.")
    return values.astype(dtype)


def cast(array: mx.array, dtype: mx.Dtype, stream: mx.Stream) -> mx.array:
    """The array in another dtype; itself where that is its own."""
    return array if array.dtype == dtype else array.astype(dtype, stream=stream)


@cache
def promoted(*dtypes: mx.Dtype) -> mx.Dtype:
    """The dtype that these promote to."""
    return mx.result_type(*dtypes)


def dense_dtype(operation: str, *dtypes: mx.Dtype) -> mx.Dtype:
    """The same for an operation that computes float16, bfloat16 and float32 alone."""
    dtype = promoted(*dtypes)
    if not mx.issubdtype(dtype, mx.floating) or dtype == mx.float64:
        raise WrongValue(f"[{operation}] Only float16, bfloat16 and float32 are supported, got {dtype_text(*dtypes)}.")
    return dtype


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    """``"float16"`` for ``mlx.core.float16``."""
    return str(dtype).rpartition(".")[2]


def dtype_text(*dtypes: mx.Dtype) -> str:
    """The dtypes as a message names them: ``float16 and int32``."""
    return " and ".join(map(dtype_name, dtypes))


def shape_text(*shapes: Shape) -> str:
    """The shapes as MLX's own messages write them: ``(2,3) and (4,)``."""
    return " and ".join("(" + ",".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")" for shape in shapes)
