"""Attention from MLX's operations, for calls that no fused kernel of mlx-cuda supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from .._common.arrays import resolve
from .._common.gradients import with_gradients
from .._common.limits import HOPPER
from .._loader import native
from .options import Options

TILE = 64  # keys, of which cuDNN's backward for Hopper takes two at a time
MODEST = 1024  # numbers up to this leave enough of the scores' digits

upstream_attention = mx.fast.scaled_dot_product_attention  # whatever patch() puts in its place later


def upstream(q: mx.array, k: mx.array, v: mx.array, options: Options, *, force_fused: bool) -> mx.array:
    """Call MLX's own function, which returns NaN for fully masked queries."""
    call = partial(_upstream, q, k, v, scale=options.scale, force_fused=force_fused)
    if options.mask is None:
        return call(mask="causal" if options.causal else None)
    mask, sees = _safe(options.mask)
    return mx.where(sees, call(mask=mask), 0)


def with_upstream_gradients(call: Callable[..., mx.array], options: Options) -> Callable[..., mx.array]:
    """Return a kernel's function of q, k, v and an additive mask with the gradients of MLX's function, some of which are cuDNN's."""
    on = resolve(None)

    def gradients(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        def twin(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
            return upstream(q, k, v, options._replace(mask=mask), force_fused=False)

        with mx.stream(on):
            return mx.vjp(twin, list(primals), [cotangent])[1]

    return with_gradients(call, gradients)


def on_16_bytes(mask: mx.array) -> mx.array:
    """Copy the mask so that its rows are aligned to 16 bytes, as TMA requires."""
    keys = mask.shape[-1] if mask.ndim else 1
    if keys == 1 or keys % 8 == 0:
        return mask
    return mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -keys % 8)])[..., :keys]


def compose(q: mx.array, k: mx.array, v: mx.array, options: Options) -> list[mx.array]:
    """Compute calls that MLX's API cannot express, and the log-sum-exp: with a mask if that is enough, else with the scores written out."""
    mask = _restricted(q, k, options)
    if options.ragged:  # memory beyond the keys may hold NaN, and 0 * NaN is NaN
        there = present(k.shape[2], options.starts, options.ends).swapaxes(2, 3)
        k, v = mx.where(there, k, 0), mx.where(there, v, 0)
    if options.softcap or options.lse or options.sinks is not None:
        out, lse = composed_attention(q, k, v, scale=options.scale, softcap=options.softcap, mask=mask, sinks=options.sinks)
        return [out, lse] if options.lse else [out]
    safe, sees = _safe(mask)
    return [mx.where(sees, _upstream(q, k, v, scale=options.scale, mask=safe), 0)]


def _upstream(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | mx.array | None, **options: Any) -> mx.array:
    """Call MLX's function with contiguous operands if it may use cuDNN, which fails for strides of 0 and less."""
    call: Callable[..., mx.array] = partial(upstream_attention, scale=scale, **options)
    if not isinstance(mask, str) and _forgets_the_end(q, k):
        k, v, mask = _in_whole_tiles(k, v, mask)
    if q.dtype in {mx.float16, mx.bfloat16} and q.shape[-1] % 8 == 0:
        q, k, v = mx.contiguous(q), mx.contiguous(k), mx.contiguous(v)
    if not isinstance(mask, mx.array) or mask.dtype in (mx.bool_, mx.float64):  # float64 is the CPU's alone
        return call(q, k, v, mask=mask)
    return _masked(call, scale)(q, k, v, mask)


def _forgets_the_end(q: mx.array, k: mx.array) -> bool:
    """Return whether cuDNN's backward pass on Hopper, which MLX calls for queries in multiples of 128, reads beyond the last key (see
    src/attention/cudnn/problem.cpp). MLX cannot pass it the number of keys.
    """
    if q.dtype not in {mx.float16, mx.bfloat16} or q.shape[2] % (2 * TILE) or k.shape[2] % (2 * TILE) != TILE:
        return False
    on = resolve(None)
    engine = native.engine(on)
    if isinstance(engine, str) or not engine.module.traced([q, k]):
        return False
    return native.device_capability(on.device)[0] == HOPPER  # the real one, as MLX's kernels use it


def _in_whole_tiles(k: mx.array, v: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """Append one more tile of keys and values, and mask it."""
    keys, beyond = k.shape[2], [(0, 0), (0, 0), (0, TILE), (0, 0)]
    if mask is None:
        mask = mx.ones((1, 1, 1, keys), mx.bool_)
    hidden = False if mask.dtype == mx.bool_ else -mx.inf
    mask = mx.broadcast_to(mask, (*mask.shape[:-1], keys))
    mask = mx.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, TILE)], constant_values=mx.array(hidden, mask.dtype))
    return mx.pad(k, beyond), mx.pad(v, beyond), mask


