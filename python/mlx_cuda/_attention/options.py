"""The options of a call of attention, checked; its three forms share them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypedDict

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, dtype_text, number, require_flags, shape_text, value_text
from .._common.choice import dtype_name
from .._common.errors import WrongValue
from .rules import MaskKind, WindowKind

Window: TypeAlias = int | tuple[int | None, int | None] | None


class Keywords(TypedDict, total=False):
    """The keyword arguments of every form of attention, for the overloads."""

    scale: float | None
    softcap: float | None
    sinks: mx.array | None
    force_fused: bool
    stream: StreamOrDevice


class MaskedKeywords(Keywords, total=False):
    """Also those of the forms whose keys are masked by arrays."""

    window_size: Window
    mask: str | mx.array | None
    lengths: mx.array | None
    left_padding: mx.array | None


class AttentionKeywords(MaskedKeywords, total=False):
    """The keyword arguments of ``attention``."""

    deterministic: bool


MOST_AFTER = 2**30  # keys of a window after a query's place, which is an int32 that they are added to; more are as good as these


class Options(NamedTuple):
    """The checked options of a call besides q, k and v; arrays are in the form that the kernels read."""

    scale: float  # > 0
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)  # keys before and after a query's own place; negative: all
    mask: mx.array | None = None  # bool or of q's dtype
    sinks: mx.array | None = None
    starts: mx.array | None = None
    ends: mx.array | None = None
    lse: bool = False  # wanted as well
    deterministic: bool = False

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    @property
    def ragged(self) -> bool:
        return self.starts is not None or self.ends is not None

    @property
    def plain(self) -> bool:
        """Return whether MLX's API can express all options."""
        return self.window_kind == "none" and not (self.softcap or self.lse or self.ragged) and self.sinks is None

    def part(self, axis: int, index: tuple[slice, ...]) -> Options:
        """Return the options of some batch entries (axis 0) or heads (axis 1) of the queries."""
        mask = self.mask if self.mask is None or self.mask.shape[axis] == 1 else self.mask[index]
        if axis == 1:
            return self._replace(mask=mask, sinks=None if self.sinks is None else self.sinks[index[1]])
        starts, ends = (None if each is None else each[index] for each in (self.starts, self.ends))
        return self._replace(mask=mask, starts=starts, ends=ends)

    @property
    def mask_kind(self) -> MaskKind:
        """Return the kind of the mask; a causal mask with an array counts as a window."""
        if self.mask is not None:
            return "bool" if self.mask.dtype == mx.bool_ else "additive"
        return "causal" if self.causal else "none"

    @property
    def window_kind(self) -> WindowKind:
        """Return the kind of the window, beyond a causal mask."""
        if self.window == (-1, -1) or (self.window == (-1, 0) and self.mask is None):
            return "none"
        return "left" if self.causal and self.mask is None else "sides"


def require_floating(operation: str, *dtypes: mx.Dtype) -> mx.Dtype:
    """Return the dtype that these promote to; raise an error if it is not floating point."""
    dtype = mx.result_type(*dtypes)
    if not mx.issubdtype(dtype, mx.floating):
        raise WrongValue(f"[{operation}] Only floating point types are supported, got {dtype_text(*dtypes)}.")
    return dtype


def require_dimensions(operation: str, dimensions: str, **shapes: Shape) -> None:
    """Raise an error unless each array has this number of dimensions."""
    count = dimensions.count(",") + 1
    for name, shape in shapes.items():
        if len(shape) != count:
            raise WrongValue(f"[{operation}] {name} must have the {count} dimensions {dimensions}, got {shape_text(shape)}.")


def require_groups(operation: str, heads: int, kv_heads: int) -> None:
    """Raise an error unless each KV head serves the same number of query heads."""
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise WrongValue(f"[{operation}] The heads of q must be a multiple of those of k, got {heads} and {kv_heads}.")


@lru_cache(CACHED_SHAPES)
def attention_dtype(operation: str, q: Shape, k: Shape, v: Shape, *dtypes: mx.Dtype) -> mx.Dtype:
    """Check shapes and dtypes, and return the dtype in which to compute."""
    require_dimensions(operation, "[B, H, T, D]", q=q, k=k, v=v)
    if q[3] != k[3]:
        raise WrongValue(f"[{operation}] q and k must have the same last dimension, got {shape_text(q, k)}.")
    if k[:3] != v[:3]:
        raise WrongValue(f"[{operation}] k and v must agree in batch, heads and length, got {shape_text(k, v)}.")
    if q[0] != k[0]:
        raise WrongValue(f"[{operation}] q and k must have the same batch size, got {shape_text(q, k)}.")
    require_groups(operation, q[1], k[1])
    return require_floating(operation, *dtypes)


