"""The GPU's memory: whether there is room, and whether an error says that there was none; and what nobody may see of it."""

from __future__ import annotations

import mlx.core as mx

POISON = 3e4  # rows of a cache that nobody may see; mx.full gives floats for it whatever dtype it is asked for
FULL = ("out of memory", "Unable to allocate", "allocation failed")  # in what errors of full memory say


def is_full(error: BaseException) -> bool:
    """Whether an error says that the GPU's memory is full."""
    return any(words in str(error) for words in FULL)


def has_room(nbytes: int) -> bool:
    """Whether MLX can allocate so much more.

    Its allocator frees what it has cached only as far as it would exceed its own limit, whatever other processes hold of the GPU.
    """
    limit, active, cached = mx.get_memory_limit(), mx.get_active_memory(), mx.get_cache_memory()
    freed = min(max(active + cached + nbytes - limit, 0), cached)
    free = int(mx.device_info().get("free_memory", nbytes))  # of the whole GPU, read anew each time; a CPU's has none
    return active + nbytes <= limit and nbytes <= free + freed