def _masked(call: Callable[..., mx.array], scale: float) -> Callable[..., mx.array]:
    """Call MLX's function of q, k, v and an additive mask, with all gradients: on cuDNN it raises an error for the mask's.

    The gradients of q, k and v are MLX's, for which it computes its result again. The mask's, and second derivatives, are those of the
    fallback. MLX requests all gradients of a custom function and evaluates those that are used.
    """
    on = resolve(None)

    def composed_gradients(*arrays: mx.array) -> list[mx.array]:
        def composed(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
            return composed_attention(q, k, v, scale=scale, softcap=0.0, mask=mask, sinks=None)[0]

        *primals, cotangent = arrays
        with mx.stream(on):
            return mx.vjp(composed, primals, [cotangent])[1]

    def upstream_gradients(*arrays: mx.array) -> list[mx.array]:
        *primals, mask, cotangent = arrays
        with mx.stream(on):
            return mx.vjp(partial(call, mask=mask), primals, [cotangent])[1]

    def forward(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        return call(q, k, v, mask=mask)

    def curvature(primals: tuple[mx.array, ...], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        return mx.vjp(lambda *arrays: composed_gradients(*arrays)[:3], list(primals), list(cotangents))[1]

    def gradients(primals: tuple[mx.array, ...], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        return [*with_gradients(upstream_gradients, curvature)(*primals, cotangent), composed_gradients(*primals, cotangent)[3]]

    return with_gradients(forward, gradients)


def present(k_len: int, starts: mx.array | None, ends: mx.array | None) -> mx.array:
    """Return which keys are valid: bool ``[1 or B, 1, 1, Tk]``."""
    key = mx.arange(k_len).reshape(1, 1, 1, -1)
    there = key < (k_len if ends is None else ends.reshape(-1, 1, 1, 1))
    return there if starts is None else mx.logical_and(there, key >= starts.reshape(-1, 1, 1, 1))


def visible(q_len: int, k_len: int, window: tuple[int, int], starts: mx.array | None, ends: mx.array | None) -> mx.array:
    """Return which keys a query attends to by its position: bool ``[1 or B, 1, Tq, Tk]``.

    ``window`` counts the keys before and after the query's position (negative: all); ``starts`` and ``ends``, int32 ``[B]``, bound the keys
    of each batch entry, and the queries are the last before its end.
    """
    end = mx.array(k_len) if ends is None else ends.reshape(-1, 1, 1, 1)
    key = mx.arange(k_len).reshape(1, 1, 1, -1)
    place = mx.arange(q_len).reshape(1, 1, -1, 1) + end - q_len
    there = present(k_len, starts, ends)
    seen = mx.broadcast_to(there, mx.broadcast_shapes(place.shape, there.shape))
    left, right = window
    if left >= 0:
        seen = mx.logical_and(seen, key >= place - left)
    if right >= 0:
        seen = mx.logical_and(seen, key <= place + right)
    return seen


def composed_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, softcap: float, mask: mx.array, sinks: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Compute attention with the scores written out in float32, and the log-sum-exp of each query, ``[B, H, Tq]``.

    A fully masked query returns zeros, without an intermediate NaN, and minus infinity (the sink's score, with sinks). The fallback that
    gives the native kernels their gradients (src/attention/composed.cpp) follows the same rules.
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = (mx.repeat(kv.astype(mx.float32), groups, axis=1) for kv in (k, v))
    scores = (q.astype(mx.float32) * scale) @ keys.swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    seen, shift = mask, mx.array(0.0)
    if mask.dtype != mx.bool_:
        seen, bias = mask != -mx.inf, mask.astype(mx.float32)  # NaN hides nothing
        shift = common(bias) if sinks is None else shift
        scores = scores + (bias - shift)
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
    none = total == 0
    total = mx.where(none, 1, total)
    lse = mx.where(none, -mx.inf, peak + mx.log(total) + shift)
    return ((weights @ values) / total).astype(q.dtype), lse.squeeze(-1)


def _restricted(q: mx.array, k: mx.array, options: Options) -> mx.array:
    """Return the mask of the call combined with its window and lengths."""
    seen = visible(q.shape[2], k.shape[2], options.window, options.starts, options.ends)
    if options.mask is None:
        return seen
    if options.mask.dtype == mx.bool_:
        return mx.logical_and(seen, options.mask)  # vmap of & is wrong in MLX 0.32.4 where one operand has the axis alone
    return mx.where(seen, options.mask, -mx.inf)


def _safe(mask: mx.array) -> tuple[mx.array, mx.array]:
    """Return a mask that shows every key to fully masked queries, and which queries are not fully masked.

    The result of a fully masked query is set to zero: nothing infinite arises, so neither the result nor a gradient is NaN.
    """
    if mask.dtype == mx.bool_:
        sees = mask.any(axis=-1, keepdims=True)
        return mx.logical_or(mask, mx.logical_not(sees)), sees
    sees = mask.max(axis=-1, keepdims=True) != -mx.inf
    return mx.where(sees, raised(mask), 0), sees


def raised(mask: mx.array) -> mx.array:
    """Subtract the common part of each row of an additive mask, if it is large."""
    return mask - common(mask)


def common(mask: mx.array) -> mx.array:
    """Return what to subtract from each row of an additive mask: its maximum, if that is so large that it would absorb the scores or
    overflow when one is added. Weights do not change. Fully masked rows stay fully masked.
    """
    top = mx.stop_gradient(mask.max(axis=-1, keepdims=True))
    return mx.where(mx.abs(top) > MODEST, mx.maximum(top, mx.finfo(mask.dtype).min), 0)
