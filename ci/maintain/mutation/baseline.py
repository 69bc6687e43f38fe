"""One run of the unchanged tests: how long each takes, and which of them run a line."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage

from ... import process
from .mutants import Mutant

BUDGET = 90.0  # seconds of tests for one mutant: quicker ones first
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--nightly", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Baseline:
    """The results of a run without a mutant."""

    seconds: dict[str, float]  # by test
    lines: dict[str, dict[int, set[str]]]  # by file and line, the tests that run it

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run its lines, then the others of the file that has most of those: they may share what was made once.

        Code that runs on import or in another process belongs to no test; then those that run any of its module stand for them, and where
        nothing else is in it, those that run any of its folder.
        """
        lines = self.lines.get(mutant.file, {})
        beside = [each for file, each in self.lines.items() if file.rpartition("/")[0] == mutant.file.rpartition("/")[0]]
        found = set().union(*(lines.get(line, set()) for line in mutant.lines)) or _all([lines]) or _all(beside)
        homes = Counter(map(_file, found))
        others = {test for test in self.seconds if homes and _file(test) == homes.most_common(1)[0][0]} - found
        chosen: list[str] = []
        left = BUDGET
        for test in [*sorted(found, key=self._quickness), *sorted(others, key=self._quickness)]:
            left -= self.seconds.get(test, 0)
            if left > 0 or not chosen:
                chosen.append(test)
        # Files stay together, as what a file shares is made once.
        return sorted(chosen, key=lambda test: -homes[_file(test)])

    def limit(self, tests: Sequence[str]) -> float:
        """The seconds after which these tests have failed."""
        return 120 + 4 * sum(self.seconds.get(test, 0) for test in tests)

    def _quickness(self, test: str) -> tuple[float, str]:
        return self.seconds.get(test, 0), test


def _all(files: Iterable[dict[int, set[str]]]) -> set[str]:
    return {test for lines in files for tests in lines.values() for test in tests}


def _file(test: str) -> str:
    return test.partition("::")[0]


def copy_tree(root: Path, copy: Path) -> None:
    """Copy what git knows or would add, with its history, as some tests ask git."""
    fix = "run it in a checkout with git"
    process.git("clone", "--quiet", "--shared", "--no-checkout", str(root), str(copy), fix=fix)
    process.git("reset", "--quiet", cwd=copy, fix=fix)
    listed = process.git("ls-files", "-coz", "--exclude-standard", cwd=root, fix=fix)
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def environment(copy: Path) -> dict[str, str]:
    """The package of the copy, and a place for temporary files that goes with it."""
    (copy.parent / f"{copy.name}.tmp").mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(copy / "python"), "TMPDIR": str(copy.parent / f"{copy.name}.tmp")}


def measure(copy: Path, paths: Sequence[str], workers: int) -> Baseline:
    """Run the files of tests that speak of these folders; all must pass."""
    word = re.compile(rf"\b({'|'.join(Path(path).stem for path in paths)})\b")
    files = [each for each in sorted((copy / "tests/ci").rglob("test_*.py")) if word.search(each.read_text("utf-8"))]
    command = [*PYTEST, "-n", str(workers), "--dist", "loadfile", "--durations=0", "-vvv", *map(str, files)]
    command += [
        "--cov-context=test",
        "--cov-report=",
        *(f"--cov={path if (copy / path).is_dir() else Path(path).parent}" for path in paths),
    ]
    done = process.run(command, cwd=copy, env=environment(copy))
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nthe tests fail without any mutant")
    seconds: dict[str, float] = {}
    for duration, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(.+)$", done.stdout, re.MULTILINE):
        seconds[test] = seconds.get(test, 0) + float(duration)
    data = coverage.CoverageData(str(copy / ".coverage"))
    data.read()
    lines = {
        Path(file).relative_to(copy).as_posix(): {
            line: {context.rpartition("|")[0] for context in found if context} for line, found in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    return Baseline(seconds, lines)
