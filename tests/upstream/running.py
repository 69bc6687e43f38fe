"""Runs modules of tests, each in a process of its own, several at once; a crash or a hang of one costs the test that was running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

SUITE = Path(__file__).with_name("suite.py")
ATTEMPTS = 6  # processes for a module on one side: each but the last ends in a crash or a hang
POLL = 0.05  # seconds
OVER = "timeout: the time for all tests is over"
# As MLX's mlx_tests.py sets them for itself, which is too late where patch() imports MLX first.
SETTINGS = {"mlx": {"MLX_ENABLE_TF32": "0", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}}


class Outcome(NamedTuple):
    """``what`` is one of pass, fail, error, skip, xfail, xpass, as unittest has them, or crash, timeout, not run."""

    what: str
    detail: str = ""


class Job(NamedTuple):
    suite: str  # mlx or mlx-lm
    module: str
    patched: bool
    part: tuple[int, int] = (0, 1)  # which of how many parts of its tests
    patterns: tuple[str, ...] = ()  # of ids of tests; none: all of them
    only: frozenset[str] | None = None  # ids
    again: int = 0  # which repetition

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.module}"

    @property
    def unit(self) -> str:
        """The module, or its part, on either side."""
        number, parts = self.part
        return f"{self.name} {number + 1}/{parts}" if parts > 1 else self.name

    @property
    def side(self) -> str:
        return "with" if self.patched else "without"

    def process(self, what: str) -> str:
        """What stands for a test where a process cannot begin or end: ``import``, ``exit``."""
        return f"{self.unit.partition('/')[2]} ({what})"


@dataclass
class Ran:
    """What came of a job."""

    job: Job
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by test
    seconds: float = 0.0
    whole: bool = False  # not when the time for all was over before


@dataclass
class Process:
    """What a process wrote, as far as it came."""

    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: str = ""
    ended: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def hear(self, line: str) -> None:
        said = json.loads(line)
        self.collected = said.get("collected", self.collected)
        self.running = said.get("start", self.running)
        self.ended = said.get("end", self.ended)
        self.facts = said.get("facts", self.facts)
        if "test" in said:
            self.outcomes[said["test"]] = Outcome(said["outcome"], said["detail"])
            self.running = ""


@dataclass(frozen=True)
class Compiled:
    """What MLX has compiled, handed from processes that have ended to those that begin: two at once would read each other's half."""

    NAME: ClassVar[str] = "mlx"  # MLX's folder in that for temporary files
    folder: Path
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def give(self, folder: Path) -> None:
        self._link(self.folder, folder)

    def take(self, folder: Path) -> None:
        self._link(folder, self.folder)

    def _link(self, source: Path, target: Path) -> None:
        with self._alone:
            for file in source.rglob("*"):
                path = target / file.relative_to(source)
                if file.is_file() and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.hardlink_to(file)


