"""The gated activation of today's feed-forward layers."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ._common.arrays import CACHED_SHAPES, cast, dtype_name, dtype_text, promoted, require_arrays, resolve, shape_text
from ._common.choice import native_elementwise
from ._common.errors import WrongValue
from ._loader import native
from ._loader.graph_cache import cached

if TYPE_CHECKING:
    from ._common.arrays import Shape, StreamOrDevice


@cached
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
    dtype, taken = _plan(gate.shape, up.shape, gate.dtype, up.dtype)
    on = resolve(stream)
    gate, up = cast(gate, dtype, on), cast(up, dtype, on)
    if taken and not isinstance(engine := native.engine(on), str):
        return engine.module.swiglu(gate, up, on)
    with mx.stream(on):
        gate, up = mx.broadcast_arrays(gate, up)
        return _gated(gate, up) if gate.size else mx.zeros(gate.shape, dtype)


@lru_cache(CACHED_SHAPES)
def _plan(gate: Shape, up: Shape, gate_dtype: mx.Dtype, up_dtype: mx.Dtype) -> tuple[mx.Dtype, bool]:
    """The dtype to compute in, and whether the native kernel takes the case."""
    dtype = promoted(gate_dtype, up_dtype)
    if mx.issubdtype(dtype, mx.complexfloating):
        raise WrongValue(f"[swiglu] Only real types are supported, got {dtype_text(gate_dtype, up_dtype)}.")
    if not all(a == b or 1 in (a, b) for a, b in zip(reversed(gate), reversed(up), strict=False)):
        raise WrongValue(f"[swiglu] Shapes must broadcast, got {shape_text(gate, up)}.")
    if not mx.issubdtype(dtype, mx.floating):
        dtype = mx.float32
    return dtype, gate == up and native_elementwise(dtype_name(dtype), gate)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype in (mx.float16, mx.bfloat16):
        wide = gate.astype(mx.float32)
        return (wide * mx.sigmoid(wide) * up.astype(mx.float32)).astype(gate.dtype)
    return gate * mx.sigmoid(gate) * up
