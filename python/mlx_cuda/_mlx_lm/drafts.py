"""Remove rejected speculative drafts from mlx-lm's full sliding-window caches.

mlx-lm 0.32.2 keeps them: ``trim_prompt_cache`` trims neither a full rotating cache nor the caches beside it, so results of
``speculative_generate_step`` differ from the model's afterwards. The tokens that a model verifies are written at once, after the rows that
the first of them sees, so they can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any


def taking_back(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return mlx-lm's function that trims caches, extended to full rotating caches."""
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
    """Remove the newest tokens of a full ``RotatingKVCache``."""
    rows = cache.keys.shape[2]
    if cache._idx == rows and (rows == cache.offset or rows - count >= cache.max_size):  # in order, and nothing that is seen was dropped
        cache._idx = rows - count
        cache.keys, cache.values = cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :]
    else:
        # Written one by one, in the places of the oldest: those are gone, and what took their places is seen until it is written over.
        # Only a draft model's cache is like that, whose drafts may be worse; the model's own word is what is given.
        cache._idx = cache.keep + (cache._idx - cache.keep - count) % (cache.max_size - cache.keep)
    cache.offset -= count
