"""Compile what the store lacks: NVRTC, then ptxas for each GPU, then one fatbin a source, on as many cores as there are."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CheckFailed, EnvironmentProblem
from . import compilers, manifest, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .store import Store


@dataclass(frozen=True)
class Step:
    """Something to compile, and the steps whose results it needs."""

    title: str
    key: str
    source: plan.Source
    architecture: str = ""  # of machine code or PTX; of neither: the fatbin
    front: str = ""  # of machine code: the key of its PTX
    needs: tuple[str, ...] = field(default=())

    @property
    def rank(self) -> int:
        """PTX comes first, since others wait for it; a fatbin, once its code is there, before the code of shorter sources."""
        return 1 if not self.architecture else 2 if self.front else 0


def steps(source: plan.Source) -> list[Step]:
    """All steps of a source."""
    fronts = sorted({*source.fronts.values(), *source.targets.ptx})
    made = [Step(f"{source.path.name} compute_{each}", source.ptx_key(each), source, each) for each in fronts]
    for each in source.targets.sass:
        front = source.ptx_key(source.fronts[each])
        made.append(Step(f"{source.path.name} sm_{each}", source.sass_key(each), source, each, front, (front,)))
    return [*made, Step(f"{source.name}.fatbin", source.fatbin_key, source, needs=tuple(step.key for step in made))]


def perform(step: Step, using: compilers.Tools, store: Store) -> tuple[float, int]:
    """Do one step, in a process of its own; returns its seconds and the size of the result."""
    start = time.monotonic()

    def load(key: str) -> bytes:
        data = store.get(key)
        if data is None:
            raise CheckFailed(f"{step.title}: the store {store.folder} has lost an entry while it was in use; build again")
        return data

    if step.rank == 0:
        data = compilers.compile_ptx(using, step.source.path, step.architecture, plan.SRC, plan.OPTIONS)
    elif step.front:
        data = compilers.assemble(using, load(step.front), step.architecture)
    else:
        sass = {each: load(step.source.sass_key(each)) for each in step.source.targets.sass}
        ptx = {each: load(step.source.ptx_key(each)) for each in step.source.targets.ptx}
        data = compilers.NvFatbin(using.nvfatbin).pack(step.source.path.name, sass, ptx)
    store.put(step.key, data)
    return time.monotonic() - start, len(data)


def build(sources: Sequence[plan.Source], output: Path, store: Store) -> manifest.Manifest:
    """Put the fatbins and their manifest into ``output``, compiling only what the store lacks."""
    fatbins = {source.name: data for source in sources if (data := store.get(source.fatbin_key)) is not None}
    if lacking := [source for source in sources if source.name not in fatbins]:
        try:
            compile_all([step for source in lacking for step in steps(source) if store.get(step.key) is None], store)
        except OSError as error:
            raise EnvironmentProblem(f"the store of device code cannot be written: {error}", cure="MLX_CUDA_DEVICE_STORE=off") from None
        for source in lacking:
            fatbins[source.name] = store.get(source.fatbin_key) or b""
        store.prune()
    return manifest.write(output, sources, fatbins)


def compile_all(todo: Sequence[Step], store: Store, report: Callable[[str], None] | None = None) -> None:
    """Do the steps, each once those that it needs are done; the first failure ends it, with every compiler's words that came by then."""
    using = compilers.tools()
    report = report or (lambda line: print(line, file=sys.stderr, flush=True))
    waiting = {step.key: step for step in todo}
    # Steps that others wait for come first, the long ones before the short: how long PTX is tells it well.
    size = {step.key: sum(path.stat().st_size for path in (step.source.path, *step.source.headers)) for step in todo}
    running: dict[Future[tuple[float, int]], Step] = {}
    failures: list[str] = []
    done = 0
    jobs = parallel()
    report(f"device code: {len(todo)} steps, {jobs} at a time")
    with ProcessPoolExecutor(jobs) as pool:
        while waiting or running:
            ready = [] if failures else [step for step in waiting.values() if not any(need in waiting for need in step.needs)]
            in_flight = {step.key for step in running.values()}
            ready = [step for step in ready if not any(need in in_flight for need in step.needs)]
            for step in sorted(ready, key=lambda step: (step.rank, -size.get(step.front or step.key, 0)))[: jobs - len(running)]:
                running[pool.submit(perform, step, using, store)] = waiting.pop(step.key)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step = running.pop(future)
                try:
                    seconds, bytes_ = future.result()
                except CheckFailed as error:
                    failures.append(str(error))
                except BrokenProcessPool:
                    failures.append(f"{step.title}: the compiler's process has ended; is there enough memory?")
                else:
                    done += 1
                    size[step.key] = bytes_
                    report(f"[{done:>{len(str(len(todo)))}}/{len(todo)}] {step.title} {seconds:.1f} s")
    if failures:
        raise CheckFailed("\n".join(failures))


def parallel() -> int:
    """How many compilers at once: as CMAKE_BUILD_PARALLEL_LEVEL says, else one for each core."""
    asked = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