def operands(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> tuple[mx.array, mx.array, mx.array, Options]:
    """Check the arguments of ``attention``, and return them in one dtype with a positive scale."""
    dtype = attention_dtype("attention", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    q, own = checked("attention", q, k.shape[2], **options)
    return q, k, v, own


def checked(
    operation: str, q: mx.array, k_len: int, *, scale: float | None = None, mask: object = None, window_size: Window = None,
    softcap: float | None = None, sinks: mx.array | None = None, lengths: mx.array | None = None, left_padding: mx.array | None = None,
    return_lse: bool = False, deterministic: bool = False, force_fused: bool = False,
) -> tuple[mx.array, Options]:  # fmt: skip
    """Return q and the checked options of all forms of attention, with a positive scale."""
    require_flags(operation, return_lse=return_lse, deterministic=deterministic, force_fused=force_fused)
    q, factor = positive_scale(operation, q, scale)
    return q, Options(
        factor,
        softcap=check_softcap(operation, softcap),
        window=check_window(operation, window_size, mask, k_len),
        mask=check_mask(operation, mask, q, k_len),
        sinks=None if sinks is None else check_array(operation, "sinks", sinks, (q.shape[1],), q.dtype),
        starts=None if left_padding is None else check_array(operation, "left_padding", left_padding, (q.shape[0],), mx.int32),
        ends=None if lengths is None else check_array(operation, "lengths", lengths, (q.shape[0],), mx.int32),
        lse=return_lse,
        deterministic=deterministic,
    )


def positive_scale(operation: str, q: mx.array, scale: float | None) -> tuple[mx.array, float]:
    """Return q and a positive scale that give the same scores.

    Fused kernels take the maximum of the scores before they scale, and return NaN for other scales; both conversions here are exact.
    """
    factor = number(operation, "scale", scale) if scale is not None else max(q.shape[-1], 1) ** -0.5
    if factor > 0:
        return q, factor
    return (-q, -factor) if factor < 0 else (q * 0, 1.0)


def check_window(operation: str, size: Window, mask: object, keys: int) -> tuple[int, int]:
    """Return the number of keys before and after a query's position that it attends to; -1 for all, also if there are no more."""
    sides = size if isinstance(size, tuple) else (size, None)
    if len(sides) != 2 or any(side is not None and (type(side) is not int or side < 0) for side in sides):
        raise WrongValue(f"[{operation}] window_size must be a number of keys or two, not negative, got {value_text(size)}.")
    left, right = sides
    if isinstance(mask, str):
        right = 0
    return -1 if left is None or left >= keys else left, -1 if right is None else min(right, MOST_AFTER)


def check_softcap(operation: str, softcap: float | None) -> float:
    """Return the logit softcapping, 0 for none."""
    if softcap is None:
        return 0.0
    value = number(operation, "softcap", softcap)
    if not (math.isfinite(value) and value > 0):
        raise WrongValue(f"[{operation}] softcap must be positive and finite, got {softcap}.")
    return value


def check_mask(operation: str, mask: object, q: mx.array, k_len: int) -> mx.array | None:
    """Return an array mask with the 4 dimensions of the scores, bool or of q's dtype; None without one, or if it masks nothing."""
    if mask is None or (isinstance(mask, str) and mask == "causal"):
        return None
    if not isinstance(mask, mx.array):
        raise WrongValue(f"[{operation}] mask must be None, 'causal' or an array, got {mask!r}.")
    shape, scores, dtype = mask.shape, (*q.shape[:3], k_len), q.dtype
    if shape != scores and not _broadcasts(shape, scores):
        raise WrongValue(f"[{operation}] mask must broadcast to [B, H, Tq, Tk] = {shape_text(scores)}, got {shape_text(shape)}.")
    boolean = mask.dtype == mx.bool_
    if not boolean and mx.result_type(mask.dtype, dtype) != dtype:
        raise WrongValue(f"[{operation}] mask must promote to the result's type {dtype_name(dtype)}, got {dtype_name(mask.dtype)}.")
    if 0 in shape:
        return None
    if len(shape) < 4:
        mask = mask.reshape((1,) * (4 - len(shape)) + shape)
    return mask if boolean else mask.astype(dtype)


@lru_cache(CACHED_SHAPES)
def _broadcasts(shape: Shape, scores: Shape) -> bool:
    return len(shape) <= 4 and all(size in (1, full) for size, full in zip(reversed(shape), reversed(scores), strict=False))
