"""Decoding with a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, overload

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, dtype_text, require_arrays, resolve, shape_text
from .._common.choice import Choice, dtype_name
from .._common.errors import WrongValue
from .._loader import native
from .._operation import DirectCall, operation
from .attention import RESULTS, AnyAttentionCall, case_of, run
from .options import Keywords, checked, require_dimensions, require_floating, require_groups
from .rules import choose_paged, choose_update, equal_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedKeywords(Keywords, total=False):
    window_size: int | None


@dataclass(slots=True)
class PagedCall(AnyAttentionCall):
    """A call of :func:`paged_attention`, in one dtype."""

    q: mx.array
    k: mx.array  # pages
    v: mx.array
    table: mx.array
    window_size: int | None

    @property
    def sizes(self) -> tuple[int, int] | None:
        if self.choice.engine != "decode":
            return None
        page_size = self.k.shape[2]
        fewest, most = equal_choice(0, self.table.shape[1] * page_size, self.window_size, asked=False)
        return -(-fewest // page_size), most // page_size

    def results(self) -> list[mx.array]:
        q, k, v, table, options, on = self.q, self.k, self.v, self.table, self.options, self.stream
        if self.choice.engine == "decode":
            return native.module(on).decode_attention(q, k, v, options, on, table)
        if self.force_fused:
            raise WrongValue(f"[paged_attention] force_fused is set, but no fused kernel supports this call: {self.choice.reason}")
        return run(q, in_order(k, table), in_order(v, table), options, force_fused=False, stream=on)


@overload
def paged_attention(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, block_table: mx.array, lengths: mx.array, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedKeywords],
) -> mx.array: ...  # fmt: skip


@overload
def paged_attention(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, block_table: mx.array, lengths: mx.array, *,
    return_lse: Literal[True], **options: Unpack[PagedKeywords],
) -> tuple[mx.array, mx.array]: ...  # fmt: skip


@overload
def paged_attention(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, block_table: mx.array, lengths: mx.array, *,
    return_lse: bool, **options: Unpack[PagedKeywords],
) -> mx.array | tuple[mx.array, mx.array]: ...  # fmt: skip


@operation(RESULTS, block_table=1)
def paged_attention(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, block_table: mx.array, lengths: mx.array, *, scale: float | None = None,
    window_size: int | None = None, softcap: float | None = None, sinks: mx.array | None = None, return_lse: bool = False,
    force_fused: bool = False, stream: StreamOrDevice = None,
) -> PagedCall:  # fmt: skip
    """Compute causal :func:`attention` over a paged KV cache.

    Source: "PagedAttention" (arXiv:2309.06180).

    Args:
        q: Queries, ``[B, H, Tq, D]``: the last Tq positions before ``lengths[b]``, whose keys are in the cache already.
        k_pages: Keys of all sequences, ``[pages, Hkv, page_size, D]``.
        v_pages: Values of all sequences, ``[pages, Hkv, page_size, Dv]``.
        block_table: int32 ``[B, n]``: key j of sequence b is in page ``block_table[b, j // page_size]``. Entries beyond a sequence's
            length are ignored.
        lengths: int32 ``[B]``, at most ``n * page_size``; sequences may be empty.
        scale: Factor of the scores; default ``1 / sqrt(D)``.
        window_size: Number of keys before its own position that a query attends to.
        softcap: As in :func:`attention`.
        sinks: As in :func:`attention`.
        return_lse: Also return the log-sum-exp, as :func:`attention` does.
        force_fused: Raise an error instead of using an engine that copies the pages.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` in the dtype that q and the pages promote to; with ``return_lse`` a pair.

    Raises:
        ValueError: Shapes, dtypes or an option do not fit, or ``force_fused`` is set and the kernel does not support the call.
        TypeError: An argument is not an MLX array, or an option is not of its type.

    Up to 32 queries run in the decode kernel of :func:`attention`, with pages of a multiple of 16 keys. Other calls copy the pages into
    contiguous memory first.
    """
    require_arrays("paged_attention", q=q, k_pages=k_pages, v_pages=v_pages, block_table=block_table, lengths=lengths)
    dtype = _dtype(q.shape, k_pages.shape, v_pages.shape, q.dtype, k_pages.dtype, v_pages.dtype)
    if isinstance(window_size, tuple):
        raise WrongValue(f"[paged_attention] window_size must be a number of keys, not negative, got {window_size!r}.")
    on = resolve(stream)
    with mx.stream(on):
        q, k_pages, v_pages = (array.astype(dtype) for array in (q, k_pages, v_pages))
        table, ends = _placement("paged_attention", block_table, lengths, q.shape[0])
        k_len = table.shape[1] * k_pages.shape[2]
        q, options = checked(
            "paged_attention", q, k_len, scale=scale, mask="causal", window_size=window_size, softcap=softcap, sinks=sinks, lengths=ends,
            return_lse=return_lse, force_fused=force_fused,
        )  # fmt: skip
        engine = native.engine(on)
        if isinstance(engine, str) or not k_pages.shape[0]:
            choice = Choice("fallback", engine if isinstance(engine, str) else "there is no page")
        else:
            choice = choose_paged(case_of(q, v_pages, (q.shape[2], k_len), options, engine, q.shape[0]), k_pages.shape[2])
        return PagedCall(options, choice, on, force_fused, q, k_pages, v_pages, table, window_size)


class UpdateCall(DirectCall[tuple[mx.array, mx.array]]):
    """A call of :func:`paged_cache_update`."""

    def result(self) -> tuple[mx.array, mx.array]:
        keys, values = super().result()  # a list, of the native module
        return keys, values


@operation("tuple[mx.array, mx.array]", is_cached=False)
def paged_cache_update(
    k_pages: mx.array,
    v_pages: mx.array,
    keys: mx.array,
    values: mx.array,
    block_table: mx.array,
    lengths: mx.array,
    *,
    stream: StreamOrDevice = None,
) -> UpdateCall:
    """Write the last keys and values of each sequence into a paged KV cache.

    Source: "PagedAttention" (arXiv:2309.06180).

    Args:
        k_pages: Keys of all sequences, ``[pages, Hkv, page_size, D]``.
        v_pages: Values of all sequences, ``[pages, Hkv, page_size, Dv]``.
        keys: New keys, ``[B, Hkv, T, D]``, for the positions from ``lengths[b] - T`` up to ``lengths[b]``. Negative positions, and those
            without a page, are dropped.
        values: New values, ``[B, Hkv, T, Dv]``.
        block_table: int32 ``[B, n]``, as in :func:`paged_attention`; two sequences must not write to the same page.
        lengths: int32 ``[B]``, the lengths after the update.
        stream: Stream or device to run on.

    Returns:
        The new pages of keys and of values. They reuse the memory of the old pages if nothing else refers to them, except a
        :func:`paged_attention` that is still running on the same stream. Assign them to the same names.

    Raises:
        ValueError: Shapes or dtypes do not fit.
        TypeError: An argument is not an MLX array.
    """
    name = "paged_cache_update"
    require_arrays(name, k_pages=k_pages, v_pages=v_pages, keys=keys, values=values, block_table=block_table, lengths=lengths)
    _check_update(k_pages.shape, v_pages.shape, keys.shape, values.shape)
    dtype = require_floating(name, k_pages.dtype)
    if v_pages.dtype != dtype:
        raise WrongValue(f"[{name}] k_pages and v_pages must be of one type, got {dtype_text(dtype, v_pages.dtype)}.")
    on = resolve(stream)
    with mx.stream(on):
        table, ends = _placement(name, block_table, lengths, keys.shape[0])
        keys, values = keys.astype(dtype), values.astype(dtype)
    sizes = (*keys.shape[:3], *k_pages.shape, table.shape[1])
    choice = choose_update(dtype_name(dtype), sizes, (v_pages.shape[3], k_pages.shape[3]))
    return UpdateCall(choice, "paged_cache_update", _update, (k_pages, v_pages, keys, values, table, ends), on)


def _update(
    k_pages: mx.array, v_pages: mx.array, keys: mx.array, values: mx.array, table: mx.array, ends: mx.array
) -> tuple[mx.array, mx.array]:
    if 0 in (*keys.shape[:3], *k_pages.shape, table.shape[1]):
        return k_pages, v_pages
    return _written(k_pages, keys, table, ends), _written(v_pages, values, table, ends)


@lru_cache(CACHED_SHAPES)
def _dtype(q: Shape, k: Shape, v: Shape, *dtypes: mx.Dtype) -> mx.Dtype:
    require_dimensions("paged_attention", "[B, H, T, D]", q=q)
    _check_pages("paged_attention", k, v)
    if q[3] != k[3]:
        raise WrongValue(f"[paged_attention] q and k_pages must have the same last dimension, got {shape_text(q, k)}.")
    require_groups("paged_attention", q[1], k[1])
    return require_floating("paged_attention", *dtypes)


def _check_pages(operation: str, k: Shape, v: Shape) -> None:
    require_dimensions(operation, "[pages, Hkv, page_size, D]", k_pages=k, v_pages=v)
    if k[:3] != v[:3]:
        raise WrongValue(f"[{operation}] k_pages and v_pages must agree in number of pages, heads, page size, got {shape_text(k, v)}.")
    if k[2] == 0:
        raise WrongValue(f"[{operation}] A page must hold a key, got {shape_text(k)}.")


@lru_cache(CACHED_SHAPES)
def _check_update(k_pages: Shape, v_pages: Shape, keys: Shape, values: Shape) -> None:
    _check_pages("paged_cache_update", k_pages, v_pages)
    for name, new, pages in (("keys", keys, k_pages), ("values", values, v_pages)):
        if len(new) != 4 or (new[1], new[3]) != (pages[1], pages[3]):
            shape = shape_text(new)
            raise WrongValue(f"[paged_cache_update] {name} must be [B, {pages[1]}, T, {pages[3]}] as the pages are, got {shape}.")
    if keys[:3] != values[:3]:
        raise WrongValue(f"[paged_cache_update] keys and values must agree in batch, heads and length, got {shape_text(keys, values)}.")


def _placement(operation: str, table: mx.array, lengths: mx.array, batch: int) -> tuple[mx.array, mx.array]:
    if table.ndim != 2:
        raise WrongValue(f"[{operation}] block_table must have the shape ({batch}, n), got {shape_text(table.shape)}.")
    table = check_array(operation, "block_table", table, (batch, table.shape[1]), mx.int32)
    return table, check_array(operation, "lengths", lengths, (batch,), mx.int32)


def in_order(pages: mx.array, table: mx.array) -> mx.array:
    """Copy the pages of each sequence into contiguous memory, ``[B, Hkv, n * page_size, D]``; unused entries are arbitrary."""
    count, heads, size, dim = pages.shape
    if count == 0:
        return mx.zeros((table.shape[0], heads, 0, dim), pages.dtype)
    found = mx.take(pages, mx.clip(table, 0, count - 1), axis=0)
    return found.transpose(0, 2, 1, 3, 4).reshape(table.shape[0], heads, table.shape[1] * size, dim)


def _written(pages: mx.array, new: mx.array, table: mx.array, ends: mx.array) -> mx.array:
    """Return the pages after the update; dropped tokens are written to a spare page."""
    count, heads, size, dim = pages.shape
    steps = new.shape[2]
    place = ends[:, None] - steps + mx.arange(steps)
    column = place // size
    page = mx.take_along_axis(table, mx.clip(column, 0, table.shape[1] - 1), axis=1)
    lost = (place < 0) | (column >= table.shape[1]) | (page < 0) | (page >= count)
    row = mx.where(lost, count, page) * size + place % size
    flat = mx.concatenate([pages, mx.zeros((1, *pages.shape[1:]), pages.dtype)]).swapaxes(1, 2).reshape(-1, heads, dim)
    flat[row.flatten()] = new.swapaxes(1, 2).reshape(-1, heads, dim)
    return flat.reshape(count + 1, size, heads, dim)[:count].swapaxes(1, 2)
