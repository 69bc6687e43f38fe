"""Sums over GPUs of several processes, as tensor parallel models take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ._common.arrays import resolve
from ._common.choice import Choice
from ._loader import native

if TYPE_CHECKING:
    from ._common.arrays import StreamOrDevice

upstream_all_sum = mx.distributed.all_sum


def all_sum(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> mx.array:
    """:func:`mlx.core.distributed.all_sum`, where GPUs of one machine reach each other's memory in one kernel.

    Args:
        x: What each process has, of one shape and dtype.
        group: The processes, an ``mx.distributed.Group``; default all.
        stream: Stream or device to run on.

    Returns:
        The sum, the same to the bit everywhere: in float32, rounded once. Other dtypes than float16, bfloat16 and float32, and large arrays
        of more than two processes, are MLX's.

    Like MLX's it is collective: all processes make the same calls in the same order. The first of a group on a stream waits for all of
    them at once, not only when it is evaluated, as they show each other their memory. A kernel on each GPU writes to all others (one-shot
    all-reduce), small arrays by the protocol that NCCL calls LL.
    """
    if isinstance(x, mx.array) and (found := _ours(x, group, stream)) is not None:
        return found
    return upstream_all_sum(x, group=group, stream=stream)


def _ours(x: mx.array, group: Any | None, stream: StreamOrDevice) -> mx.array | None:
    on = resolve(stream)
    if on.device.type != mx.gpu or isinstance(engine := native.engine(on), str):
        return None
    return engine.module.all_sum(x, group or mx.distributed.init(), on)


def explain(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> Choice:
    """Which way a sum goes; asks nobody else, so not whether GPUs reach each other."""
    on = resolve(stream)
    if on.device.type != mx.gpu or isinstance(engine := native.engine(on), str):
        return Choice("upstream", "there is no native module for the stream")
    reason = engine.module.all_sum_refusal(x, group or mx.distributed.init())
    return Choice("upstream", reason) if reason else Choice("peers", "few enough GPUs, if they reach each other's memory", "all_sum")
