"""Calls of the CUDA driver that fail for want of memory, each in turn: ``python -m tests.gpu.driver_faults``.

In prompts, steps, batches and batches that others join and leave, the first allocation fails, then the second, and so on; likewise the
launches and instantiations of graphs, which is what MLX's commits are made of. After each, a call of the model has raised or its result
is right, and everything is right when it is done once more.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
KINDS = {"allocations": 1, "graphs": 2}
POINTS = 200
TOLERANCE = 6e-2


def preloaded(arguments: list[str], *, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """This program with the driver's calls in its hands."""
    compiler = shutil.which("cc") or sys.exit("driver_faults: there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "driver_faults.so")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        command = [sys.executable, "-m", "tests.gpu.driver_faults", "--preloaded", *arguments]
        return subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, timeout=timeout, check=False)


class Trial:
    """One model, what its calls give when nothing fails, and the calls' outcomes when something does."""

    def __init__(self, points: int) -> None:
        import mlx.core as mx
        import mlx_cuda
        from mlx.utils import tree_map

        from .decoding_model import Model

        self.mx, self.points = mx, points
        self.driver = ctypes.CDLL(None)
        self.driver.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long]
        self.driver.faults_counted.restype = ctypes.c_long
        mx.random.seed(1)
        self.model = Model()
        self.model.update(tree_map(lambda w: w.astype(mx.bfloat16), self.model.parameters()))
        mx.eval(self.model.parameters())
        self.words = mx.random.randint(20, 500, (3, 64))
        mx.eval(self.words)
        self.scenarios: dict[str, Callable[[Callable[[Any], None]], None]] = {
            "prompt": self.prompt, "steps": self.steps, "batch": self.batch, "pages": self.pages,
        }  # fmt: skip
        self.expected = {name: self.run(name) for name in self.scenarios}  # by MLX itself
        mlx_cuda.patch()
        mx.set_cache_limit(0)  # each array is an allocation of the driver's

    def run(self, name: str) -> list[Any]:
        """The logits of each of the model's calls, on the host; where one raises, of those before."""
        found: list[Any] = []

        def seen(logits: Any) -> None:
            import numpy as np

            logits = logits.astype(self.mx.float32)
            self.mx.eval(logits)  # here, as NumPy takes an error for another kind of object
            found.append(np.array(logits))

        self.outcome = ""
        try:
            self.scenarios[name](seen)
        except Exception as error:
            self.outcome = f"{type(error).__name__}: {error}"
        return found

    def caches(self) -> list[Any]:
        from .decoding_model import caches_of

        return caches_of(self.model)

    def prompt(self, seen: Callable[[Any], None]) -> None:
        cache = self.caches()
        for part in (self.words[:1, :24], self.words[:1, 24:48]):
            seen(self.model(part, cache=cache))

    def steps(self, seen: Callable[[Any], None]) -> None:
        cache = self.caches()
        logits = self.model(self.words[:1, :11], cache=cache)
        for i in range(11, 18):
            token = self.words[:1, i : i + 1] + (logits[:, -1:, 0] != logits[:, -1:, 0])  # which waits for the logits before
            logits = self.model(token.astype(self.mx.int32), cache=cache)
            if i % 2:
                seen(logits)

    def batch(self, seen: Callable[[Any], None]) -> None:
        from .decoding_model import merged

        cache = merged(self.model, [self.words[i : i + 1, :length] for i, length in enumerate((11, 4, 7))])
        for i in range(11, 17):
            token = self.words[:, i : i + 1] * self.mx.array(1)  # computed when the step is
            seen(self.model(token, cache=cache))

    def pages(self, seen: Callable[[Any], None]) -> None:
        from .decoding_model import of_changing_size

        def step(tokens: Any, cache: list[Any]) -> Any:
            logits = self.model(tokens + self.mx.array(0), cache=cache)
            seen(logits)
            return logits

        of_changing_size(self.model, self.words, step)

    def wrong(self, name: str, found: list[Any]) -> str:
        """Which of the results is not what it should be."""
        import numpy as np

        for index, (one, other) in enumerate(zip(found, self.expected[name], strict=False)):
            error = np.linalg.norm(one - other) / np.linalg.norm(other)
            if not error < TOLERANCE:
                return f"call {index}: relative error {error:.2g}"
        return ""

    def fail_each(self, name: str, kinds: int) -> tuple[Counter[str], list[str]]:
        """One call of the driver after the other fails in a scenario: what came of it, and what is wrong."""
        counts: Counter[str] = Counter()
        faults = []
        for point in range(self.points):
            self.driver.faults_arm(kinds, point)
            found, outcome = self.run(name), self.outcome
            hit = self.driver.faults_counted() > point
            self.driver.faults_arm(0, 0)
            if wrong := self.wrong(name, found):
                faults.append(f"{name}, point {point}: {wrong} ({outcome or 'nothing was raised'})")
            counts["raised" if outcome else "right" if hit else "not reached"] += 1
            again = self.run(name)
            if (wrong := self.wrong(name, again)) or self.outcome or len(again) != len(self.expected[name]):
                faults.append(f"{name}, after point {point} ({outcome}): {wrong or self.outcome or 'results are missing'}")
            if not hit:
                break
        return counts, faults


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.driver_faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=POINTS, help="how many calls of the driver fail in turn (default: %(default)s)")
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="one of prompt, steps, batch, pages")
    args = parser.parse_args(arguments)
    if not args.preloaded:
        done = preloaded(arguments)
        sys.stdout.write(done.stdout)
        return done.returncode
    trial, faults = Trial(args.points), []
    for name in trial.scenarios:
        if args.only in {None, name}:
            for kind, bits in KINDS.items():
                counts, found = trial.fail_each(name, bits)
                faults += found
                print(f"{name}, {kind}: {dict(counts)}, wrong: {len(found)}", flush=True)
    print("\n".join(faults[:40]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
