"""``mlx_cuda.check``: run the processes, and judge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from . import judge, processes
from .forms import ModelCheck, Side, SideName, Task

SHOWN = {"upstream": "MLX by itself", "patched": "with patch()", "float32": "in float32"}


def check(model: str | os.PathLike[str], *, quick: bool = False, progress: Callable[[float, str], None] | None = None) -> ModelCheck:
    """Run a model with and without :func:`patch`, and say whether both give the same words, how fast, and which kernels ran.

    Args:
        model: The folder of a model, or a name, as mlx-lm loads it.
        quick: Whether to measure less, for a first answer.
        progress: Called with the share that is done, and what comes next.

    Returns:
        What ``python -m mlx_cuda check`` prints. ``ok`` is false where a result under :func:`patch` is wrong.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: mlx-lm does not load the model; the message names a fix.
        RuntimeError: The model does not run by MLX itself.

    Three processes run one after the other: MLX by itself, the same with :func:`patch`, and the model in float32, which says where tokens
    differ whether that is a tie. Arrays that this process has on the GPU stay there meanwhile.
    """
    began, name = time.perf_counter(), os.fspath(model)
    processes.require_mlx_lm()
    processes.require_model(name)
    run = _Runs(name, quick=quick, progress=progress or (lambda *_: None))
    upstream = run("upstream")
    if failed := upstream["errors"].get("prompt"):
        raise RuntimeError(f"[check] MLX by itself does not run the model: {failed}\n  fix: python -m mlx_lm generate --model {name}")
    crashes: dict[SideName, str] = {}
    patched, float32 = run.or_crash("patched", crashes), run.or_crash("float32", crashes)
    run.progress(1.0, "")
    return judge.judge(name, upstream, patched, float32, quick=quick, seconds=time.perf_counter() - began, crashes=crashes)


class _Runs:
    """The processes that have run, and how far that is."""

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
                raise RuntimeError(f"[check] MLX by itself does not run the model: {error}\n  fix: python -m mlx_cuda doctor") from error
            raise
        finally:
            self._done = first + processes.PARTS[side]
        if side != "float32":
            self._task[side] = found
        return found

    def or_crash(self, side: SideName, crashes: dict[SideName, str]) -> Side:
        """The same; nothing where the process has ended without a result, which is a finding."""
        try:
            return self(side)
        except (processes.SideFailed, ValueError) as error:
            crashes[side] = str(error)
            return {}
