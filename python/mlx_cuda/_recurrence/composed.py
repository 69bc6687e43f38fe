"""Fallback of linear attention with one decay per head: MLX's operations, 64 tokens at a time, in float32, as in the chunked kernels."""

from __future__ import annotations

import mlx.core as mx

from .rules import Call

TOKENS = 64  # of a chunk
LEAST_DECAY = 1e-13  # of one token


def composed(call: Call, *, delta: bool) -> tuple[mx.array, mx.array]:
    """Return y and the final state; packed sequences are not supported."""
    q, k, v, g, beta = (each.astype(mx.float32).swapaxes(1, 2) for each in call[:5])  # heads before tokens
    (batch, heads, tokens, value), key = v.shape, k.shape[3]
    state = mx.zeros((batch, heads, value, key)) if call.state is None else call.state
    if 0 in (*v.shape, key):
        return mx.zeros(call.v.shape, call.v.dtype), state
    q, k = (mx.repeat(each, heads // each.shape[1], axis=1) for each in (q, k))
    if call.mask is not None:
        seen = call.mask[:, None]
        q, k, v = (mx.where(seen[..., None], each, 0) for each in (q, k, v))
        g, beta = mx.where(seen, g, 1), mx.where(seen, beta, 0)
    size = min(tokens, TOKENS)
    missing = -tokens % size
    q, k, v, beta = (_padded(each, missing, 0) for each in (q, k, v, beta))
    total = mx.cumsum(_chunks(_padded(log_decay(g), missing, 0), size), axis=3)
    q, k, v, beta = (_chunks(each, size) for each in (q, k, v, beta))
    between = mx.exp(mx.where(mx.tri(size, dtype=mx.bool_), total[..., None] - total[..., None, :], -mx.inf))
    scores = (q @ k.swapaxes(3, 4)) * between
    since, left = mx.exp(total)[..., None], mx.exp(total[..., -1:] - total)[..., None]
    new, used = v * beta[..., None], None
    if delta:
        solve = inverse(mx.tril(beta[..., None] * between * (k @ k.swapaxes(3, 4)), -1))
        new, used = solve @ new, solve @ (k * since * beta[..., None])
    parts = []
    for i in range(q.shape[2]):
        change = new[:, :, i] if used is None else new[:, :, i] - used[:, :, i] @ state.swapaxes(2, 3)
        parts.append(scores[:, :, i] @ change + since[:, :, i] * (q[:, :, i] @ state.swapaxes(2, 3)))
        state = since[:, :, i, -1:] * state + (change * left[:, :, i]).swapaxes(2, 3) @ k[:, :, i]
    y = mx.concatenate(parts, axis=2)[:, :, :tokens]
    return y.swapaxes(1, 2).astype(call.v.dtype), state


def log_decay(g: mx.array) -> mx.array:
    """Return the logarithms of decays, clamped to that of ``LEAST_DECAY``; NaN if a decay is negative or NaN."""
    return mx.log(mx.where(g < 0, mx.nan, mx.maximum(g, LEAST_DECAY)))


def _padded(array: mx.array, missing: int, value: float) -> mx.array:
    """Pad tokens at the end."""
    return mx.pad(array, [(0, missing) if axis == 2 else (0, 0) for axis in range(array.ndim)], constant_values=value)


def _chunks(array: mx.array, size: int) -> mx.array:
    return array.reshape(*array.shape[:2], -1, size, *array.shape[3:])


def inverse(below: mx.array) -> mx.array:
    """Invert the identity plus a strictly lower triangular matrix, ``[..., n, n]``, recursively by halves."""
    size = below.shape[-1]
    if size == 1:
        return mx.ones(below.shape, below.dtype)
    half = (size + 1) // 2
    first, last = inverse(below[..., :half, :half]), inverse(below[..., half:, half:])
    corner = -last @ (below[..., half:, :half] @ first)
    none = mx.zeros((*below.shape[:-2], half, size - half), below.dtype)
    return mx.concatenate([mx.concatenate([first, none], axis=-1), mx.concatenate([corner, last], axis=-1)], axis=-2)
