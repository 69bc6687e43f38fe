"""Do the tests notice a change of the code? `nox -s mutants -- --sample 300 --seed 7` changes one place of ci/ at a time and runs them.

Of all mutants a sample is drawn. Each is tried in a copy of the tree with the tests that run its lines: it is killed when one fails or
takes far too long, and survives when all pass. The exit code is 1 when fewer than 95 % are killed. equivalent.toml lists those that no
test can kill, with the reason; they do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from ...console import say
from ...files import tomllib
from ...matrix import REPOSITORY
from .baseline import PYTEST, copy_tree, environment, measure
from .mutants import Mutant, mutants_of

PATHS = ("ci/wheelfile", "ci/audit", "ci/repair", "ci/release", "ci/trial")
REQUIRED = 0.95
CONTROLS = 4  # how many are also tried unchanged
times = count(1_500_000_000)  # each version of a file gets a time of its own, or Python takes an older one's bytecode for it


Outcome = tuple[str, str, float]  # "killed", "timeout" or "survived"; the test that failed; seconds


@dataclass(frozen=True)
class Result:
    """The result for a mutant."""

    mutant: Mutant
    verdict: str
    test: str
    seconds: float

    @property
    def told(self) -> dict[str, object]:
        """As JSON."""
        mutant = self.mutant
        told = dict(zip(("file", "function", "before", "after"), mutant.key, strict=True))
        return {
            **told,
            "line": mutant.lines[0],
            "operator": mutant.operator,
            "verdict": self.verdict,
            "test": self.test,
            "seconds": self.seconds,
        }


def set_up(root: Path, copies: Path) -> None:
    """Give this worker its own tree; what a mutant starts and forgets does not run for ever."""
    resource.setrlimit(resource.RLIMIT_CPU, (1800, 1800))  # of each process
    os.chdir(copies)
    copy_tree(root, copies / str(os.getpid()))


def trial(file: str, code: str, tests: Sequence[str], limit: float) -> Outcome:
    """Run the tests with one file changed."""
    copy, began = Path.cwd() / str(os.getpid()), time.monotonic()
    original = (copy / file).read_text("utf-8")
    try:
        _write(copy / file, code)
        status, said = _run(copy, tests, limit)
        if status in {4, 5}:  # no such test: names may come from what was changed
            status, said = _run(copy, [*dict.fromkeys(test.partition("::")[0] for test in tests)], limit)
    finally:
        _write(copy / file, original)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    verdict = {0: "survived", -1: "timeout"}.get(status, "killed")
    return verdict, failed[1] if failed else "", time.monotonic() - began


def _write(path: Path, code: str) -> None:
    path.write_text(code, "utf-8")
    os.utime(path, (now := next(times), now))


def _run(copy: Path, tests: Sequence[str], limit: float) -> tuple[int, str]:
    command = [*PYTEST, "-x", "-n", "0", "--no-header", "--tb=no", f"--basetemp={copy}.tmp/pytest", *tests]
    with subprocess.Popen(
        command, cwd=copy, env=environment(copy), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, process.communicate()[0]
    return process.returncode, said


def equivalents(root: Path, mutants: Sequence[Mutant]) -> set[tuple[str, ...]]:
    """The keys in equivalent.toml; those of the files at hand must still be mutants."""
    tables = tomllib.loads((root / "ci/maintain/mutation/equivalent.toml").read_text("utf-8")).get("equivalent", [])
    listed: set[tuple[str, ...]] = {(each["file"], each["function"], each["before"], each["after"]) for each in tables}
    places, files = {key[:2] for key in listed}, {mutant.file for mutant in mutants}
    known = {mutant.key for mutant in mutants if (mutant.file, mutant.function) in places}
    if gone := sorted(key for key in listed - known if key[0] in files):
        sys.exit("equivalent.toml lists what is no mutant any more; take it out:\n" + "\n".join(map(str, gone)))
    return listed


def run(sample: Sequence[Mutant], root: Path, paths: Sequence[str], workers: int) -> Iterator[Result]:
    """Try all, each worker in its own copy."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copies = Path(name).resolve()
        copy_tree(root, copies / "baseline")
        say(f"the tests without a mutant, in {workers} processes")
        baseline = measure(copies / "baseline", paths, workers)
        chosen = {mutant: baseline.tests(mutant) for mutant in sample}
        yield from (Result(mutant, "survived", "no test runs it", 0) for mutant, tests in chosen.items() if not tests)
        with ProcessPoolExecutor(workers, initializer=partial(set_up, root, copies)) as pool:

            def submit(mutant: Mutant, code: str) -> Future[Outcome]:
                return pool.submit(trial, mutant.file, code, chosen[mutant], baseline.limit(chosen[mutant]))

            # Without a change nothing may fail, or what "kills" is the copy or the choice of tests.
            controls = [submit(mutant, mutant.module.code) for mutant in sample[:CONTROLS] if chosen[mutant]]
            tried = {submit(mutant, mutant.code): mutant for mutant, tests in chosen.items() if tests}
            for verdict, test, _ in (control.result() for control in controls):
                if verdict != "survived":
                    pool.shutdown(cancel_futures=True)
                    sys.exit(f"without a mutant there is a failure too: {test or verdict}")
            for number, done in enumerate(as_completed(tried), 1):
                result = Result(tried[done], *done.result())
                told = result.mutant.place if result.verdict == "killed" else result.mutant
                say(f"{number} of {len(tried)}: {result.verdict} in {result.seconds:.0f} s, {told}")
                yield result


def report(results: Sequence[Result]) -> float:
    """Print the survivors and what share of each folder is killed; returns the whole share."""
    for result in results:
        if result.verdict != "killed":
            print(f"{result.verdict}: {result.mutant}\n")
    folders: dict[str, list[bool]] = {}
    for result in results:
        for folder in (str(Path(result.mutant.file).parent), "together"):
            folders.setdefault(folder, []).append(result.verdict != "survived")
    for folder, killed in sorted(folders.items(), key=lambda each: (each[0] == "together", each[0])):
        print(f"{folder}: {sum(killed)} of {len(killed)} killed, {sum(killed) / len(killed):.1%}")
    return sum(folders["together"]) / len(results) if results else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sample", type=int, default=300, metavar="N", help="how many mutants to try; 0: all (default: %(default)s)")
    add("--seed", default="1", help="another seed draws other mutants (default: %(default)s)")
    add("--paths", nargs="+", default=PATHS, metavar="PATH", help=f"folders or files to change (default: {' '.join(PATHS)})")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one for each core)")
    add("--json", type=Path, metavar="FILE", help="write what became of each there")
    args = parser.parse_args()
    places = [REPOSITORY / path for path in args.paths]
    sources = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    mutants = [mutant for file in sources for mutant in mutants_of(REPOSITORY, file)]
    if not mutants:
        parser.error(f"nothing to change in {' '.join(args.paths)}")
    listed = equivalents(REPOSITORY, mutants)
    drawn = random.Random(args.seed).sample(mutants, min(args.sample or len(mutants), len(mutants)))  # noqa: S311 -- to be repeated
    sample = [mutant for mutant in drawn if mutant.key not in listed]
    results = sorted(run(sample, REPOSITORY, args.paths, args.workers), key=lambda result: (result.mutant.file, result.mutant.lines[0]))
    if args.json:
        args.json.write_text(json.dumps([result.told for result in results], indent=1), "utf-8")
    share = report(results)
    print(f"{len(drawn)} drawn from {len(mutants)} with seed {args.seed}; {len(drawn) - len(sample)} of them are equivalent")
    return int(share < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
