"""Measure the dispatch thresholds of this GPU and store them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .._common import limits
from .._common.errors import BackendError
from .._common.limits import DispatchThresholds
from .._loader import limits_file, native
from .._loader.checks import ASK_DOCTOR
from .._loader.environment import CAPABILITY
from .rules import Rule, forget, rules

ROUNDS, REPEATS = 5, 3  # in which engines take turns, and of calls together in each; the shortest counts
MARGIN = 1.02  # an engine that takes so much longer at most is as fast
ENOUGH = 1.0  # seconds of trials of a size, after which no further turn begins
SAME = 0.05  # how far results in 16 bits may be apart, relative to their size
COMPILING = 40.0  # seconds that have to be left where MLX compiles kernels

OVER = "the time was over"

Point = tuple[int, dict["int | str", float]]  # a size, and seconds by the limit's value


@dataclass(frozen=True)
class Change:
    """A threshold before and after, and the largest speedup of a call that it moves to another engine."""

    name: str
    before: int | str
    now: int | str
    gain: float


@dataclass
class Calibration:
    """The result of :func:`calibrate`.

    ``gpu`` is the GPU's name and ``limits`` has its thresholds. ``changes`` has the thresholds that differ from before, ``unmeasured``
    those that were not measured, with the reason. ``seconds`` is the duration.
    """

    gpu: str
    limits: DispatchThresholds
    changes: list[Change] = field(default_factory=list)
    unmeasured: dict[str, str] = field(default_factory=dict)  # limits that stay as they were, and why
    seconds: float = 0.0


def calibrate(*, seconds: float = 110.0, progress: Callable[[float, str], None] | None = None, path: Path | None = None) -> Calibration:
    """Measure the dispatch thresholds of the first GPU and use them, in this and later processes.

    Thresholds are the largest M of quantized GEMMs and the most queries of attention for which an engine is used, and the engines of
    chunked prefill and additive masks. mlx-cuda has measurements of some GPUs; on others, conservative defaults use MLX's kernels unless
    mlx-cuda's are known to be faster. Two kinds of thresholds are not measured: those of calls with as many queries as keys, and those of
    float32 calls with weights of more than 4 bits. Run nothing else on the GPU meanwhile. At most 2 GB of its memory is used.

    Args:
        seconds: Time limit in seconds. Thresholds that were not measured by then keep their value.
        progress: Called with the share that is done, from 0 to 1, and the name of the next threshold.
        path: File of the results; default: next to that of :func:`tune`, ``mlx-cuda/tuned-limits.json`` in the user's cache.

    Returns:
        A :class:`Calibration` with the changes, their speedups, and the thresholds that were not measured. If none was measured, nothing is
        stored.

    Raises:
        BackendError: There is no CUDA GPU, or no native module for it.
        ValueError: MLX_CUDA_CAPABILITY is set.

    An engine whose results differ from the other's is excluded. Results are valid for one GPU name, driver, and MLX and mlx-cuda version.
    An error or an interrupt leaves everything unchanged.
    """
    engine = native.engine(mx.default_stream(mx.gpu)) if native.on_cuda() else "MLX offers no CUDA GPU here"
    if isinstance(engine, str):
        raise BackendError(f"[calibrate] There is nothing to measure: {engine}", fix=ASK_DOCTOR)
    name, gpu = native.gpu_name(), engine.capability
    if not name:
        raise ValueError(f"[calibrate] {CAPABILITY} has the GPU be another one: unset it to measure.")
    before = limits.limits(gpu)
    found = Calibration(name, before)
    begun = time.perf_counter()
    every = rules()
    try:
        with mx.stream(mx.gpu):
            for index, rule in enumerate(every):
                if progress:
                    progress(index / len(every), rule.name)
                left = seconds - (time.perf_counter() - begun)
                if left < (COMPILING if rule.compiles else 0.0):
                    found.unmeasured[rule.name] = OVER
                    continue
                _measure(rule, found, lambda new: limits.put(gpu, new), begun + seconds)
                forget()
    except BaseException:
        limits.put(gpu, before)
        raise
    finally:
        forget()
        mx.clear_cache()
    if progress:
        progress(1.0, "")
    found.seconds = time.perf_counter() - begun
    if len(found.unmeasured) == len(every):
        limits.put(gpu, before)
        return found
    found.limits = found.limits._replace(source=f"measured here on {name}")
    limits.put(gpu, found.limits)
    target = path or limits_file.default_path()
    if target:
        limits_file.keep(target, name, native.gpu_versions(engine.module), found.limits)
    return found


def _measure(rule: Rule, found: Calibration, put: Callable[[DispatchThresholds], None], until: float = math.inf) -> None:
    """Measure one threshold, with those that were found before in use."""
    before = rule.value(found.limits)
    points: list[Point] = []
    least = 1 if rule.part == "attention" else 0  # queries: one at a time are decoded in any case
    try:
        for size in rule.sizes:
            trials = {value: rule.trial(found.limits, value) for value in rule.engines or (size, 0)}
            times: dict[int | str, float] = dict.fromkeys(trials, math.inf)
            results = []
            begun = time.perf_counter()
            for turn in range(ROUNDS):
                if time.perf_counter() > until:
                    raise ValueError(OVER)
                if turn and time.perf_counter() - begun > ENOUGH:
                    break
                for value, trial in trials.items():
                    put(trial)
                    results.append(_result(rule, size))
                    times[value] = min(times[value], _seconds(rule, size))
                if turn == 0 and not _agree(*results):
                    raise ValueError(f"the engines give other results of {size}: please report it")
                results.clear()
            if rule.engines:
                times[rule.engines[-1]] *= rule.price
            points.append((size, times))
            if not rule.engines and len(points) > 1 and not any(pays(point) for point in points[-2:]):
                break
    except (MemoryError, RuntimeError, ValueError) as error:
        found.unmeasured[rule.name] = str(error).partition("\n")[0]
        put(found.limits)
        return
    now = best(points, rule.engines or (least, *(size for size, _ in points)), before)
    found.limits = rule.with_value(found.limits, now)
    if now != before:
        found.changes.append(Change(rule.name, before, now, gain(points, before, now)))


def _result(rule: Rule, size: int) -> mx.array:
    """Evaluate the first call, which compiles kernels and builds plans."""
    first, *others = rule.calls(size)
    mx.eval(first, others)
    return first.astype(mx.float32)


def _agree(one: mx.array, other: mx.array) -> bool:
    error: Any = mx.linalg.norm(one - other) / mx.linalg.norm(one)
    return bool(error.item() < SAME)  # and not for NaN


def _seconds(rule: Rule, size: int) -> float:
    """Time the calls together, from Python to the result."""
    shortest = math.inf
    for _ in range(REPEATS):
        begin = time.perf_counter()
        mx.eval(rule.calls(size))
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def pays(point: Point) -> bool:
    """Return whether the engine that a threshold selects is faster for this size."""
    size, times = point
    return times[size] <= times[0] * MARGIN


def time_of(point: Point, limit: int | str) -> float:
    """Return the time with a threshold: for a number, that of the trial on the same side of it."""
    size, times = point
    return times[limit] if isinstance(limit, str) else times[size if size <= limit else 0]


def best(points: list[Point], values: Sequence[int | str], before: int | str) -> int | str:
    """Return the value with the shortest time over all sizes, each counted alike; the former value if it is as good."""
    cost = {value: sum(math.log(time_of(point, value)) for point in points) for value in (*values, before)}
    least = min(values, key=lambda value: cost[value])
    return before if cost[before] - cost[least] < math.log(MARGIN) else least


def gain(points: list[Point], before: int | str, now: int | str) -> float:
    """Return the largest speedup of calls that move to another engine."""
    return max((time_of(point, before) / time_of(point, now) for point in points), default=1.0)
