"""Scaled dot-product attention, fused wherever a fused kernel takes the case."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import mlx.core as mx

from . import _native
from ._arrays import CACHED_SHAPES, dtype_name, dtype_text, promoted, require_arrays, resolve, shape_text
from ._composed import composed_attention, upstream_attention, visible
from ._dispatch import AttentionCase, Choice, choose_attention

if TYPE_CHECKING:
    from ._arrays import Shape, StreamOrDevice
    from ._dispatch import EngineName

    Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Options:
    """What a call asks for besides q, k and v, checked; arrays are what the kernels read."""

    scale: float  # > 0
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)  # keys before and after a query's own place; negative: all
    mask: mx.array | None = None  # bool or of q's dtype
    sinks: mx.array | None = None
    starts: mx.array | None = None
    ends: mx.array | None = None

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    @property
    def plain(self) -> bool:
        """Whether MLX's own function says it all."""
        arrays = (self.sinks, self.starts, self.ends)
        return not self.softcap and self.window in {(-1, -1), (-1, 0)} and all(array is None for array in arrays)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    left_padding: mx.array | None = None,
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
        window_size: How many keys before its own place ``i + Tk - Tq`` a query sees, or a pair: before and after it (None: all).
            Together with ``mask="causal"`` none after it. "Longformer" (arXiv:2004.05150).
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before masks: "Gemma 2" (arXiv:2408.00118).
        sinks: ``[H]``: a score for each head that takes part in the softmax and has no value (gpt-oss; arXiv:2309.17453).
        lengths: int32 ``[B]``: only the first ``lengths[b]`` keys are there, and the queries are the last Tq before that end.
        left_padding: int32 ``[B]``: the first ``left_padding[b]`` keys are not there.
        force_fused: Raise instead of using a route that writes the ``[Tq, Tk]`` scores to memory.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` in the dtype that q, k and v promote to. A query that sees no key gives zeros, never NaN, and
        passes no gradient.

    Raises:
        ValueError: The shapes, an option or the dtype do not fit, or ``force_fused`` is set and no fused kernel takes the case.
        TypeError: An argument is no MLX array.

    On a CUDA GPU of compute capability 8.0 or newer, float16 and bfloat16 with D = Dv, a multiple of 8: up to 32 queries go to a kernel
    of ours that reads keys and values once (D up to 256, all options); more of them, without array masks and other options than a causal
    window, to cuDNN's fused kernel (D up to 128, from 9.0 on up to 256). Everything else is composed of MLX's operations.
    """
    short = window_size is None and softcap is None and sinks is None and lengths is None and left_padding is None
    if short and _native.loaded is not None and (mask is None or mask.__class__ is str):
        try:
            again = _native.loaded.attention_again(q, k, v, scale, mask == "causal", stream)
        except TypeError:  # no stream but a device, or no array: looked at below
            again = None
        if again is not None and mask in (None, "causal"):
            return again
    on = resolve(stream)
    with mx.stream(on):
        q, k, v, options = _prepare(q, k, v, scale, mask, window_size, softcap, sinks, lengths, left_padding)
        return _run(q, k, v, options, force_fused=force_fused, stream=on)


def explain(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    left_padding: mx.array | None = None,
    stream: StreamOrDevice = None,
) -> Choice:
    """Which engine :func:`attention` would use for these arguments, and why no fused kernel where it is none.

    Returns:
        A :class:`Choice`: ``engine`` is ``"decode"`` (the kernel for few queries), ``"cudnn"``, ``"upstream"`` (MLX's own function) or
        ``"composed"`` (MLX's operations); ``reason`` says what speaks against the fused ones.

    Raises:
        ValueError, TypeError: As :func:`attention`.
    """
    on = resolve(stream)
    with mx.stream(on):
        q, k, v, options = _prepare(q, k, v, scale, mask, window_size, softcap, sinks, lengths, left_padding)
        return _choose(q, k, v, options, on)


def _prepare(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float | None,
    mask: str | mx.array | None,
    window_size: Window,
    softcap: float | None,
    sinks: mx.array | None,
    lengths: mx.array | None,
    left_padding: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array, Options]:
    """The arguments checked, in one dtype, with a positive scale."""
    require_arrays("attention", q=q, k=k, v=v)
    dtype = _promoted(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    factor = float(scale) if scale is not None else max(q.shape[-1], 1) ** -0.5
    if factor <= 0:  # fused kernels take the maximum of the scores before they scale, and give NaN; both ways below are exact
        q, factor = (-q, -factor) if factor < 0 else (q * 0, 1.0)
    batch, heads, q_len, _ = q.shape
    options = Options(
        factor,
        softcap=_softcap(softcap),
        window=_window(window_size, mask, k.shape[2]),
        mask=_mask(mask, (batch, heads, q_len, k.shape[2]), dtype) if isinstance(mask, mx.array) else None,
        sinks=_vector("sinks", sinks, heads, dtype),
        starts=_vector("left_padding", left_padding, batch, mx.int32),
        ends=_vector("lengths", lengths, batch, mx.int32),
    )
    return q, k, v, options


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


def _window(size: Window, mask: str | mx.array | None, keys: int) -> tuple[int, int]:
    """The keys before and after a query's own place that it may see; -1 for all, also where there are no more before it."""
    if mask is not None and not isinstance(mask, mx.array) and mask != "causal":
        raise ValueError(f"[attention] mask must be None, 'causal' or an array, got {mask!r}.")
    sides = size if isinstance(size, tuple) else (size, None)
    if len(sides) != 2 or any(side is not None and (type(side) is not int or side < 0) for side in sides):
        raise ValueError(f"[attention] window_size must be a number of keys or two, not negative, got {size!r}.")
    left, right = sides
    if isinstance(mask, str):
        right = 0
    return -1 if left is None or left >= keys else left, -1 if right is None else right


def _softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"[attention] softcap must be positive and finite, got {softcap}.")
    return float(softcap)


def _vector(name: str, values: mx.array | None, size: int, dtype: mx.Dtype) -> mx.array | None:
    """One number for each batch entry or head, contiguous."""
    if values is None:
        return None
    require_arrays("attention", **{name: values})
    if values.shape != (size,):
        raise ValueError(f"[attention] {name} must have the shape ({size},), got {shape_text(values.shape)}.")
    if mx.issubdtype(dtype, mx.integer) != mx.issubdtype(values.dtype, mx.integer):
        raise ValueError(f"[attention] {name} must be of a type such as {dtype_name(dtype)}, got {dtype_name(values.dtype)}.")
    return mx.contiguous(values.astype(dtype))


def _mask(mask: mx.array, scores: Shape, dtype: mx.Dtype) -> mx.array | None:
    """The mask as a view of the scores' shape, bool or of the result's dtype; None where there is nothing to hide."""
    if mask.ndim > 4 or not all(size in (1, full) for size, full in zip(reversed(mask.shape), reversed(scores), strict=False)):
        raise ValueError(f"[attention] mask must broadcast to [B, H, Tq, Tk] = {shape_text(scores)}, got {shape_text(mask.shape)}.")
    if mask.dtype != mx.bool_ and promoted(mask.dtype, dtype) != dtype:
        raise ValueError(f"[attention] mask must promote to the result's type {dtype_name(dtype)}, got {dtype_name(mask.dtype)}.")
    if 0 in mask.shape:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mask if mask.dtype == mx.bool_ else mask.astype(dtype)


def _choose(q: mx.array, k: mx.array, v: mx.array, options: Options, stream: mx.Stream) -> Choice:
    (batch, heads, q_len, head_dim), (_, kv_heads, k_len, v_head_dim) = q.shape, v.shape
    engine = _native.engine(stream)
    if isinstance(engine, str):
        return Choice("upstream" if options.plain else "composed", engine)
    choice = choose_attention(
        AttentionCase(
            batch,
            heads,
            kv_heads,
            q_len,
            k_len,
            head_dim,
            v_head_dim,
            dtype_name(q.dtype),
            "array" if options.mask is not None else "causal" if options.causal else "none",
            engine.capability,
            engine.cudnn,
            window=options.window != (-1, -1) and not options.causal,  # a window beside causal is no matter of its own
            softcap=options.softcap > 0,
            sinks=options.sinks is not None,
            ragged=options.starts is not None or options.ends is not None,
        )
    )
    if choice.engine == "cudnn":
        refusal = engine.module.attention_unsupported(q, k, v, None, options.scale, options.causal, options.window[0], False, stream)
        if not refusal:
            return choice
        choice = Choice("upstream", f"cuDNN does not take it: {refusal}")
    return replace(choice, engine="composed") if choice.engine == "upstream" and not options.plain else choice


def _run(q: mx.array, k: mx.array, v: mx.array, options: Options, *, force_fused: bool, stream: mx.Stream) -> mx.array:
    if 0 in (*q.shape[:3], *v.shape[2:]):
        return mx.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    choice = _choose(q, k, v, options, stream)
    blind = q.shape[2] - k.shape[2]  # queries before the first key: only our own kernel takes them
    if choice.engine != "decode" and options.causal and options.plain and options.mask is None and blind > 0:
        seeing = _run(q[:, :, blind:], k, v, options, force_fused=force_fused, stream=stream)
        return mx.concatenate([mx.zeros((*q.shape[:2], blind, v.shape[3]), q.dtype), seeing], axis=2)
    if choice.engine == "composed":
        if force_fused:
            raise ValueError(f"[attention] force_fused is set, but no fused kernel takes this case: {choice.reason}")
        return _compose(q, k, v, options)
    if choice.engine == "upstream":
        try:
            return _upstream(q, k, v, options, force_fused=force_fused)
        except ValueError as error:
            if force_fused:
                raise ValueError(f"[attention] force_fused is set, but no fused kernel takes this case: {choice.reason}") from error
            raise
    return fused(choice.engine, q, k, v, options, stream)


def fused(engine: EngineName, q: mx.array, k: mx.array, v: mx.array, options: Options, stream: mx.Stream) -> mx.array:
    """The call on one of our engines, which was chosen for it."""
    native = _native.engine(stream)
    assert not isinstance(native, str)  # noqa: S101  (it was there when the engine was chosen)
    if engine == "cudnn":
        return native.module.attention(q, k, v, None, options.scale, options.causal, options.window[0], False, False, stream)[0]
    mask = options.mask
    if mask is not None:
        mask = mask if mask.dtype == mx.bool_ else _raised(mask)
        mask = mx.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    left, right = options.window
    return native.module.decode_attention(
        q, k, v, mask, options.starts, options.ends, options.sinks, options.scale, options.softcap, left, right, stream
    )


def _upstream(q: mx.array, k: mx.array, v: mx.array, options: Options, *, force_fused: bool) -> mx.array:
    """MLX's own function, which gives NaN to queries that see no key."""
    call = partial(upstream_attention, q, k, v, scale=options.scale, force_fused=force_fused)
    if options.mask is None:
        return call(mask="causal" if options.causal else None)
    mask, sees = _safe(_restricted(q, k, options) if options.causal else options.mask)
    return mx.where(sees, call(mask=mask), 0)


def _compose(q: mx.array, k: mx.array, v: mx.array, options: Options) -> mx.array:
    """What MLX's function does not say: as a mask where that is enough, else with the scores written out."""
    mask = _restricted(q, k, options)
    if options.softcap or options.sinks is not None:
        return composed_attention(q, k, v, scale=options.scale, softcap=options.softcap, mask=mask, sinks=options.sinks)
    safe, sees = _safe(mask)
    return mx.where(sees, upstream_attention(q, k, v, scale=options.scale, mask=safe), 0)


def _restricted(q: mx.array, k: mx.array, options: Options) -> mx.array:
    """The mask of the call with its window and lengths in it."""
    seen = visible(q.shape[2], k.shape[2], options.window, options.starts, options.ends)
    if options.mask is None:
        return seen
    if options.mask.dtype == mx.bool_:
        return seen & options.mask
    return mx.where(seen, options.mask, -mx.inf)


def _safe(mask: mx.array) -> tuple[mx.array, mx.array]:
    """A mask that shows every key to the queries that see none, and which see some.

    Such a row's result is set to zero: nothing infinite arises, so neither the result nor a gradient is NaN.
    """
    if mask.dtype == mx.bool_:
        sees = mask.any(axis=-1, keepdims=True)
        return mask | ~sees, sees
    sees = mask.max(axis=-1, keepdims=True) > -mx.inf
    return mx.where(sees, _raised(mask), 0), sees


def _raised(mask: mx.array) -> mx.array:
    """An additive mask without rows of the lowest finite numbers, which overflow when a score is added.

    Softmax does not see a shift of a whole row, so theirs is undone.
    """
    peak = mx.stop_gradient(mask.max(axis=-1, keepdims=True))
    low = (peak < mx.finfo(mask.dtype).min / 2) & (peak > -mx.inf)
    return mask - mx.where(low, peak, 0)
