"""What MLX keeps for its next calls, once steps are recorded: it leaves room for others.

MLX lets go of it where its pool has 95 % of the GPU's memory. Libraries, recorded graphs and other processes are not in that count, and
prompts of many lengths leave pieces behind that fit no later one. So a server comes to the end of the memory with tens of GiB kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .._loader import native

PART = 3  # of what nobody uses, one in so many may be kept; what lies between the pieces takes nearly half as much again
LEAST = 20  # one in so many of all memory may be, whatever else is there: hosts that lend theirs count little as free


@dataclass
class Limit:
    """MLX's limit of what it keeps."""

    before: int = -1  # by MLX, or by whoever has set one
    ours: int = -1


_limit = Limit()


def leave_room() -> None:
    """Have MLX keep less, by what the driver counts as free on the first GPU; a limit of somebody's own stays as it is."""
    if not native.on_cuda():
        return
    info = mx.device_info(mx.Device(mx.gpu, 0))
    unused = int(info["free_memory"]) + mx.get_cache_memory()
    wanted = max(unused // PART, int(info["total_memory"]) // LEAST)
    now = mx.set_cache_limit(wanted)
    if now != _limit.ours:
        _limit.before = now
    if _limit.before < mx.get_memory_limit():  # MLX begins with both alike
        wanted = _limit.before
        mx.set_cache_limit(wanted)
    _limit.ours = wanted


def bring_back() -> None:
    """The limit as it was, unless somebody has set another one since."""
    if _limit.ours >= 0:
        now = mx.set_cache_limit(_limit.before)
        if now != _limit.ours:
            mx.set_cache_limit(now)
        _limit.before = _limit.ours = -1
