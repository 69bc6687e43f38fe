"""Thousands of random cases of attention, or of matmuls, in one run: ``python -m tests.gpu.soak --cases 10000 --of matmul``.

A case is its seed; ``--only SEED`` repeats one, and so does ``MLX_CUDA_FUZZ_SEED=SEED pytest tests/gpu/test_fuzz.py -k attention``.
Most of a case's time is the host's, so several processes use the device at once. Each has workers that compute what is right, and compare.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from .trials import Outcome

# What draws and judges cases, with nothing but numpy, and what computes them.
OPERATIONS = {"attention": ("cases", "trials"), "matmul": ("matmul_cases", "matmul_trials")}
WAITING = 4  # results for each worker that may wait to be judged
ENOUGH = 50  # failures of one process after which the rest tells nothing new
SLOWEST = 5  # cases that are named
AFTER_A_CRASH = 5  # exceptions in a row: the device does not answer any more


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    cores = os.cpu_count() or 2
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.soak", description="Random cases against float64.")
    parser.add_argument("--of", choices=OPERATIONS, default="attention")
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="one case, with what it is")
    parser.add_argument("--processes", type=int, default=max(min(8, cores // 2), 1), help="that use the device; they divide the seeds")
    parser.add_argument("--workers", type=int, help="of each process, for the references; default: the cores that are left")
    parser.add_argument("--largest", type=int, help="scores, or multiplications, of one case, at most")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="ENGINE", help="leave out matmuls of these: MLX compiles kernels for 'mlx'"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    options = parser.parse_args(arguments)
    if options.without and options.of != "matmul":
        parser.error("--without is for matmuls")
    if options.only is not None:
        options.seed, options.cases = options.only, 1
    options.processes = min(options.processes, options.cases)
    options.workers = options.workers or max(cores // max(options.processes, 1) - 1, 1)
    return options


@dataclass
class Summary:
    """What one process, or all of them, did."""

    gpu: bool = False
    count: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # of each engine, until the results were there
    slowest: list[tuple[float, int]] = field(default_factory=list)  # the seconds of some seeds
    failures: dict[int, str] = field(default_factory=dict)  # the engine of each seed
    skipped: int = 0  # after too many failures, or for want of time
    left_out: int = 0  # of engines that were not asked for
    dead: list[str] = field(default_factory=list)

    def add(self, part: Summary) -> None:
        self.gpu |= part.gpu
        self.count += part.count
        self.skipped += part.skipped
        self.left_out += part.left_out
        self.engines += part.engines
        self.gradients += part.gradients
        for engine, seconds in part.seconds.items():
            self.seconds[engine] += seconds
        self.slowest += part.slowest
        self.failures |= part.failures


def _module(of: str, *, computes: bool = False) -> Any:
    return importlib.import_module(f".{OPERATIONS[of][computes]}", __package__)


def _draw(of: str, seed: int, largest: int | None) -> Any:
    return _module(of).draw(seed, **({} if largest is None else {"most": largest}))


class Part:
    """The cases of one process."""

    def __init__(self, of: str, pool: ProcessPoolExecutor, workers: int, largest: int | None, without: Sequence[str]) -> None:
        from .trials import on_a_gpu

        self.of, self.pool, self.most_waiting, self.largest = of, pool, WAITING * workers, largest
        self.without = {"without": without} if without else {}
        self.done = Summary(gpu=on_a_gpu())
        self._crashes = 0
        self._waiting: deque[tuple[Any, Outcome, Future[list[str]]]] = deque()

    def run(self, seeds: Sequence[int], seconds: float) -> Summary:
        until = time.monotonic() + seconds
        for seed in seeds:
            if len(self.done.failures) >= ENOUGH or self._crashes >= AFTER_A_CRASH or time.monotonic() > until:
                break
            started = time.monotonic()
            self._compute(seed)
            self.done.count += 1
            self.done.slowest = sorted([*self.done.slowest, (time.monotonic() - started, seed)], reverse=True)[:SLOWEST]
            while len(self._waiting) > self.most_waiting:
                self._collect()
        while self._waiting:
            self._collect()
        self.done.skipped = len(seeds) - self.done.count
        self.done.count -= self.done.left_out
        return self.done

    def _compute(self, seed: int) -> None:
        case, started = _draw(self.of, seed, self.largest), time.monotonic()
        try:
            outcome = _module(self.of, computes=True).compute(case, **self.without)
        except Exception as error:  # whatever it is, it is what this looks for
            self._crashes += 1
            self._fail(case, "", [f"{type(error).__name__}: {error}"])
            return
        self._crashes = 0
        if not outcome.results:
            self.done.left_out += 1
            return
        self.done.seconds[outcome.engine] += time.monotonic() - started
        self.done.engines[outcome.engine] += 1
        self.done.gradients[outcome.engine] += case.gradient
        self._waiting.append((case, outcome, self.pool.submit(_judge, self.of, case, outcome.engine, outcome.results, self.done.gpu)))

    def _collect(self) -> None:
        case, outcome, verdict = self._waiting.popleft()
        if wrong := verdict.result():
            self._fail(case, outcome.engine, wrong)

    def _fail(self, case: Any, engine: str, wrong: list[str]) -> None:
        self.done.failures[case.seed] = engine
        print(f"seed {case.seed}: {'; '.join(wrong)}\n    {engine or 'no engine'}: {case}", flush=True)


def _judge(of: str, case: Any, engine: str, results: dict[str, Any], gpu: bool) -> list[str]:
    try:
        wrong: list[str] = _module(of).judge(case, engine, results, gpu=gpu)
    except Exception as error:  # a mistake in the reference fails the case, not the run
        return [f"the reference: {type(error).__name__}: {error}"]
    return wrong


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def run_part(seeds: Sequence[int], of: str, workers: int, largest: int | None, without: Sequence[str], seconds: float) -> Summary:
    """Compute and judge these cases."""
    with _pool(workers) as pool:
        return Part(of, pool, workers, largest, without).run(seeds, seconds)


def run(options: argparse.Namespace) -> Summary:
    """All cases, in as many processes as the options say; none but this one where that is one."""
    seeds, count = range(options.seed, options.seed + options.cases), options.processes
    rest = (options.of, options.workers, options.largest, options.without, options.seconds)
    if count == 1:
        return run_part(seeds, *rest)
    whole = Summary()
    pools = [_pool(1) for _ in range(count)]  # one each, so that a process that dies takes no other's results with it
    parts = [pool.submit(run_part, seeds[index::count], *rest) for index, pool in enumerate(pools)]
    for index, part in enumerate(parts):
        if isinstance(part.exception(), BrokenProcessPool):
            whole.dead.append(f"{seeds[index]}, {seeds[index] + count}, …")
        else:
            whole.add(part.result())
    for pool in pools:
        pool.shutdown()
    return whole


def show(done: Summary, seeds: range, took: float) -> None:
    where = "GPU" if done.gpu else "CPU"
    print(f"seeds {seeds[0]} to {seeds[-1]}: {done.count} cases in {took:.0f} s on the {where}, {len(done.failures)} failed")
    for engine, number in done.engines.most_common():
        failed = sum(each == engine for each in done.failures.values())
        parts = f"{done.gradients[engine]:5} of them with gradients, {failed:3} failed, {done.seconds[engine]:6.1f} s"
        print(f"  {engine:16} {number:6} cases, {parts}")
    print("  the slowest:", ", ".join(f"{seed} ({seconds:.1f} s)" for seconds, seed in sorted(done.slowest, reverse=True)[:SLOWEST]))
    if done.left_out:
        print(f"  {done.left_out} more were of other engines, and left out")
    if done.skipped:
        print(f"  {done.skipped} cases were not computed: too many failures before them, or no time left")
    for seeds_of_it in done.dead:
        print(f"  the process of the seeds {seeds_of_it} died")
    if done.failures:
        print("failing seeds:", *sorted(done.failures))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1, with the seeds, where a case fails."""
    options = parse(arguments)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # of the workers: each has a core
    began = time.monotonic()
    done = run(options)
    if options.only is not None:
        print(_draw(options.of, options.only, options.largest))
    show(done, range(options.seed, options.seed + options.cases), time.monotonic() - began)
    return 1 if done.failures or done.dead or not done.count else 0


if __name__ == "__main__":
    sys.exit(main())
