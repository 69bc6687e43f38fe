"""Sums over GPUs of several processes, as tensor parallel models take them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ._common.arrays import require_arrays, resolve
from ._common.choice import Choice
from ._loader import native
from ._loader.replacing import Prepared, in_place_of

if TYPE_CHECKING:
    from ._common.arrays import StreamOrDevice

upstream_all_sum = mx.distributed.all_sum


@in_place_of(upstream_all_sum)
def patched_all_sum(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> Prepared | None:
    on = resolve(stream)
    engine = native.engine(on)
    if isinstance(engine, str) or not isinstance(x, mx.array) or not (group is None or isinstance(group, mx.distributed.Group)):
        return None

    def compute() -> mx.array:
        found = engine.module.all_sum(x, mx.distributed.init() if group is None else group, on)
        return upstream_all_sum(x, group=group, stream=stream) if found is None else found

    return Prepared(compute)


def all_sum(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> mx.array:
    """:func:`mlx.core.distributed.all_sum`, where GPUs of one machine reach each other's memory in one kernel.

    Args:
        x: What each process has, of one shape and dtype.
        group: The processes, an ``mx.distributed.Group``; default all.
        stream: Stream or device to run on.

    Returns:
        The sum, bit-identical in all processes. It is added in float32 and rounded once. MLX computes what is no float16, bfloat16 or
        float32, no multiple of 16 bytes, or, except between two Hopper GPUs, over 256 KiB divided by the number of other processes;
        :func:`explain` says which.

    Like MLX's it is collective: all processes, of the same installation, make the same calls in the same order on the same streams. The
    first one of a group on a stream, of which two have memory for it, waits for all of them at once, not only when it is evaluated, as they
    show each other that memory. A kernel on each GPU writes to all others (one-shot all-reduce) by a protocol like NCCL's LL.
    """
    return patched_all_sum(x, group=group, stream=stream)


def several_processes() -> bool:
    """Whether ``mlx.launch`` has started this process beside others, as NCCL's groups need."""
    return os.environ.get("MLX_WORLD_SIZE", "1") != "1"


def explain(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> Choice:
    """Which way a sum goes; asks nobody else, so not whether GPUs reach each other."""
    require_arrays("all_sum", x=x)
    if isinstance(engine := native.engine(resolve(stream)), str):
        return Choice("mlx", engine)
    reason = engine.module.all_sum_refusal(x, mx.distributed.init() if group is None else group)
    return Choice("mlx", reason) if reason else Choice("peers", "few enough GPUs, if they reach each other's memory", "all_sum")
