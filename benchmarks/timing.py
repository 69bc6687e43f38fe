"""How time is measured.

One sample is the wall clock of a batch of calls, from the first call to the moment the device is idle again, so that every side pays
for its launches alike. The batch is so long (30 ms) that the time until the first kernel starts, up to 1 ms where a library puts many
calls into one graph, is a small part of it; its results are all kept (so that they are written to memory and not over one another in a
cache), and it goes over several sets of inputs. The sides take turns, so that clocks and temperature drift for all of them alike, and
each comes right after each other one equally often: the GPU's clock follows the power of the last 50 ms and more (attention of many
queries was up to 13 % faster after a side that takes little than after itself). The clock is read after each batch. A side whose single
call takes longer gets fewer batches, and one alone where a call takes most of its time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx

from .clock import read_clock

MOST_RESULT_BYTES = 24 << 30  # of one batch
MOST_CALLS = 4096


@dataclass(frozen=True)
class Batch:
    """Seconds for all calls of a batch: by the wall clock, of that in Python before MLX evaluates, and by the device's own events; and
    the clock of the GPU's multiprocessors at the end, in MHz.
    """

    wall: float
    build: float | None = None
    device: float | None = None
    clock: int | None = None


class Engine(Protocol):
    """A library that runs calls."""

    def batch(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], count: int) -> Batch: ...
    def peak_bytes(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
        """Most device memory that one call takes, its result included."""


class MlxEngine:
    def batch(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], count: int) -> Batch:
        mx.synchronize()
        start = time.perf_counter()
        results = [call(*inputs[i % len(inputs)]) for i in range(count)]
        built = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        end = time.perf_counter()
        return Batch(end - start, build=built - start)

    def peak_bytes(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call(*inputs))
        mx.synchronize()
        return mx.get_peak_memory() - before


class TorchEngine:
    """torch, eager. Float32 matmuls run in TF32, as MLX's do."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)

    def batch(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], count: int) -> Batch:
        cuda = self.torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        start = time.perf_counter()
        first.record()
        results = [call(*inputs[i % len(inputs)]) for i in range(count)]
        last.record()
        cuda.synchronize()
        end = time.perf_counter()
        del results
        return Batch(end - start, device=first.elapsed_time(last) / 1e3)

    def peak_bytes(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
        cuda = self.torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call(*inputs)
        cuda.synchronize()
        return int(cuda.max_memory_allocated()) - int(before)


@dataclass(frozen=True)
class Side:
    """One way to compute a case: ours, MLX's own, one of torch's. ``explain`` says of the same inputs which engine of ours takes them."""

    name: str
    engine: Engine
    call: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    explain: Callable[..., Any] | None = None

    def batch(self, count: int) -> Batch:
        with self.context():
            return replace(self.engine.batch(self.call, self.inputs, count), clock=read_clock())

    def peak_bytes(self) -> int:
        with self.context():
            return self.engine.peak_bytes(self.call, self.inputs[0])


@dataclass(frozen=True)
class Settings:
    repetitions: int = 6  # about: rounds are whole, and there is at least one
    batch_seconds: float = 0.03
    side_seconds: float = 0.3  # for the batches of one side

    def turns(self, sides: int) -> int:
        """In whole rounds of as many turns as there are sides, or twice as many where that is odd."""
        a_round = sides * (1 + sides % 2)
        return max(1, round(self.repetitions / a_round)) * a_round


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one number per batch."""

    calls_per_batch: int
    peak_bytes: int
    repetitions: int = 1
    wall: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    clock: list[int] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        self.wall.append(batch.wall / self.calls_per_batch)
        if batch.build is not None:
            self.build.append(batch.build / self.calls_per_batch)
        if batch.device is not None:
            self.device.append(batch.device / self.calls_per_batch)
        if batch.clock is not None:
            self.clock.append(batch.clock)


def measure(sides: Sequence[Side], result_bytes: int, settings: Settings) -> dict[str, Timing | Exception]:
    """Time the sides in turns. A side that raises is left out, with its error in place of its timing."""
    gc.collect()
    gc.disable()  # a collection would fall on whoever's turn it is
    try:
        turns = settings.turns(len(sides))
        measured = {side.name: _warm_up(side, result_bytes, turns, settings) for side in sides}
        for turn in range(turns):
            for side in in_turn(sides, turn):
                timing = measured[side.name]
                if isinstance(timing, Timing) and len(timing.wall) < timing.repetitions:
                    measured[side.name] = _repeat(side, timing)
        return measured
    finally:
        gc.enable()


def in_turn(sides: Sequence[Side], turn: int) -> list[Side]:
    """The sides in an order of this turn's own. In a round each is at each place, and right after each other one, equally often
    (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949).
    """
    count = len(sides)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    if count % 2 == 0:
        return [sides[(each + turn) % count] for each in zigzag]
    order = [sides[(each + turn // 2) % count] for each in zigzag]
    return order[::-1] if turn % 2 else order


def _warm_up(side: Side, result_bytes: int, turns: int, settings: Settings) -> Timing | Exception:
    try:
        calls, batch = _calls_per_batch(side, result_bytes, settings)
        repetitions = max(1, min(turns, round(settings.side_seconds / batch.wall)))
        timing = Timing(calls, side.peak_bytes(), repetitions)
        if repetitions == 1:
            timing.add(batch)
    except Exception as error:  # whatever it is, the other sides are still worth measuring
        return error
    return timing


def _repeat(side: Side, timing: Timing) -> Timing | Exception:
    try:
        timing.add(side.batch(timing.calls_per_batch))
    except Exception as error:
        return error
    return timing


def _calls_per_batch(side: Side, result_bytes: int, settings: Settings) -> tuple[int, Batch]:
    """The number of calls that take the time wanted, and a batch of them; finding it is the warm-up, the same for all sides."""
    most = max(1, min(MOST_CALLS, MOST_RESULT_BYTES // max(result_bytes, 1)))
    side.batch(1)  # plans, compiled functions, and the first touch of memory
    count = 1
    while True:
        batch = side.batch(count)
        if count > 1 and batch.wall >= settings.batch_seconds:
            batch = side.batch(count)  # so many results at once may have had to be given memory first
        if batch.wall >= settings.batch_seconds or count == most:
            return count, batch
        count = min(most, 10 * count, math.ceil(1.2 * count * settings.batch_seconds / batch.wall))
