"""``python -m tests.upstream``: MLX's and mlx-lm's own tests, with and without ``patch()``.

`run` takes both sides of each module, several at once, each in a process of its own, and fails on a test that passes without patch() and
not with it, unless tests/upstream/differences.toml names it. Exit codes: 0 none differs, 1 some do or a row of that table is stale,
2 usage or environment.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.result_file import read, write
from ci.errors import EnvironmentProblem, ending

from . import model, sources, verdict
from .running import Compiled, Job, Machine, Ran

SUITES = ("mlx", "mlx-lm")
REPETITIONS = 2  # of a test that differs
TEST = re.compile(r"^ +def test_", re.MULTILINE)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def modules(folder: Path, asked: Sequence[str]) -> list[tuple[str, str]]:
    """The modules of a folder that are asked for, by the name of a suite, of a module, or of both, with ``*``; all where none is."""
    found = [(suite, path.stem) for suite in SUITES for path in sorted((folder / suite).glob("test_*.py"))]
    names = {each: (*each, "/".join(each)) for each in found}
    if strange := [want for want in asked if not any(fnmatchcase(name, want) for each in names.values() for name in each)]:
        raise EnvironmentProblem(f"{folder} has no module {', '.join(strange)}", fix="give names such as mlx or mlx/test_fast")
    if not found:
        raise EnvironmentProblem(f"{folder} has no tests in mlx/ and mlx-lm/", fix="python -m tests.upstream fetch FOLDER")
    return [each for each in found if not asked or any(fnmatchcase(name, want) for want in asked for name in names[each])]


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="mlx-cuda-upstream-") as name:
        work = Path(name)
        if not args.tests:
            say("fetching the tests")
            sources.fetch(work / "tests", sources.pins())
        folder = (args.tests or work / "tests").resolve()
        earlier = read(args.keep, "upstream", EnvironmentProblem) if args.keep else None
        kept = verdict.finished(earlier) if earlier else set()
        chosen = [each for each in modules(folder, args.module) if "/".join(each) not in kept]
        machine = Machine(folder, args.timeout, args.jobs, time.monotonic() + args.deadline, compiled=Compiled(work / "compiled"))
        facts = machine.facts()
        if not facts:
            raise EnvironmentProblem("mlx and mlx_cuda cannot be imported (above)", fix="nox -s upstream-tests")
        if not (facts["replaces"] or args.same):
            what = f"patch() replaces nothing here, on {facts['device']}: both sides are the same"
            raise EnvironmentProblem(what, fix="a GPU and the extra that fits its driver, or --same to run nevertheless")
        if any(suite == "mlx-lm" for suite, _ in chosen):
            machine = replace(machine, environment=model.hub(work / "hub", folder / "mlx-lm", args.model))
        jobs = [Job(suite, module, patched=False, patterns=tuple(args.pattern)) for suite, module in chosen]
        ran = both(machine, planned(machine, jobs, args.split))
    tests = verdict.tests_of(ran)
    unfinished = {each.job.name for each in ran if not (each.whole or each.job.again)}
    found = verdict.judge(tests, verdict.known(), unfinished, whole=not (args.module or args.pattern or kept))
    results = verdict.report(tests, found, facts, sources.fetched(folder), ran)
    if earlier:
        results = verdict.joined(earlier, results)
    if args.json:
        write(args.json, results)
    show(results, args.update)
    for line in found.lines():
        print(line)
    return 0 if verdict.good(results) else 1


def planned(machine: Machine, modules: Sequence[Job], split: int | None) -> list[Job]:
    """Each module, or its parts, on one side and then on the other, so that what a deadline leaves is compared: the largest first.

    The second side finds compiled what the first one needed, as far as it has ended.
    """
    written = {job: len(TEST.findall((machine.folder / job.suite / f"{job.module}.py").read_text("utf-8"))) for job in modules}
    parts = {job: max(1, -(-written[job] // split)) if split else 1 for job in modules}
    largest = sorted(modules, key=written.__getitem__, reverse=True)
    return [job._replace(patched=side, part=(each, parts[job])) for job in largest for side in (False, True) for each in range(parts[job])]


def repeated(ran: Sequence[Ran]) -> list[Job]:
    """Tests that differ, alone; of a process that does not begin or end well, all of them."""
    names = {test.name for test in verdict.judge(verdict.tests_of(ran), []).new}
    differing: dict[Job, set[str]] = {}
    for each in ran:
        own = {name for name in each.outcomes if f"{each.job.suite}/{name}" in names}
        if own:
            differing.setdefault(each.job._replace(patched=False), set()).update(own)
    return [
        job._replace(patched=side, only=None if any(name.endswith(verdict.PROCESS) for name in own) else frozenset(own), again=number)
        for job, own in differing.items()
        for number in range(1, REPETITIONS + 1)
        for side in (False, True)
    ]


def both(machine: Machine, jobs: Sequence[Job]) -> list[Ran]:
    """Run all jobs, and what differs again, so that a test that fails now and then is seen to."""
    number, total = 0, len(jobs)

    def told(ran: Ran) -> None:
        nonlocal number
        number += 1
        did = verdict.counted(each.what for each in ran.outcomes.values())
        say(f"[{number}/{total}] {ran.job.unit} {ran.job.side} patch(): {did}, {ran.seconds:.1f} s")

    ran = machine.run(jobs, told)
    if again := repeated(ran):
        number, total = 0, len(again)
        say(f"some differ: they run again, {REPETITIONS} times")
        ran += machine.run(again, told)
    return ran


def show(results: Any, document: Path | None) -> None:
    """The table on stdout, and in a document."""
    print(verdict.table(results))
    if document:
        document.write_text(verdict.updated(document.read_text("utf-8"), results), "utf-8")


def fetch(args: argparse.Namespace) -> int:
    sources.fetch(args.folder, sources.pins())
    print(" ".join(f"{name} at {what}" for name, what in sources.fetched(args.folder).items()))
    return 0


def pin(args: argparse.Namespace) -> int:
    from ci.matrix import load

    text = sources.pin(load().mlx, sources.pins())
    if text == sources.PINS.read_text("utf-8"):
        print(f"the tests of MLX {load().mlx} are pinned: nothing to do")
        return 0
    if args.check:
        print(f"the tests of MLX {load().mlx} are not pinned")
        return 1
    sources.PINS.write_text(text, "utf-8")
    print(text)
    return 0


def table(args: argparse.Namespace) -> int:
    show(read(args.results, "upstream", EnvironmentProblem), args.update)
    return 0


def make_parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    update = {"type": Path, "metavar": "DOCUMENT", "help": "put the table into a document, such as docs/results/upstream-tests.md"}

    each = commands.add_parser("run", help="run the tests on both sides and compare", description=__doc__, formatter_class=form)
    each.set_defaults(command=run)
    add = each.add_argument
    add(
        "module",
        nargs="*",
        metavar="MODULE",
        help="mlx, mlx-lm, or modules such as mlx/test_fast or test_fast* (default: all)",
    )
    add("-k", dest="pattern", action="append", default=[], metavar="PATTERN", help="tests with this in their ids; may have * (repeatable)")
    add("--tests", type=Path, metavar="FOLDER", help="what `fetch` has filled (default: fetch them)")
    add("--model", type=Path, metavar="FOLDER", help="for the tests that load one from a hub (default: a small one with random weights)")
    add("--jobs", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes at once (%(default)s)")
    add("--split", type=int, metavar="N", help="processes of so many tests of a module (default: one has all of its tests)")
    add("--timeout", type=float, default=180, metavar="SECONDS", help="of one test (%(default)s)")
    add("--deadline", type=float, default=3600, metavar="SECONDS", help="of all of them: what is not done then fails (%(default)s)")
    add("--same", action="store_true", help="run where patch() replaces nothing, such as on a CPU: both sides are the same")
    add("--json", type=Path, metavar="FILE", help="write the results of each module, and of each test that does not pass on both sides")
    add("--keep", type=Path, metavar="FILE", help="go on: modules that this earlier --json of the same versions has finished do not run")
    add("--update", **update)  # type: ignore[arg-type]

    each = commands.add_parser("fetch", help="fetch the tests as they are pinned")
    each.set_defaults(command=fetch)
    each.add_argument("folder", type=Path, metavar="FOLDER", help="an empty folder")

    each = commands.add_parser("pin", help="pin MLX's tests at the release that is built for, in tests/upstream/pins.toml")
    each.set_defaults(command=pin)
    each.add_argument("--check", action="store_true", help="change nothing; exit code 1 if others are pinned")

    each = commands.add_parser("table", help="print the table of results")
    each.set_defaults(command=table)
    each.add_argument("results", type=Path, metavar="FILE", help="what `run --json` wrote")
    each.add_argument("--update", **update)  # type: ignore[arg-type]
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return ending(lambda: int(args.command(args)))


if __name__ == "__main__":
    sys.exit(main())
