"""``mlx_cuda.check``: run the processes, and judge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from .._common.errors import quote
from . import judge, processes
from .forms import ModelCheck, Side, SideName, Task

SHOWN = {"upstream": "MLX alone", "patched": "with patch()", "float32": "in float32"}


def check(model: str | os.PathLike[str], *, quick: bool = False, progress: Callable[[float, str], None] | None = None) -> ModelCheck:
    """Run a model with and without :func:`patch`, and compare results, speed and kernels.

    Args:
        model: A model folder, or a name on Hugging Face, as mlx-lm loads it.
        quick: Use shorter texts and fewer answers, which takes less time and finds less.
        progress: Called with the share that is done, from 0 to 1, and the next step.

    Returns:
        A :class:`ModelCheck`, as ``python -m mlx_cuda check`` prints it. ``ok`` is false if a result with :func:`patch` is wrong.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: mlx-lm cannot load the model; the message names a fix.
        RuntimeError: The model does not run on MLX alone.

    Three processes run one after the other: MLX alone, MLX with :func:`patch`, and the model in float32, which decides whether differing
    tokens are wrong. They share the GPU's memory with the arrays of this process.
    """
    began, name = time.perf_counter(), os.fspath(model)
    processes.require_mlx_lm()
    processes.require_model(name)
    run = _Runs(name, quick=quick, progress=progress or (lambda *_: None))
    upstream = run("upstream")
    if failed := upstream["errors"].get("prompt"):
        raise RuntimeError(f"[check] The model does not run on MLX alone: {failed}\n  fix: python -m mlx_lm generate --model {quote(name)}")
    crashes: dict[SideName, str] = {}
    patched, float32 = run.or_crash("patched", crashes), run.or_crash("float32", crashes)
    run.progress(1.0, "")
    return judge.judge(name, upstream, patched, float32, quick=quick, seconds=time.perf_counter() - began, crashes=crashes)


class _Runs:
    """The processes that have run, and their progress."""

    def __init__(self, model: str, *, quick: bool, progress: Callable[[float, str], None]) -> None:
        self.progress, self._done = progress, 0
        self._task: Task = {"side": "upstream", "model": model, "quick": quick, "upstream": {}, "patched": {}}

    def __call__(self, side: SideName) -> Side:
        first = self._done

        def begin(part: str) -> None:
            self.progress(self._done / sum(processes.PARTS.values()), f"{SHOWN[side]}: {part}")
            self._done += 1

        try:
            found = processes.run({**self._task, "side": side}, begin)
        except processes.CannotLoad as error:
            fix = processes.fix_of(self._task["model"], str(error))
            raise ValueError(f"[check] mlx-lm does not load {self._task['model']}: {error}\n  fix: {fix}") from error
        except processes.SideFailed as error:
            if side == "upstream":
                raise RuntimeError(f"[check] The model does not run on MLX alone: {error}\n  fix: python -m mlx_cuda doctor") from error
            raise
        finally:
            self._done = first + processes.PARTS[side]
        if side != "float32":
            self._task[side] = found
        return found

    def or_crash(self, side: SideName, crashes: dict[SideName, str]) -> Side:
        """Run a side; return nothing, and report the crash, if its process ended without a result."""
        try:
            return self(side)
        except (processes.SideFailed, ValueError) as error:
            crashes[side] = str(error)
            return {}
