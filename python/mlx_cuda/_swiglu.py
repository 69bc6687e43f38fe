"""SwiGLU, the gated activation of feed-forward layers."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ._common.arrays import CACHED_SHAPES, cast, dtype_text, require_arrays, resolve, shape_text
from ._common.choice import Choice, against_native, dtype_name
from ._common.errors import WrongValue
from ._operation import DirectCall, operation

if TYPE_CHECKING:
    from ._common.arrays import Shape, StreamOrDevice


@operation()
def swiglu(gate: mx.array, up: mx.array, *, stream: StreamOrDevice = None) -> DirectCall[mx.array]:
    """Compute the SwiGLU gate ``silu(gate) * up`` in one pass over memory.

    Source: "GLU Variants Improve Transformer" (arXiv:2002.05202).

    Args:
        gate: The gate, of any shape.
        up: The gated values; its shape broadcasts with that of ``gate``.
        stream: Stream or device to run on.

    Returns:
        An array of the broadcast shape in the promoted dtype (float32 if that is not a floating point type). float16 and bfloat16 are
        computed in float32 and rounded once.

    Raises:
        ValueError: The shapes do not broadcast, or the promoted dtype is complex.
        TypeError: An argument is not an MLX array.

    On a CUDA GPU, equal shapes of float16, bfloat16 or float32 run in a kernel, other calls on MLX's operations.
    """
    try:
        dtype, choice = _plan(gate.shape, up.shape, gate.dtype, up.dtype)
    except (AttributeError, TypeError, ValueError):  # which may be of what is no array
        require_arrays("swiglu", gate=gate, up=up)
        raise
    on = resolve(stream)
    if dtype is not None:
        gate, up = cast(gate, dtype, on), cast(up, dtype, on)
    return DirectCall(choice, "swiglu", _composed, (gate, up), on)


@lru_cache(CACHED_SHAPES)
def _plan(gate: Shape, up: Shape, gate_dtype: mx.Dtype, up_dtype: mx.Dtype) -> tuple[mx.Dtype | None, Choice]:
    """The dtype to compute in, if not all are of it, and who computes the case where there is a native module."""
    dtype = mx.result_type(gate_dtype, up_dtype)
    if mx.issubdtype(dtype, mx.complexfloating):
        raise WrongValue(f"[swiglu] Only real types are supported, got {dtype_text(gate_dtype, up_dtype)}.")
    if not all(a == b or 1 in (a, b) for a, b in zip(reversed(gate), reversed(up), strict=False)):
        raise WrongValue(f"[swiglu] Shapes must broadcast, got {shape_text(gate, up)}.")
    if not mx.issubdtype(dtype, mx.floating):
        dtype = mx.float32
    against = "the shapes differ" if gate != up else against_native(dtype_name(dtype), gate)
    choice = Choice("fallback", against) if against else Choice("fused", "equal shapes, in one pass")
    return None if gate_dtype == up_dtype == dtype else dtype, choice


def _composed(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = mx.broadcast_arrays(gate, up)
    return _gated(gate, up) if gate.size else mx.zeros(gate.shape, gate.dtype)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    if gate.dtype in (mx.float16, mx.bfloat16):
        wide = gate.astype(mx.float32)
        return (wide * mx.sigmoid(wide) * up.astype(mx.float32)).astype(gate.dtype)
    return gate * mx.sigmoid(gate) * up
