"""Memory that MLX keeps for its next calls: let go of between the steps of models, where too little is free beside it.

MLX lets go of it itself, but where its own pool and arrays have 95 % of the GPU's memory. Libraries, recorded graphs and other processes
are not in that count, and prompts of many lengths leave pieces that fit no later one: a server meets the end of the memory with tens of
GiB kept.
"""

from __future__ import annotations

import mlx.core as mx

KEPT = 0.5  # of what the driver counts as free, at most
STEPS = 64  # in so many of all memory MLX's own may grow or shrink until the driver is asked again

_seen = 0  # MLX's memory when the driver was asked


def make_room() -> None:
    """Have MLX let go of all that it keeps, where that is more than half as much as is free on this GPU.

    MLX's memory, in use or kept, changes in size only when it asks the driver for some; so nearly all steps find it as it was.
    """
    global _seen  # noqa: PLW0603  (whichever thread is last)
    kept = mx.get_cache_memory()
    of_mlx = kept + mx.get_active_memory()
    if abs(of_mlx - _seen) * STEPS < mx.get_memory_limit():
        return
    _seen = of_mlx
    if kept > KEPT * float(mx.device_info(mx.default_device()).get("free_memory", "inf")):
        mx.clear_cache()
        _seen -= kept
