"""The gated activation of today's feed-forward layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from . import _native
from ._arrays import dtype_name, require_arrays, resolve, shape_text
from ._dispatch import native_elementwise

if TYPE_CHECKING:
    from ._arrays import StreamOrDevice


def swiglu(gate: mx.array, up: mx.array, *, stream: StreamOrDevice = None) -> mx.array:
    """The SwiGLU gate ``silu(gate) * up`` of "GLU Variants Improve Transformer" (arXiv:2002.05202), in one pass over memory.

    Args:
        gate: The gate, of any shape.
        up: The gated values; its shape broadcasts with that of ``gate``.
        stream: Stream or device to run on.

    Returns:
        An array of the broadcast shape in the promoted dtype (float32 where that is no floating point type). float16 and bfloat16 are
        computed in float32 and rounded once.

    Raises:
        ValueError: The shapes do not broadcast, or the promoted dtype is complex.
        TypeError: An argument is no MLX array.

    On a CUDA GPU, equal shapes of float16, bfloat16 or float32 go to the native kernel; everything else composes MLX's operations.
    """
    require_arrays("swiglu", gate=gate, up=up)
    on = resolve(stream)
    dtype = mx.result_type(gate, up)
    if mx.issubdtype(dtype, mx.complexfloating):
        raise ValueError(f"[swiglu] Only real types are supported, got {dtype_name(gate.dtype)} and {dtype_name(up.dtype)}.")
    if not mx.issubdtype(dtype, mx.floating):
        dtype = mx.float32
    gate, up = gate.astype(dtype, stream=on), up.astype(dtype, stream=on)
    if gate.shape == up.shape and native_elementwise(dtype_name(dtype), gate.shape):
        engine = _native.engine(on)
        if isinstance(engine, _native.Engine):
            return engine.module.swiglu(gate, up, on)
    try:
        gate, up = mx.broadcast_arrays(gate, up, stream=on)
    except ValueError as error:
        raise ValueError(f"[swiglu] Shapes must broadcast, got {shape_text(gate, up)}.") from error
    with mx.stream(on):
        return _gated(gate, up)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype in (mx.float16, mx.bfloat16):
        wide = gate.astype(mx.float32)
        return (wide * mx.sigmoid(wide) * up.astype(mx.float32)).astype(gate.dtype)
    return gate * mx.sigmoid(gate) * up
