"""The first steps of every operation: resolve the stream, check that arguments are arrays, promote dtypes.

An operation has a few microseconds of CPU overhead before its kernel is launched, so results for shapes and dtypes are cached.
"""

from __future__ import annotations

import contextlib
from typing import SupportsFloat, TypeAlias

import mlx.core as mx

from .choice import dtype_name
from .errors import WrongType, WrongValue

StreamOrDevice: TypeAlias = "mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None"

Shape: TypeAlias = tuple[int, ...]

CACHED_SHAPES = 1024  # of each operation; a miss only costs the checks


def resolve(stream: StreamOrDevice) -> mx.Stream:
    """Return the stream on which MLX's operations would run with this argument."""
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
            raise WrongType(f"[{operation}] {name} must be True or False, got {value_text(value)}.")


def number(operation: str, name: str, value: object) -> float:
    """Return a number as a float. An array is none: its value is not known before it is evaluated."""
    if isinstance(value, (float, int, SupportsFloat)) and not isinstance(value, mx.array):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise WrongType(f"[{operation}] {name} must be a number, got {value_text(value)}.")


def check_array(operation: str, name: str, values: mx.array, shape: Shape, dtype: mx.Dtype) -> mx.array:
    """Return an array of this shape, cast to the dtype. Integers are not cast to other types, nor other types to integers."""
    if isinstance(values, mx.array) and values.dtype == dtype and values.shape == shape:
        return values.astype(dtype)  # another handle, which a caller may change in place
    require_arrays(operation, **{name: values})
    if values.shape != shape:
        raise WrongValue(f"[{operation}] {name} must have the shape {shape_text(shape)}, got {shape_text(values.shape)}.")
    if mx.issubdtype(dtype, mx.integer) != mx.issubdtype(values.dtype, mx.integer):
        raise WrongValue(f"[{operation}] {name} must be of a type such as {dtype_name(dtype)}, got {dtype_name(values.dtype)}.")
    return values.astype(dtype)


def cast(array: mx.array, dtype: mx.Dtype, stream: mx.Stream) -> mx.array:
    """Return the array in another dtype, or itself if it has that dtype."""
    return array if array.dtype == dtype else array.astype(dtype, stream=stream)


def dense_dtype(operation: str, *dtypes: mx.Dtype) -> mx.Dtype:
    """Return the promoted dtype of an operation that supports only float16, bfloat16 and float32."""
    dtype = mx.result_type(*dtypes)
    if not mx.issubdtype(dtype, mx.floating) or dtype == mx.float64:
        raise WrongValue(f"[{operation}] Only float16, bfloat16 and float32 are supported, got {dtype_text(*dtypes)}.")
    return dtype


def dtype_text(*dtypes: mx.Dtype) -> str:
    """Return the dtypes for a message: ``float16 and int32``."""
    return " and ".join(map(dtype_name, dtypes))


def value_text(value: object) -> str:
    """Return a wrong argument for a message; an array is not evaluated."""
    return type(value).__name__ if isinstance(value, mx.array) else repr(value)


def shape_text(*shapes: Shape) -> str:
    """Return the shapes for a message, as MLX writes them: ``(2,3) and (4,)``."""
    return " and ".join("(" + ",".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")" for shape in shapes)