@dataclass(frozen=True)
class Machine:
    """How the processes are started here."""

    folder: Path  # with the folders mlx and mlx-lm of tests
    timeout: float  # seconds of a test
    jobs: int  # processes at once
    until: float = float("inf")  # time.monotonic() after which nothing runs
    environment: Mapping[str, str] = field(default_factory=dict)
    compiled: Compiled | None = None

    def facts(self) -> dict[str, Any]:
        """Of the packages and the device; empty where they cannot be imported, which is on stderr then."""
        with tempfile.TemporaryDirectory(prefix="mlx-cuda-upstream-") as name:
            process, ending = self._process(Path(name), None)
        if not process.facts:
            sys.stderr.write(f"{ending}\n")
        return process.facts

    def run(self, jobs: Iterable[Job], told: Callable[[Ran], None]) -> list[Ran]:
        """All of them in their order; ``told`` hears of each."""
        done = []
        with ThreadPoolExecutor(self.jobs) as pool:
            for future in as_completed([pool.submit(self.one, job) for job in jobs]):
                done.append(future.result())
                told(done[-1])
        return done

    def one(self, job: Job) -> Ran:
        ran, began, left = Ran(job), time.monotonic(), job.only
        if began > self.until:
            return ran
        for _ in range(ATTEMPTS):
            with tempfile.TemporaryDirectory(prefix="mlx-cuda-upstream-", ignore_cleanup_errors=True) as name:
                process, ending = self._process(Path(name), job, left)
            collected = process.collected if left is None else [test for test in process.collected if test in left]
            found = judged(process, job, ending).items()
            told = {test: outcome._replace(detail=outcome.detail.replace(f"{self.folder}{os.sep}", "")) for test, outcome in found}
            ran.outcomes |= dict.fromkeys(collected, Outcome("not run")) | told
            left = frozenset(test for test in collected if ran.outcomes[test].what == "not run")
            if not ending or not left or time.monotonic() > self.until:
                break
        ran.seconds = round(time.monotonic() - began, 1)
        ran.whole = time.monotonic() < self.until
        return ran

    def _process(self, work: Path, job: Job | None, only: Collection[str] | None = None) -> tuple[Process, str]:
        """Run one process to its end; gives what it wrote, and how it ended where not as it should: a reason, and the end of its log."""
        request = work / "request.json"
        report, log = work / "report", work / "log"
        told: dict[str, Any] = {"report": str(report), "patience": self.timeout * 0.9, "module": None}
        if job:
            told |= {"folder": str(self.folder / job.suite), "module": job.module, "patch": job.patched}
            told |= {"part": job.part, "patterns": job.patterns, "only": None if only is None else sorted(only)}
        request.write_text(json.dumps(told), "utf-8")
        report.touch()
        temporary = work / "tmp"
        temporary.mkdir()
        if self.compiled:
            self.compiled.give(temporary / Compiled.NAME)
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        settings = {"PYTHONHASHSEED": "0", "TMPDIR": str(temporary), "OPENBLAS_NUM_THREADS": str(threads)}
        settings |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | dict(self.environment)
        settings |= SETTINGS.get(job.suite, {}) if job else {}
        if places := os.environ.get("PYTHONPATH"):  # as this process has it, from another folder
            settings["PYTHONPATH"] = os.pathsep.join(str(Path(place).resolve()) for place in places.split(os.pathsep) if place)
        with log.open("wb") as sink, report.open(encoding="utf-8") as lines:
            child = subprocess.Popen(
                [sys.executable, str(SUITE), str(request)], cwd=temporary, env=os.environ | settings, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                process, reason = self._follow(child, lines)
            finally:
                _kill(child)
        if self.compiled and not reason:
            self.compiled.take(temporary / Compiled.NAME)
        return process, f"{reason}\n{_tail(log)}".strip() if reason else ""

    def _follow(self, child: subprocess.Popen[bytes], lines: IO[str]) -> tuple[Process, str]:
        process, part, heard = Process(), "", time.monotonic()
        while True:
            code, now = child.poll(), time.monotonic()
            while line := lines.readline():  # to the end of what is written so far
                part, heard = part + line, now
                if part.endswith("\n"):
                    process.hear(part)
                    part = ""
            if code is not None:
                return process, "" if code == 0 else _named(code)
            if now > self.until:
                return process, OVER
            if now - heard > self.timeout:
                return process, f"timeout: nothing for {self.timeout:g} s"
            time.sleep(POLL)


def judged(process: Process, job: Job, ending: str) -> dict[str, Outcome]:
    """The outcomes of a process: those that it wrote, and whose fault it is that there are no others."""
    outcomes: dict[str, Outcome] = {}
    for test, outcome in process.outcomes.items():
        place = test.partition("(")[2].rstrip(")") if test not in process.collected else ""
        own = [each for each in process.collected if place and each.startswith(f"{place}.") and each not in process.outcomes]
        outcomes |= dict.fromkeys(own, outcome) or {test: outcome}  # a class or a module that could not begin has not run its tests
    if ending:
        what = ending.partition(":")[0]
        place = process.running or (job.process("exit") if process.ended else "" if process.collected else job.process("import"))
        # Between two tests: that which would have come next.
        place = place or next((test for test in process.collected if test not in outcomes), job.process("exit"))
        outcomes[place] = Outcome(what, ending)
    return outcomes


def _named(code: int) -> str:
    try:
        return f"crash: {signal.Signals(-code).name}" if code < 0 else f"crash: exit code {code}"
    except ValueError:
        return f"crash: signal {-code}"


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace").strip()[-1500:]


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started."""
    if os.name == "nt":
        child.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
