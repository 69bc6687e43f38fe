"""GPU memory: whether an allocation fits, and whether an error says that it did not; and clearing memory before others see it."""

from __future__ import annotations

import mlx.core as mx

POISON = 3e4  # in rows of a cache that must not be read; mx.full gives floats for it whatever dtype it is asked for
FULL = ("out of memory", "Unable to allocate", "allocation failed")  # in what errors of full memory say


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the GPU's memory is full."""
    return any(words in str(error) for words in FULL)


def has_room(nbytes: int) -> bool:
    """Return whether MLX can allocate this much more.

    MLX's allocator frees its cache only when it would exceed its own limit, whatever other processes use.
    """
    limit, active, cached = mx.get_memory_limit(), mx.get_active_memory(), mx.get_cache_memory()
    freed = min(max(active + cached + nbytes - limit, 0), cached)
    free = int(mx.device_info().get("free_memory", nbytes))  # of the whole GPU, read each time; a CPU's has none
    return active + nbytes <= limit and nbytes <= free + freed
