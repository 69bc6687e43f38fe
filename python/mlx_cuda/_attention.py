"""Scaled dot-product attention, fused wherever a fused kernel takes the case."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from . import _native
from ._arrays import CACHED_SHAPES, cast, dtype_name, dtype_text, promoted, require_arrays, resolve, shape_text
from ._dispatch import AttentionCase, choose_attention

if TYPE_CHECKING:
    from ._arrays import Shape, StreamOrDevice
    from ._dispatch import MaskKind


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """``softmax(scale * q @ k.T + mask) @ v`` per head, with grouped queries: "Attention Is All You Need" (arXiv:1706.03762) and
    "GQA" (arXiv:2305.13245).

    Args:
        q: Queries, ``[B, H, Tq, D]``.
        k: Keys, ``[B, Hkv, Tk, D]``, where H is a multiple of Hkv.
        v: Values, ``[B, Hkv, Tk, Dv]``.
        scale: Factor of the scores; default ``1 / sqrt(D)``.
        mask: None; ``"causal"``, aligned to the lower right: query i sees the keys ``j <= i + Tk - Tq``; a bool array (True: seen); or
            an additive array of a type that promotes to that of the result. Arrays broadcast to ``[B, H, Tq, Tk]``.
        force_fused: Raise instead of using a route that writes the ``[Tq, Tk]`` scores to memory.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` in the dtype that q, k and v promote to. A query that sees no key gives zeros, never NaN, and
        passes no gradient.

    Raises:
        ValueError: The shapes, the mask or the dtype do not fit, or ``force_fused`` is set and no fused kernel takes the case.
        TypeError: An argument is no MLX array.

    On a CUDA GPU of compute capability 8.0 or newer, float16 and bfloat16 with D = Dv, a multiple of 8 up to 128 (from 9.0 on up to
    256), without an array mask, go to cuDNN's fused kernel; everything else to :func:`mlx.core.fast.scaled_dot_product_attention`.
    """
    if _native.loaded is not None and (mask is None or mask.__class__ is str):
        try:
            again = _native.loaded.attention_again(q, k, v, scale, mask == "causal", stream)
        except TypeError:  # no stream but a device, or no array: looked at below
            again = None
        if again is not None and mask in (None, "causal"):
            return again
    require_arrays("attention", q=q, k=k, v=v)
    dtype = _promoted(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    on = resolve(stream)
    q, k, v = cast(q, dtype, on), cast(k, dtype, on), cast(v, dtype, on)
    factor = float(scale) if scale is not None else max(q.shape[-1], 1) ** -0.5
    if factor <= 0:  # fused kernels take the maximum of the scores before they scale, and give NaN; both ways below are exact
        with mx.stream(on):
            q, factor = (-q, -factor) if factor < 0 else (q * 0, 1.0)
    if isinstance(mask, mx.array):
        _check_mask(mask, (*q.shape[:3], k.shape[2]), dtype)
        with mx.stream(on):
            return _with_array_mask(q, k, v, factor, mask, force_fused=force_fused, stream=on)
    if mask not in (None, "causal"):
        raise ValueError(f"[attention] mask must be None, 'causal' or an array, got {mask!r}.")
    blind = q.shape[2] - k.shape[2] if mask else 0  # queries before the first key
    if blind <= 0:
        return _run(q, k, v, factor, mask, force_fused=force_fused, stream=on)
    with mx.stream(on):
        seeing = _run(q[:, :, blind:], k, v, factor, mask, force_fused=force_fused, stream=on)
        return mx.concatenate([mx.zeros((*q.shape[:2], blind, v.shape[3]), dtype), seeing], axis=2)


@lru_cache(CACHED_SHAPES)
def _promoted(q: Shape, k: Shape, v: Shape, *dtypes: mx.Dtype) -> mx.Dtype:
    """The dtype to compute in, where the shapes and dtypes fit."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"[attention] {name} must have the 4 dimensions [B, H, T, D], got {shape_text(shape)}.")
    if q[3] != k[3]:
        raise ValueError(f"[attention] q and k must have the same last dimension, got {shape_text(q, k)}.")
    if k[:3] != v[:3]:
        raise ValueError(f"[attention] k and v must agree in batch, heads and length, got {shape_text(k, v)}.")
    if q[0] != k[0]:
        raise ValueError(f"[attention] q and k must have the same batch size, got {shape_text(q, k)}.")
    if q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(f"[attention] The heads of q must be a multiple of those of k, got {q[1]} and {k[1]}.")
    dtype = promoted(*dtypes)
    if not mx.issubdtype(dtype, mx.floating):
        raise ValueError(f"[attention] Only floating point types are supported, got {dtype_text(*dtypes)}.")
    return dtype


def _check_mask(mask: mx.array, scores: Shape, dtype: mx.Dtype) -> None:
    if mask.ndim > 4 or not all(size in (1, full) for size, full in zip(reversed(mask.shape), reversed(scores), strict=False)):
        raise ValueError(f"[attention] mask must broadcast to [B, H, Tq, Tk] = {shape_text(scores)}, got {shape_text(mask.shape)}.")
    if mask.dtype != mx.bool_ and promoted(mask.dtype, dtype) != dtype:
        raise ValueError(f"[attention] mask must promote to the result's type {dtype_name(dtype)}, got {dtype_name(mask.dtype)}.")


def _run(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: str | mx.array | None, *, force_fused: bool, stream: mx.Stream
) -> mx.array:
    """Attention in which every query sees a key."""
    (batch, heads, q_len, head_dim), (_, kv_heads, k_len, v_head_dim) = q.shape, v.shape
    if 0 in (batch, heads, q_len, k_len, v_head_dim):
        return mx.zeros((batch, heads, q_len, v_head_dim), q.dtype, stream=stream)
    engine = _native.engine(stream)
    if isinstance(engine, str):
        reason = engine
    else:
        kind: MaskKind = "array" if isinstance(mask, mx.array) else "causal" if mask else "none"
        sizes = batch, heads, kv_heads, q_len, k_len, head_dim, v_head_dim
        choice = choose_attention(AttentionCase(*sizes, dtype_name(q.dtype), kind, engine.capability, engine.cudnn))
        reason = choice.reason
        if choice.engine == "cudnn":
            refusal = engine.module.attention_unsupported(q, k, v, scale, kind == "causal", stream)
            if not refusal:
                return engine.module.attention(q, k, v, scale, kind == "causal", stream)
            reason = f"cuDNN does not take it: {refusal}"
    try:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, force_fused=force_fused, stream=stream)
    except ValueError as error:
        if force_fused:
            raise ValueError(f"[attention] force_fused is set, but no fused kernel takes this case: {reason}") from error
        raise


def _with_array_mask(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array, *, force_fused: bool, stream: mx.Stream
) -> mx.array:
    """Attention with a mask that may hide every key from a query.

    Such a row is shown every key and its result set to zero: nothing infinite arises, so neither the result nor a gradient is NaN.
    """
    mask = mask.reshape(1) if mask.ndim == 0 else mask
    if 0 in mask.shape:
        return _run(q, k, v, scale, None, force_fused=force_fused, stream=stream)
    if mask.dtype == mx.bool_:
        sees = mask.any(axis=-1, keepdims=True)
        safe = mask | ~sees
    else:
        mask = mask.astype(q.dtype)
        peak = mx.stop_gradient(mask.max(axis=-1, keepdims=True))
        sees = peak > -mx.inf
        # A row of the lowest finite number overflows when a score is added. Softmax does not see a shift of a whole row, so it is undone.
        shift = mx.where(peak < mx.finfo(q.dtype).min / 2, peak, 0)
        safe = mx.where(sees, mask - shift, 0)
    result = _run(q, k, v, scale, safe, force_fused=force_fused, stream=stream)
    return mx.where(sees, result, 0)
