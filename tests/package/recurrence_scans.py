"""What derivatives of linear attention need of the scans through its chunks, by MLX's operations: as the kernels round it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_cuda._recurrence.backward import Chunks, Scan, by_chunks, rest
from mlx_cuda._recurrence.composed import inverse
from mlx_cuda._recurrence.rules import Call


def scan(call: Call, parts: Chunks, last: mx.array, *, delta: bool) -> Scan:
    """By MLX's operations. ``last`` is the slope of the last state."""
    q, k, v, dy, beta, _ = parts
    dtype, until, onwards, between = v.dtype, parts.until, parts.onwards, parts.between
    scores, new, used = (between * (q @ k.swapaxes(3, 4))).astype(dtype), beta[..., None] * v, k * until * beta[..., None]
    solve = None
    if delta:
        inverted = inverse(mx.tril(beta[..., None] * between * (k @ k.swapaxes(3, 4)), -1))
        new, used = inverted @ new, (inverted @ used).astype(dtype)
        solve = inverted.swapaxes(3, 4).astype(dtype)
    shape = (*v.shape[:2], k.shape[4], v.shape[4])
    state = mx.zeros(shape) if call.state is None else call.state.swapaxes(2, 3)
    count = v.shape[2]
    states, changes, gradients, change_gradients = ([mx.array(0)] * count for _ in range(4))
    for i in range(count):
        states[i] = state.astype(dtype)
        change = new[:, :, i] - used[:, :, i] @ states[i] if delta else new[:, :, i]
        changes[i] = change.astype(dtype)
        state = until[:, :, i, -1:] * state + k[:, :, i].swapaxes(2, 3) @ (change * onwards[:, :, i]).astype(dtype)
    gradient, faded = last.swapaxes(2, 3), (dy * until).astype(dtype)
    for i in reversed(range(count)):
        gradients[i] = gradient.astype(dtype)
        change = scores[:, :, i].swapaxes(2, 3) @ dy[:, :, i] + onwards[:, :, i] * (k[:, :, i] @ gradients[i])
        change_gradients[i] = change.astype(dtype)
        gradient = until[:, :, i, -1:] * gradient + q[:, :, i].swapaxes(2, 3) @ faded[:, :, i]
        if delta:
            gradient = gradient - used[:, :, i].swapaxes(2, 3) @ change_gradients[i]
    s, u, r, du = (mx.stack(each, axis=2) for each in (states, changes, gradients, change_gradients))
    return Scan(s, u, r, du, gradient.swapaxes(2, 3), solve)


def by_mlx(call: Call, cotangents: Sequence[mx.array], *, delta: bool) -> list[mx.array]:
    """The gradients of q, k, v, g, beta and the state in any floating point type."""
    parts = by_chunks(call, cotangents[0])
    found = scan(call, parts, cotangents[1], delta=delta)
    return [*rest(call, parts, found), found.first]
