"""What every operation does first: resolve the stream, see that arrays are arrays, name dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

if TYPE_CHECKING:
    StreamOrDevice: TypeAlias = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None


def resolve(stream: StreamOrDevice) -> mx.Stream:
    """The stream that MLX's own operations would run on, given this argument."""
    if isinstance(stream, mx.Stream):
        return stream
    if stream is None:
        return mx.default_stream(mx.default_device())
    with mx.stream(stream):
        return mx.default_stream(mx.default_device())


def require_arrays(operation: str, **arrays: object) -> None:
    """Raise a TypeError that names the first argument that is not an MLX array."""
    for name, value in arrays.items():
        if not isinstance(value, mx.array):
            raise TypeError(f"[{operation}] {name} must be an mlx.core.array, got {type(value).__name__}.")


def dtype_name(dtype: mx.Dtype) -> str:
    """``"float16"`` for ``mlx.core.float16``."""
    return str(dtype).rpartition(".")[2]


def shape_text(*arrays: mx.array) -> str:
    """The shapes as MLX's own messages write them: ``(2,3) and (4,)``."""
    return " and ".join("(" + ",".join(map(str, array.shape)) + ("," if array.ndim == 1 else "") + ")" for array in arrays)
