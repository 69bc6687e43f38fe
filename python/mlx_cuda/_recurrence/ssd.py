"""The state space model of Mamba-2."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, require_arrays, resolve, shape_text
from .._common.errors import WrongValue
from .._operation import operation
from .fused import RESULTS, LinearAttentionCall
from .rules import Call, choose, floating, prepared


@operation(RESULTS)
def ssd(
    x: mx.array, dt: mx.array, a: mx.array, b: mx.array, c: mx.array, *, d: mx.array | None = None, state: mx.array | None = None,
    mask: mx.array | None = None, stream: StreamOrDevice = None,
) -> LinearAttentionCall:  # fmt: skip
    """Compute the state space model of Mamba-2 (state space duality)::

        S = exp(dt[t] * a) * S + dt[t] * x[t] * b[t].T
        y[t] = S @ c[t] + d * x[t]

    Source: "Transformers are SSMs" (arXiv:2405.21060).

    Args:
        x: Inputs, ``[B, T, H, P]``.
        dt: Time steps, after their bias and softplus: ``[B, T, H]``.
        a: Decay rate of a head, at most 0: ``[H]``.
        b: Input projections, ``[B, T, G, N]``; H is a multiple of G, and adjacent heads share one.
        c: Output projections, ``[B, T, G, N]``.
        d: Skip connection, ``[H]``; default none.
        state: Initial S, ``[B, H, P, N]``; default zeros.
        mask: bool ``[B, T]``. A masked token leaves S unchanged, and its y is ``d * x``.
        stream: Stream or device to run on.

    Returns:
        y, ``[B, T, H, P]`` in the dtype that x, b and c promote to (float32 if that is not a floating point type), and the final S in
        float32.

    Raises:
        ValueError: Shapes do not fit, or a dtype is complex.
        TypeError: An argument is not an MLX array.

    It uses the kernels of :func:`gated_delta`, also for gradients.
    """
    on = resolve(stream)
    with mx.stream(on):
        require_arrays("ssd", ("state", "mask"), x=x, dt=dt, a=a, b=b, c=c, state=state, mask=mask)
        _check(x.shape, dt.shape, a.shape, b.shape, c.shape)
        dtype = floating("ssd", x.dtype, b.dtype, c.dtype)
        decay = mx.exp(dt.astype(mx.float32) * a.astype(mx.float32))
        call = prepared("ssd", Call(c, b, x, decay, dt, state, mask, None), dtype)  # their queries, keys and values are c, b and x
        d = None if d is None else check_array("ssd", "d", d, a.shape, call.v.dtype)
        return LinearAttentionCall(call, choose(call, on), on, delta=False, through=d)


@lru_cache(CACHED_SHAPES)
def _check(x: Shape, dt: Shape, a: Shape, b: Shape, c: Shape) -> None:
    if len(x) != 4 or len(b) != 4 or b != c or x[:2] != b[:2]:
        raise WrongValue(f"[ssd] x must be [B, T, H, P], and b and c [B, T, G, N], got {shape_text(x, b, c)}.")
    if b[2] == 0 or x[2] % b[2]:
        raise WrongValue(f"[ssd] The heads of x must be a multiple of the groups of b and c, got {shape_text(x, b)}.")
    if dt != x[:3] or a != x[2:3]:
        raise WrongValue(f"[ssd] dt must be [B, T, H] and a [H], got {shape_text(dt, a)}.")
