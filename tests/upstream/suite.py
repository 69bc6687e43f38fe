"""One module of tests in a process of its own: ``python suite.py REQUEST.json`` writes a line of JSON for all that happens.

It runs as a file, with any Python that has the packages under test, and imports nothing else of this repository. What it has not written
when it ends is for :mod:`running` to judge: a crash ends it at any line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import random
import sys
import time
import traceback
import unittest
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

OUTCOMES = ("pass", "xfail", "skip", "xpass", "fail", "error")  # the worst of a test and its subtests counts
DETAIL = 600  # characters of a traceback's end


class Reporter(unittest.TestResult):
    """Writes the beginning and the end of each test."""

    def __init__(self, stream: IO[str], patience: float = 0) -> None:
        super().__init__()
        self.stream, self.patience = stream, patience
        self.running = ""
        self.outcome, self.detail, self.began = "pass", "", 0.0

    def say(self, **what: Any) -> None:
        self.stream.write(json.dumps(what) + "\n")
        self.stream.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  (unittest's names)
        self.running = test.id()
        self.outcome, self.detail, self.began = "pass", "", time.monotonic()
        self.say(start=self.running)
        if self.patience:
            faulthandler.dump_traceback_later(self.patience)  # into the log, before the process is killed
        seed()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: ARG002, N802
        self.say(test=self.running, outcome=self.outcome, detail=self.detail, seconds=round(time.monotonic() - self.began, 3))
        self.running = ""

    def note(self, test: Any, outcome: str, detail: str) -> None:
        if not self.running:  # of a class or a module, in whose place unittest has an object with an id such as "setUpClass (module.Class)"
            self.say(test=test.id(), outcome=outcome, detail=detail)
        elif OUTCOMES.index(outcome) > OUTCOMES.index(self.outcome):
            self.outcome, self.detail = outcome, detail

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        pass

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.note(test, "fail", ending(err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.note(test, "error", ending(err))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            failed = issubclass(err[0], test.failureException)
            self.note(test, "fail" if failed else "error", f"{subtest.id()[len(test.id()) :].strip()}: {ending(err)}")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.note(test, "skip", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.note(test, "xfail", ending(err))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.note(test, "xpass", "")


def ending(err: Any) -> str:
    """The end of a traceback."""
    return "".join(traceback.format_exception(*err)).strip()[-DETAIL:]


def seed() -> None:
    """Give each test the same random numbers on both sides: without a seed MLX takes the time."""
    import mlx.core as mx

    random.seed(0)
    mx.random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def tests_of(suite: Any) -> list[unittest.TestCase]:
    return [test for each in suite for test in (tests_of(each) if isinstance(each, unittest.TestSuite) else [each])]


def run(request: dict[str, Any], reporter: Reporter) -> None:
    folder = request["folder"]
    sys.path[0] = folder  # in the place of this file's own
    if request["patch"]:
        import mlx_cuda

        mlx_cuda.patch()
    found = tests_of(unittest.defaultTestLoader.loadTestsFromName(request["module"]))
    only, patterns = request["only"], request["patterns"]
    chosen = [test for test in found if not patterns or any(fnmatchcase(test.id(), f"*{each}*") for each in patterns)]
    number, parts = request["part"]
    chosen = [test for test in chosen[number::parts] if only is None or test.id() in only]
    reporter.say(collected=[test.id() for test in chosen])
    unittest.TestSuite(chosen).run(reporter)

    gc.collect()  # MLX's threads that end with the interpreter abort it now and then
    if "mlx_tests" in sys.modules:  # as MLX's program of its tests ends
        import mlx.core as mx

        mx.clear_streams()
    reporter.say(end=True)


def facts() -> dict[str, Any]:
    """What is installed here, and whether ``patch()`` replaces anything."""
    from importlib.metadata import PackageNotFoundError, version

    import mlx.core as mx
    import mlx_cuda

    before = mx.fast.scaled_dot_product_attention
    mlx_cuda.patch()
    replaces = mx.cuda.is_available() and mx.fast.scaled_dot_product_attention is not before  # on a CPU ours calls MLX's
    found: dict[str, Any] = {"replaces": replaces, "python": sys.version.split()[0], "mlx-cuda": mlx_cuda.__version__}
    for package in ("mlx", "mlx-lm"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    on = mx.default_device()
    found["device"] = mx.device_info(on).get("device_name", str(on)) if hasattr(mx, "device_info") else str(on)
    return found


def main() -> None:
    faulthandler.enable()
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    with Path(request["report"]).open("w", encoding="utf-8") as stream:
        reporter = Reporter(stream, request["patience"])
        if request["module"]:
            run(request, reporter)
        else:
            reporter.say(facts=facts())


if __name__ == "__main__":
    main()
