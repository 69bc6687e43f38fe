"""The contents of paged batch caches of mlx-lm, and copies to and from pages (`in_pages.py`)."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx

from .._replay.packing import Form
from .._replay.pool import Held, Layer, Pool
from .._replay.sequences import PAGE, STATE, is_in_pages
from .._replay.states import ByLayers
from .caches import BatchedRotating, Replaced, kind_of


def content_of(held: Held, layer: int, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a paged cache with these attributes, in its own arrays."""
    if held.pool.states.like[layer]:
        return {**rest, "cache": held.pool.state(held, layer)}
    keys, values = held.pool.rows(held, layer)
    return {**rest, **places_of(held, rest), "keys": keys, "values": values}


def settle(cache: Any) -> Any:
    """Give a cache its own arrays, so that it is no longer paged."""
    if state := vars(cache).get(STATE):
        with state[0].pool.states.lock:
            if is_in_pages(cache):  # otherwise another thread was faster
                _leave(cache, content_of(*vars(cache)[STATE]))
    return cache


def _leave(cache: Any, content: dict[str, Any]) -> None:
    pool = vars(cache)[STATE][0].pool
    for caches in (pool.batches, pool.replaced, pool.states.copies):
        caches.discard(cache)
    vars(cache).update(content)
    del vars(cache)[STATE]


def known_again(caches: list[Any]) -> None:
    """Register the states of restored paged caches, which others may use by now."""
    for cache in caches:
        if is_in_pages(cache) and not has_rows(cache):
            pool = vars(cache)[STATE][0].pool
            with pool.states.lock:
                pool.replaced.add(cache)
                pool.states.copies.add(cache)


def settle_copies(pool: Pool) -> bool:
    """Give caches that share what a step replaces their own arrays; return whether there were any."""
    if not pool.states.copies:
        return False
    pool.wait()
    with pool.states.lock:
        for cache in filter(has_rows, list(pool.states.copies)):
            settle(cache)
        for numbers, copies in itertools.groupby(sorted(pool.states.copies, key=_numbers_of), key=_numbers_of):
            content = pool.states.of(numbers)
            for cache in copies:
                _, layer, rest = vars(cache)[STATE]
                _leave(cache, {**rest, "cache": [array.__copy__() for array in content[layer]]})
    return True


def _numbers_of(cache: Any) -> list[int]:
    numbers: list[int] = vars(cache)[STATE][0].numbers
    return numbers


def load(pool: Pool, caches: list[Any], stream: mx.Stream, states: ByLayers | None = None) -> Held | None:
    """The contents of caches, copied to pages; None if there are too few. ``states``: those of all layers, where the caches have others by
    now.
    """
    lengths = lengths_of(caches)
    rows = [rows_of(cache) if any(lengths) else [] for cache in caches]  # nothing of whom one token comes
    return pool.load(rows, lengths, states or list(map(states_of, caches)), stream)


def layer_of(cache: Any) -> Layer:
    return Layer(form_of(cache), window_of(cache), states_of(cache))


def places_of(held: Held, rest: dict[str, Any]) -> dict[str, Any]:
    """Return where a batch's sequences, or the only one, begin and end, by the names in the caches."""
    if "cache" in rest:
        return {}
    longest = max(held.lengths)
    rows = min(longest, rest.get("max_size", longest))
    places: dict[str, Any] = {"_idx": rows, "_offset": longest, "rotated": False, "offset": longest}
    if "left_padding" in rest:
        offsets = mx.array(held.lengths)
        places |= {"offset": offsets, "left_padding": rows - mx.minimum(offsets, rows)}
    return {name: value for name, value in places.items() if name in rest}


def has_rows(cache: Any) -> bool:
    """Return whether it has rows, not a state."""
    return type(cache).__name__ != Replaced.name


def keys_and_values(cache: Any) -> list[mx.array]:
    return [cache.keys, cache.values] if has_rows(cache) else []


def form_of(cache: Any) -> Form:
    """Return the heads, head size and dtype of a cache's keys and values."""
    return [(array.shape[1], array.shape[3], array.dtype) for array in keys_and_values(cache)]


def bytes_of_a_page(cache: Any) -> int:
    """Return the size of a page of this cache."""
    return sum(heads * PAGE * dim * dtype.size for heads, dim, dtype in form_of(cache))


def states_of(cache: Any) -> list[mx.array]:
    return [] if has_rows(cache) else Replaced.arrays(cache)


def lengths_of(caches: list[Any]) -> list[int]:
    """Return the rows of each sequence of a batch, from the first layer with rows."""
    lengths: list[int] = next(cache for cache in caches if has_rows(cache)).offset.tolist()
    return lengths


def window_of(cache: Any) -> int | None:
    """Return the maximum number of rows."""
    return cache.max_size if kind_of(cache) is BatchedRotating else None


def rows_of(cache: Any) -> list[mx.array]:
    """Return the keys and values of a batch's cache, oldest first, within the window; None for a state."""
    if not has_rows(cache):
        return []
    if getattr(cache, "rotated", False):
        return [mx.roll(array, -cache._idx, 2) for array in (cache.keys, cache.values)]
    first = max(0, cache._idx - (window_of(cache) or cache._idx))
    return [array[..., first : cache._idx, :] for array in (cache.keys, cache.values)]
