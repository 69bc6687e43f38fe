"""Compile what the store lacks: NVRTC, then ptxas for each GPU, then one packed fatbin a source, on as many cores as there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from ..errors import CheckFailed, EnvironmentProblem
from ..matrix import newest_first
from . import compilers, manifest, packed, plan
from .store import Store


@dataclass(frozen=True)
class Step:
    """Something to compile, and the steps whose results it needs."""

    title: str
    key: str
    source: plan.Source
    architecture: str = ""  # of SASS or PTX; of neither: the fatbin
    front: str = ""  # of SASS: the key of its PTX
    needs: tuple[str, ...] = ()

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


def loaded(store: Store, key: str, title: str) -> bytes:
    """An entry that was there a moment ago."""
    data = store.get(key)
    if data is None:
        raise CheckFailed(f"{title}: the store {store.folder} has lost an entry while it was in use; build again")
    return data


def check_unchanged(sources: Sequence[plan.Source]) -> None:
    """Keys are of the files as they were before: what was compiled of others must not be kept under them."""
    if changed := [source.path.name for source in sources if replace(source).inputs != source.inputs]:
        raise CheckFailed(f"{', '.join(changed)}, or a header of it, has changed while it was compiled; build again")


def whole_cubin(image: bytes, title: str) -> bytes:
    """The image, an ELF file. Where the disk is full, ptxas leaves a part of one, or nothing, and no error."""
    if image.startswith(b"\x7fELF") and len(image) >= 64:
        segments, sections = struct.unpack_from("<QQ", image, 32)  # where their tables begin; one of them is the last thing in the file
        segment, segment_count, section, section_count = struct.unpack_from("<4H", image, 54)
        if max(segments + segment * segment_count, sections + section * section_count) <= len(image):
            return image
    raise EnvironmentProblem(f"{title}: ptxas has not written all of its result", fix=f"free space in {tempfile.gettempdir()}")


def perform(step: Step, using: compilers.Tools, store: Store) -> tuple[float, int]:
    """Do one step; returns its seconds and the size of the result."""
    start = time.monotonic()

    def load(key: str) -> bytes:
        return loaded(store, key, step.title)

    if step.rank == 0:
        data = compilers.compile_ptx(using, step.source.path, step.architecture, step.source.root, plan.OPTIONS)
        check_unchanged([step.source])
    elif step.front:
        data = whole_cubin(compilers.assemble(using, load(step.front), step.architecture, step.source.path.name), step.title)
    else:
        sass = {each: load(step.source.sass_key(each)) for each in newest_first(step.source.targets.sass)}
        ptx = {each: load(step.source.ptx_key(each)) for each in newest_first(step.source.targets.ptx)}
        data = packed.pack(compilers.NvFatbin(using.nvfatbin).pack(step.source.path.name, sass, ptx))
    store.put(step.key, data)
    return time.monotonic() - start, len(data)


def _end(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the pool sends another, into the midst of cleaning up
    raise SystemExit(1)


def _begin_worker() -> None:
    """In a worker: Ctrl-C reaches it too, but it is the parent that ends it, and by a signal that lets it clean up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)


def _work(step: Step, using: compilers.Tools, store: Store) -> tuple[float, int]:
    try:
        return perform(step, using, store)
    except SystemExit:  # the pool would hand it to the parent, and wait for the next step
        os._exit(1)


def end_workers() -> None:
    """End all of them, and what they started; one that is inside NVRTC hears no signal but the last, and has no file open."""
    for end in (multiprocessing.Process.terminate, multiprocessing.Process.kill):
        workers = multiprocessing.active_children()
        for worker in workers:
            end(worker)
        limit = time.monotonic() + 2
        for worker in workers:
            worker.join(max(0, limit - time.monotonic()))


def build(sources: Sequence[plan.Source], output: Path, store: Store) -> manifest.Manifest:
    """Write the fatbins and their manifest into ``output``. Only what the store lacks is compiled."""
    fatbins = {source.name: data for source in sources if (data := store.get(source.fatbin_key)) is not None}
    if lacking := [source for source in sources if source.name not in fatbins]:
        if todo := [step for source in lacking for step in steps(source) if store.get(step.key) is None]:  # else another build was faster
            compile_all(todo, store)
        fatbins |= {source.name: loaded(store, source.fatbin_key, source.name) for source in lacking}
        store.prune()
        check_unchanged(sources)  # a manifest that is newer than an edit would pass for one that knows it
    return manifest.write(output, sources, fatbins)


def compile_all(todo: Sequence[Step], store: Store) -> None:
    """Do the steps, each once those that it needs are done; the first failure ends it, with every compiler's words that came by then."""
    using = compilers.tools()
    waiting = {step.key: step for step in todo}
    # Steps that others wait for come first, the long ones before the short: how long PTX is tells it well.
    size = {step.key: sum(path.stat().st_size for path in (step.source.path, *step.source.headers)) for step in todo}
    running: dict[Future[tuple[float, int]], Step] = {}
    failures: list[str] = []
    killed: list[str] = []
    done = 0
    jobs = min(parallel(), len(todo))
    print(f"device code: {len(todo)} steps, {jobs} at a time", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(jobs, initializer=_begin_worker) as pool:
        try:
            while waiting or running:
                pending = {*waiting, *(step.key for step in running.values())}
                ready = [] if failures or killed else [step for step in waiting.values() if pending.isdisjoint(step.needs)]
                for step in sorted(ready, key=lambda step: (step.rank, -size.get(step.front or step.key, 0)))[: jobs - len(running)]:
                    running[pool.submit(_work, step, using, store)] = waiting.pop(step.key)
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    step = running.pop(future)
                    try:
                        seconds, size[step.key] = future.result()
                    except CheckFailed as error:
                        failures.append(str(error))
                    except BrokenProcessPool:  # of every step that ran then
                        killed.append(step.title)
                    except OSError as error:
                        failures.append(f"{step.title}: {error}")
                    else:
                        done += 1
                        print(f"[{done:>{len(str(len(todo)))}}/{len(todo)}] {step.title} {seconds:.1f} s", file=sys.stderr, flush=True)
        except BrokenProcessPool:  # noticed before the next step could begin
            killed += [step.title for step in running.values()]
        except BaseException:
            end_workers()
            raise
        if killed:
            end_workers()
    if killed:
        failures.append(
            f"a compiler's process was ended from outside ({', '.join(killed)}); with less memory, CMAKE_BUILD_PARALLEL_LEVEL=1"
        )
    if failures:
        raise CheckFailed("\n".join(failures))


def parallel() -> int:
    """Return the number of parallel compilers: CMAKE_BUILD_PARALLEL_LEVEL, or one for each core."""
    asked = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(asked) if asked.isdecimal() and int(asked) > 0 else cores
    return min(jobs, 61) if sys.platform == "win32" else jobs  # Windows waits for no more processes at once
