"""What MLX and torch compile at a first call, compiled beforehand in several processes at once.

MLX compiles some of its kernels when they are first called, those of its quantized matmuls for 15 to 20 seconds each, and keeps them on
disk for later processes; torch does so with FlexAttention. One after another that takes several times as long as all the measuring.

Each process compiles into a folder of its own and hands over what is complete: MLX writes its files in place, where another process would
read half of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case

CACHE = "MLX_PTX_CACHE_DIR"  # where MLX keeps what it has compiled
MOST_PROCESSES = 16
SECONDS = 300.0  # for one case; whoever takes longer is ended
SIZES = frozenset(("length", "batch", "rows", "m", "total", "sequences", "page_size", "columns", "bytes", "operations", "steps", "seconds"))


@dataclass(frozen=True)
class Job:
    """One of several cases that need the same kernels, by its place in its group."""

    group: str
    index: int
    name: str
    slow: bool  # it is to begin before the others

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}"


def cache_folder() -> Path:
    """MLX's own, for this version."""
    if CACHE in os.environ:
        return Path(os.environ[CACHE])
    return Path(tempfile.gettempdir()) / "mlx" / metadata.version("mlx") / "ptx"


def default_processes() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_PROCESSES, count)


def jobs_of(groups: Iterable[str], cases: Callable[[str], Sequence[Case]]) -> list[Job]:
    """One job for all cases whose kernels are the same, the slow ones first.

    A case may say with ``kernels`` what those depend on that take long; otherwise it is all of its parameters but sizes.
    """
    jobs: dict[Any, Job] = {}
    for group in groups:
        for index, case in enumerate(cases(group)):
            stated = getattr(case, "kernels", None)
            rest = tuple((name, value) for name, value in case.parameters().items() if name not in SIZES)
            slow = stated is not None or bool(case.parameters().get("flex"))
            jobs.setdefault((group, stated or rest), Job(group, index, case.name, slow))
    return sorted(jobs.values(), key=lambda job: not job.slow)


def prepare_all(
    jobs: Sequence[Job], processes: int, report: Callable[[str], None], *, quick: bool, torch: bool, work: Callable[..., None] | None = None
) -> list[Job]:
    """Do the jobs in so many processes; a process that ends costs its job alone. Returns the jobs that failed."""
    shared = cache_folder()
    shared.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failed: list[Job] = []
    done = 0
    lock = threading.Lock()

    def finish(job: Job, text: str, *, well: bool) -> None:
        nonlocal done
        with lock:
            done += 1
            if not well:
                failed.append(job)
            report(f"{done} of {len(jobs)}: {job.title}: {text}")

    def keep_busy(number: int) -> None:
        process: Worker | None = None
        with tempfile.TemporaryDirectory(prefix=f".{number}-", dir=shared.parent, ignore_cleanup_errors=True) as own:
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    break
                process = process or Worker(Path(own), quick=quick, torch=torch, work=work or serve)
                hand_over(shared, Path(own))
                try:
                    well, text = process.do(job)
                except (EOFError, OSError, TimeoutError) as error:
                    well, text = False, f"FAILED: its process {'took too long' if isinstance(error, TimeoutError) else 'has ended'}"
                hand_over(Path(own), shared)
                finish(job, text, well=well)
                if not well:  # an error of the device stays with the process that had it
                    process.end()
                    process = None
            if process:
                process.end()

    threads = [threading.Thread(target=keep_busy, args=(number,), daemon=True) for number in range(min(processes, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


class Worker:
    """A process that prepares cases, one after another."""

    def __init__(self, own: Path, *, quick: bool, torch: bool, work: Callable[..., None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, str(own), quick, torch), daemon=True)
        self.process.start()
        other.close()  # or its end would not be noticed here

    def do(self, job: Job) -> tuple[bool, str]:
        self.connection.send((job.group, job.index))
        if not self.connection.poll(SECONDS):
            raise TimeoutError
        well, text = self.connection.recv()
        return bool(well), str(text)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def serve(connection: Connection, own: str, quick: bool, torch: bool) -> None:
    """What a worker does: each case that it is sent, until there is none."""
    import time

    os.environ[CACHE] = own  # before MLX compiles anything
    from .cases import GROUPS
    from .measuring import import_torch, summary
    from .timing import TorchEngine

    module = import_torch(lambda _: None, wanted=torch)  # `run` says why, where it is not there
    engine = TorchEngine(module) if module else None
    while (job := connection.recv()) is not None:
        group, index = job
        start = time.monotonic()
        outcome = call_once(group, GROUPS[group](quick=quick)[index], engine)
        text = summary(outcome) if outcome.error else f"{time.monotonic() - start:.1f} s"
        connection.send((not outcome.error, text))


def call_once(group: str, case: Case, torch: Any) -> Any:
    """Check the case, which compiles what MLX's sides and the check need, and call the other libraries' sides."""
    from .measuring import check
    from .record import CaseResult

    header: dict[str, Any] = {"group": group, "name": case.name, "unit": case.unit, "work": case.work, "parameters": {}}
    try:
        prepared = case.prepare(torch)
        check(case, prepared, header)
    except Exception as error:
        return CaseResult(**header, error=f"{type(error).__name__}: {error}")
    for side in prepared.sides if prepared.measure is None else ():
        with contextlib.suppress(Exception):  # it will have no time either, and an error in its place
            side.batch(1)
    return CaseResult(**header)


def hand_over(source: Path, target: Path) -> int:
    """Link the files that the other folder lacks, what MLX looks for last. Returns how many there were."""
    found = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.suffix == ".ptx")
    count = 0
    for path in found:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(path, place)
            count += 1
    return count
