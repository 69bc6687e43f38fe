"""Drafts that a model does not confirm, taken back from mlx-lm's caches of a window that is full.

mlx-lm 0.32.2 leaves them there: ``trim_prompt_cache`` takes back nothing from a rotating cache that is full, nor from the caches beside it,
and what ``speculative_generate_step`` gives from then on is not what the model gives. But the tokens that a model verifies are written all
at once, behind what the first of them sees, and from there they can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any


def taking_back(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's function that takes tokens back, for rotating caches that are full as well."""
    rotating = theirs.__globals__["RotatingKVCache"]

    @wraps(theirs)
    def trim_prompt_cache(cache: list[Any], num_tokens: int) -> Any:
        parts = list(_parts(cache))
        full = [part for part in parts if not part.is_trimmable()]
        if num_tokens <= 0 or not full or not all(isinstance(part, rotating) for part in full):
            return theirs(cache, num_tokens)
        for part in parts:
            if part.is_trimmable():
                part.trim(num_tokens)
            else:
                _rewind(part, num_tokens)
        return num_tokens

    return trim_prompt_cache


def _parts(caches: Any) -> Iterator[Any]:
    for cache in caches:
        yield from _parts(cache.caches) if hasattr(cache, "caches") else (cache,)


def _rewind(cache: Any, count: int) -> None:
    """Take back the newest tokens of a full ``RotatingKVCache``."""
    rows = cache.keys.shape[2]
    if cache._idx == rows and (rows == cache.offset or rows - count >= cache.max_size):  # in order, and nothing that is seen was dropped
        cache._idx = rows - count
        cache.keys, cache.values = cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :]
    else:
        # Written one by one, in the places of the oldest: those are gone, and what took their places is seen until it is written over.
        # Only a draft model's cache is like that, whose drafts may be worse; the model's own word is what is given.
        cache._idx = cache.keep + (cache._idx - cache.keep - count) % (cache.max_size - cache.keep)
    cache.offset -= count
