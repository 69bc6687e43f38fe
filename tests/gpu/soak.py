"""Thousands of random cases of attention in one run: ``python -m tests.gpu.soak --cases 10000 --seed 0``.

A case is its seed; ``--only SEED`` repeats one, and so does ``MLX_CUDA_FUZZ_SEED=SEED pytest tests/gpu/test_fuzz.py -k attention``.
MLX computes here, one case after another; worker processes compute what is right and compare.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from . import cases

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from .trials import Outcome

WAITING = 4  # results for each worker that may wait to be judged
ENOUGH = 50  # failures after which the rest tells nothing new
AFTER_A_CRASH = 5  # exceptions in a row: the device does not answer any more


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.soak", description="Random cases of attention against float64.")
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="one case, with what it is")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--largest", type=int, default=cases.SCORES, help="scores of one case, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    return parser.parse_args(arguments)


class Soak:
    """The run so far."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int, largest: int, gpu: bool) -> None:
        self.pool, self.most_waiting, self.largest, self.gpu = pool, WAITING * workers, largest, gpu
        self.engines: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.failures: dict[int, str] = {}
        self.crashes = 0
        self._waiting: deque[tuple[cases.Case, Outcome, Future[list[str]]]] = deque()

    def run(self, seeds: Iterable[int], until: float) -> int:
        """Compute the cases, as many as there is time for; how many those were."""
        count = 0
        for seed in seeds:
            if len(self.failures) >= ENOUGH or self.crashes >= AFTER_A_CRASH or time.monotonic() > until:
                break
            self._compute(seed)
            count += 1
            while len(self._waiting) > self.most_waiting:
                self._collect()
        while self._waiting:
            self._collect()
        return count

    def _compute(self, seed: int) -> None:
        from . import trials

        case = cases.draw(seed, most=self.largest)
        try:
            outcome = trials.compute(case)
        except Exception as error:
            self.crashes += 1
            self._fail(case, "", [f"{type(error).__name__}: {error}"])
            return
        self.crashes = 0
        self.engines[outcome.engine] += 1
        self.gradients[outcome.engine] += case.gradient
        self._waiting.append((case, outcome, self.pool.submit(_judge, case, outcome.engine, outcome.results, self.gpu)))

    def _collect(self) -> None:
        case, outcome, verdict = self._waiting.popleft()
        if wrong := verdict.result():
            self._fail(case, outcome.engine, wrong)

    def _fail(self, case: cases.Case, engine: str, wrong: list[str]) -> None:
        self.failures[case.seed] = engine
        print(f"seed {case.seed}: {'; '.join(wrong)}\n    {engine or 'no engine'}: {case}", flush=True)


def _judge(case: cases.Case, engine: str, results: dict[str, Any], gpu: bool) -> list[str]:
    return cases.judge(case, engine, results, gpu=gpu)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1, with the seeds, where a case fails."""
    options = parse(arguments)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # of the workers: each has a core
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawning) as pool:
        import mlx.core as mx

        gpu = mx.cuda.is_available()
        soak = Soak(pool, options.workers, options.largest, gpu)
        seeds = range(options.seed, options.seed + options.cases) if options.only is None else [options.only]
        began = time.monotonic()
        count = soak.run(seeds, began + options.seconds)
        took = time.monotonic() - began
    if options.only is not None:
        print(cases.draw(options.only, most=options.largest))
    last = seeds[count - 1] if count else options.seed
    print(f"seeds {seeds[0]} to {last}: {count} cases in {took:.0f} s on the {'GPU' if gpu else 'CPU'}, {len(soak.failures)} failed")
    for engine, number in soak.engines.most_common():
        failed = sum(each == engine for each in soak.failures.values())
        print(f"  {engine:16} {number:6} cases, {soak.gradients[engine]:5} of them with gradients, {failed:3} failed")
    if soak.failures:
        print("failing seeds:", *sorted(soak.failures))
    return 1 if soak.failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
