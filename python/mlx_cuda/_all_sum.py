"""All-reduce over the GPUs of several processes, for tensor parallel models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ._common.arrays import StreamOrDevice, require_arrays, resolve
from ._common.choice import Choice
from ._common.errors import WrongType
from ._loader import native
from ._loader.replacing import in_place_of
from ._operation import Call

upstream_all_sum = mx.distributed.all_sum


@dataclass
class SumCall(Call[mx.array]):
    """A call of :func:`all_sum`. Peer access is known only when it is computed, because that queries the other processes."""

    x: mx.array
    group: Any | None
    stream: mx.Stream
    engine: native.Engine | str
    given: StreamOrDevice  # MLX chooses the device by the group if none is given

    @cached_property
    def choice(self) -> Choice:  # type: ignore[override]  # computed only if read
        if isinstance(self.engine, str):
            return Choice("mlx", self.engine)
        reason = self.engine.module.all_sum_refusal(self.x, _processes(self.group))
        return Choice("mlx", reason) if reason else Choice("peers", "few enough GPUs, if they reach each other's memory")

    def result(self) -> mx.array:
        found = None if isinstance(self.engine, str) else self.engine.module.all_sum(self.x, _processes(self.group), self.stream)
        return upstream_all_sum(self.x, group=self.group, stream=self.given) if found is None else found

    def kernel(self) -> str:
        return "all_sum" if self.choice.engine == "peers" else ""


def _processes(group: Any | None) -> Any:
    return mx.distributed.init() if group is None else group


def prepare(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> SumCall:
    """Prepare a call. It is not cached, because it exchanges data with other processes."""
    require_arrays("all_sum", x=x)
    if not (group is None or isinstance(group, mx.distributed.Group)):
        raise WrongType(f"[all_sum] group must be an mlx.core.distributed.Group, got {type(group).__name__}.")
    on = resolve(stream)
    return SumCall(x, group, on, native.engine(on), stream)


patched_all_sum = in_place_of(upstream_all_sum, lambda call: not isinstance(call.engine, str))(prepare)


def all_sum(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> mx.array:
    """Compute the all-reduce of :func:`mlx.core.distributed.all_sum`, in one kernel if the GPUs have peer access.

    Args:
        x: The array of this process; all processes have the same shape and dtype.
        group: The processes, an ``mx.distributed.Group``; default all.
        stream: Stream or device to run on.

    Returns:
        The sum, in the shape and dtype of x. It is bit-identical in all processes, accumulated in float32 and rounded once. MLX computes
        dtypes other than float16, bfloat16 and float32, sizes that are not a multiple of 16 bytes, and, except between two Hopper GPUs,
        sizes over 256 KiB divided by the number of other processes. :func:`explain` returns which.

    The call is collective, like MLX's: all processes must have the same installation, and make the same calls in the same order on the same
    streams. The first call of a group on a stream exchanges peer memory. So it waits for all processes already when it is called; later
    calls wait when they are evaluated. At most two streams of a group have peer memory. The kernel is a one-shot all-reduce: each GPU
    writes to all others, in LL packets as NCCL's.
    """
    return patched_all_sum(x, group=group, stream=stream)


vars(all_sum).update(prepare=prepare)


def several_processes() -> bool:
    """Return whether ``mlx.launch`` has started several processes."""
    return os.environ.get("MLX_WORLD_SIZE", "1") != "1"
