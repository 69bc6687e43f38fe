"""Room on the GPU for what MLX does not count, once steps are recorded.

MLX lets go of the memory that it keeps for its next calls where 95 % of the GPU's is taken by its own count. Libraries, recorded graphs
and other processes are not in that count, nor what lies between pieces that are in use; and prompts of many lengths leave pieces that fit
no later one. So a server would meet the end of the memory with tens of GiB kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from .._loader import native

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 0.95  # of the GPU's memory for all, as MLX has it for itself
LEAST = 0.5  # for MLX, whatever else is there: other processes may end, and what the host lends is not seen as free
KEPT = 0.25  # of what MLX may have, for its next calls


class Lowered:
    """A limit of MLX's that is lower than it was, until somebody sets another one."""

    def __init__(self, put: Callable[[int], int]) -> None:
        self.put = put  # gives the one before
        self.before = self.ours = -1

    def lower(self, wanted: int, chosen_below: int = 0) -> int:
        """What it is then. ``chosen_below``: a lower one than this is somebody's own, and stays."""
        now = self.put(wanted)
        if now != self.ours:
            self.before = now
        self.ours = self.before if self.before < max(wanted, chosen_below) else wanted
        self.put(self.ours)
        return self.ours

    def bring_back(self) -> None:
        """What it was before, unless somebody has set another one."""
        if self.ours >= 0:
            now = self.put(self.before)
            if now != self.ours:
                self.put(now)
            self.before = self.ours = -1


_memory = Lowered(lambda limit: mx.set_memory_limit(limit))
_kept = Lowered(lambda limit: mx.set_cache_limit(limit))


def leave_room() -> None:
    """Have MLX go by what the driver counts as free now. Its limits are for all GPUs of the process; the first one's memory is asked."""
    if not native.on_cuda():
        return
    info = mx.device_info(mx.Device(mx.gpu, 0))
    total = int(info["total_memory"])
    beside = total - int(info["free_memory"]) - mx.get_active_memory() - mx.get_cache_memory()
    limit = _memory.lower(max(int(MOST * total) - max(beside, 0), int(LEAST * total)))
    _kept.lower(int(KEPT * limit), chosen_below=_memory.before)


def bring_back() -> None:
    """MLX's limits as they were."""
    _memory.bring_back()
    _kept.bring_back()
