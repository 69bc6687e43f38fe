"""Attention from MLX's operations, for what neither a fused kernel nor MLX's own function takes."""

from __future__ import annotations

import mlx.core as mx

upstream_attention = mx.fast.scaled_dot_product_attention  # whatever patch() puts in its place later


def visible(q_len: int, k_len: int, window: tuple[int, int], starts: mx.array | None, ends: mx.array | None) -> mx.array:
    """Which keys a query sees by its place: bool ``[1 or B, 1, Tq, Tk]``.

    ``window`` counts the keys before and after the query's own place (negative: all); ``starts`` and ``ends``, int32 ``[B]``, bound the
    keys of each batch entry, and the queries are the last before its end.
    """
    end = mx.array(k_len) if ends is None else ends.reshape(-1, 1, 1, 1)
    key = mx.arange(k_len).reshape(1, 1, 1, -1)
    place = mx.arange(q_len).reshape(1, 1, -1, 1) + end - q_len
    seen = mx.broadcast_to(key < end, mx.broadcast_shapes(place.shape, key.shape))
    if starts is not None:
        seen = seen & (key >= starts.reshape(-1, 1, 1, 1))
    left, right = window
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    return seen


def composed_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, softcap: float, mask: mx.array, sinks: mx.array | None
) -> mx.array:
    """Attention with the scores written out in float32; a query that sees no key gives zeros, without a NaN on the way."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (mx.repeat(kv.astype(mx.float32), groups, axis=1) for kv in (k, v))
    scores = (q.astype(mx.float32) * scale) @ keys.swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    seen = mask
    if mask.dtype != mx.bool_:
        seen, scores = mask > -mx.inf, scores + mx.maximum(mask.astype(mx.float32), mx.finfo(mx.float32).min / 4)
    scores = mx.where(seen, scores, mx.finfo(mx.float32).min)
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, -1, 1, 1)
        peak = mx.maximum(peak, sink)
    peak = mx.stop_gradient(peak)
    weights = mx.where(seen, mx.exp(scores - peak), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - peak)
    return ((weights @ values) / mx.where(total > 0, total, 1)).astype(q.dtype)
