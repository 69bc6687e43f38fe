"""``python -m ci try``: install a built wheel in a fresh environment, and test it on this machine.

Installs the wheel as a user would, and runs its doctor and its tests. The tests are copied out of the repository, so that they import the
wheel's package. gh downloads the artifacts of a workflow run; it must be logged in, or GH_TOKEN must be set.

The wheel's code gets a home directory of its own and none of your tokens, passwords and settings. It still runs as your user and can read
your files and, on Linux, other processes. Test untrusted wheels as another user or on a disposable machine.

Exit codes: 0 the wheel works here, 1 it does not work or was refused, 2 usage or environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import packaging
from packaging.tags import Tag, parse_tag

from .. import console
from ..console import stage
from ..errors import CheckFailed, EnvironmentProblem
from ..files import whole
from ..matrix import REPOSITORY, gpu, host_platform, load
from . import artifacts
from .fresh import Fresh

REQUIREMENTS = Path("requirements", "package-tests.txt")
_TAGS = "from packaging.tags import sys_tags; print(*sys_tags(), sep='\\n')"
_ORIGIN = f"import json, {load().module} as package; print(json.dumps([package.__version__, package.__file__]))"
_NAMED = 5  # failed tests that the verdict names; pytest has shown them all


@dataclass(frozen=True)
class Tests:
    """The results of one folder of tests."""

    passed: int
    skipped: int
    failed: tuple[str, ...]

    def __str__(self) -> str:
        counted = {"passed": self.passed, "failed": len(self.failed), "skipped": self.skipped}
        return ", ".join(f"{number} {name}" for name, number in counted.items() if number) or "none"


@dataclass
class Outcome:
    """The results of a wheel on one Python."""

    row: str
    python: str
    extra: str
    gpu: bool
    wheel: str = ""
    installed: bool = False
    doctor: dict[str, Any] | None = None
    tests: dict[str, Tests] = field(default_factory=dict)
    benchmark: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return self.row or f"Python {self.python}"


@dataclass(frozen=True)
class Case:
    """One test of the wheel: a row of the matrix, or the options of the command line."""

    extra: str
    on_gpu: bool
    python: str | None = None
    row: str = ""


@dataclass(frozen=True)
class Trial:
    wheels: Sequence[Path]
    case: Case
    work: Path  # holds copies of the tests and the benchmarks
    benchmark: Path | None = None

    def examine(self, fresh: Fresh) -> Outcome:
        """Try the wheel in an empty environment. Its problems become problems of the outcome."""
        outcome = Outcome(self.case.row, fresh.version, self.case.extra, self.case.on_gpu)
        start = time.monotonic()
        try:
            self._prepare(fresh)
            self._install(fresh, outcome)
            self._doctor(fresh, outcome)
            self._test(fresh, outcome)
            if self.benchmark:
                self._measure(fresh, outcome, self.benchmark)
        except CheckFailed as error:
            outcome.problems.append(str(error))
        outcome.seconds = round(time.monotonic() - start, 1)
        return outcome

    def _prepare(self, fresh: Fresh) -> None:
        """Install what the tests need, beside the environment: the wheel gets nothing of it until they run, and uv nothing of the wheel."""
        try:
            locked = ["--require-hashes", "--requirements", str(self.work / REQUIREMENTS.name)]
            fresh.install(options=["--target", str(_needs(fresh)), *locked])
        except CheckFailed as error:
            raise EnvironmentProblem(
                f"the tests cannot be prepared: {error}", fix="lock the group package-tests again: python -m ci bump --tools"
            ) from error

    def _install(self, fresh: Fresh, outcome: Outcome) -> None:
        wheel = artifacts.choose(self.wheels, tags(fresh), outcome.python)
        outcome.wheel = wheel.name
        stage(f"{outcome}: install with [{outcome.extra}]")
        fresh.install(f"{load().name}[{outcome.extra}] @ {wheel.as_uri()}")
        outcome.installed = True

    def _doctor(self, fresh: Fresh, outcome: Outcome) -> None:
        stage("doctor")
        outcome.doctor = fresh.doctor()
        failed = [check for check in outcome.doctor["checks"] if check["status"] == "fail"]
        fixes = [check.get("fix") or check.get("cure", "") for check in failed]  # the old key: wheels before 0.32.4.1
        outcome.problems += [f"doctor: {check['name']}: {check['summary']}\n  fix: {fix}" for check, fix in zip(failed, fixes, strict=True)]

    def _test(self, fresh: Fresh, outcome: Outcome) -> None:
        self._check_origin(fresh, outcome)
        required = "1" if outcome.gpu else "0"  # with a GPU its tests have to run: MLX not seeing it is a failure
        place = ("gpu" if outcome.gpu else "try") if outcome.row else ""  # of tests/skips.toml: a row skips what is declared
        variables = {"MLX_CUDA_REQUIRE_GPU": required, "MLX_CUDA_PLACE": place, "PYTHONPATH": str(_needs(fresh))}
        for suite in ("package", "gpu") if outcome.gpu else ("package",):
            stage(f"tests/{suite}")
            report = fresh.folder / f"{suite}.xml"
            options = ["-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ".", f"--basetemp={fresh.folder / suite}"]
            options += [f"--junitxml={report}", f"tests/{suite}"]
            done = fresh.run("-m", "pytest", *options, cwd=self.work, env=variables, show=True)
            tests = outcome.tests[suite] = read(report) if report.is_file() else Tests(0, 0, ())
            if tests.failed:
                more = f" and {len(tests.failed) - _NAMED} more" if len(tests.failed) > _NAMED else ""
                outcome.problems.append(f"tests/{suite}: failed: {', '.join(tests.failed[:_NAMED])}{more}")
            elif done.returncode or not tests.passed:
                outcome.problems.append(f"tests/{suite}: pytest ended with exit code {done.returncode} after {tests.passed} passed tests")

    def _check_origin(self, fresh: Fresh, outcome: Outcome) -> None:
        """Check that the tests import the package from this environment, in the version of the wheel's name."""
        done = fresh.run("-W", "ignore", "-c", _ORIGIN, cwd=self.work)
        if done.returncode:
            raise CheckFailed(f"it cannot be imported:\n{done.stderr.strip()}")
        version, file = json.loads(done.stdout.splitlines()[-1])
        if not Path(file).resolve().is_relative_to(fresh.folder.resolve()):
            raise CheckFailed(f"{load().module} is imported from {file}, expected it in {fresh.folder}")
        if version != outcome.wheel.split("-")[1]:
            raise CheckFailed(f"{load().module}.__version__ is {version}, expected that of {outcome.wheel}")

    def _measure(self, fresh: Fresh, outcome: Outcome, output: Path) -> None:
        stage("benchmark")
        results = fresh.folder / "benchmark.json"
        wheel = next(wheel for wheel in self.wheels if wheel.name == outcome.wheel)
        checkout = {"GIT_DIR": str(REPOSITORY / ".git"), "GIT_WORK_TREE": str(REPOSITORY)}  # whose commit the results bear
        checkout["PYTHONPATH"] = str(_needs(fresh))
        done = fresh.run("-m", "benchmarks", "run", "-o", str(results), "--wheel", str(wheel), cwd=self.work, env=checkout, show=True)
        if results.is_file():
            with whole(output, fix="give another --benchmark") as part:
                shutil.copyfile(results, part)
            outcome.benchmark = str(output)
        if done.returncode:
            outcome.problems.append(f"the benchmark ended with exit code {done.returncode}; what it measured is in {output}")


def _needs(fresh: Fresh) -> Path:
    """The directory of the packages that the tests need."""
    return fresh.folder / "needs"


def tags(fresh: Fresh) -> list[Tag]:
    """Return the tags that the environment's Python accepts, best first. It lists them itself, with this interpreter's packaging."""
    done = fresh.run("-c", _TAGS, env={"PYTHONPATH": str(Path(packaging.__file__).parent.parent)})
    if done.returncode:
        raise EnvironmentProblem(f"{fresh.python} cannot list its tags: {done.stderr.strip()}", fix="give another --python")
    return [tag for line in done.stdout.split() for tag in parse_tag(line)]


def read(report: Path) -> Tests:
    """Count the cases of a JUnit report."""
    passed, skipped, failed = 0, 0, []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  pytest wrote it
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return Tests(passed, skipped, tuple(dict.fromkeys(failed)))


def copy_tests(folder: Path) -> Path:
    """Copy the tests and the benchmarks, which have parts in common, and nothing of the package or the factory, or what is built on it."""
    ignore = shutil.ignore_patterns("__pycache__", "ci", "models", "pipeline", "results", "soak", "upstream")
    needed = (Path("tests", "package"), Path("pyproject.toml"), REQUIREMENTS)  # the last two: pytest's settings, and what the tests need
    if missing := [path.as_posix() for path in needed if not (REPOSITORY / path).exists()]:
        raise EnvironmentProblem(f"this checkout lacks {', '.join(missing)}", fix="add it: the tests of tests/package are run with it")
    for name in ("tests", "benchmarks"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=ignore)
    for file in needed[1:]:
        shutil.copy(REPOSITORY / file, folder)
    return folder


@contextmanager
def _workspace(*, keep: bool) -> Iterator[Path]:
    """A temporary folder, removed whatever happens; ``keep`` leaves it after a complete trial."""
    folder, ended = Path(tempfile.mkdtemp(prefix=f"{load().name}-try-")), False
    try:
        yield folder
        ended = True
    finally:
        if not (keep and ended):
            shutil.rmtree(folder, ignore_errors=True)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table and the verdict."""
    suites = list(dict.fromkeys(suite for outcome in outcomes for suite in outcome.tests))
    rows = any(outcome.row for outcome in outcomes)
    table = console.table("row" if rows else "Python", "installed", "doctor", *(f"tests/{suite}" for suite in suites), "seconds")
    table.columns[0].no_wrap = True
    for outcome in outcomes:
        doctor = "" if outcome.doctor is None else "ok" if outcome.doctor["ok"] else "failed"
        tests = (str(outcome.tests.get(suite, "")) for suite in suites)
        table.add_row(outcome.row or outcome.python, "yes" if outcome.installed else "no", doctor, *tests, f"{outcome.seconds:.1f}")
    console.show(table)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome}: {problem}")
    names = ", ".join(dict.fromkeys(outcome.wheel for outcome in outcomes if outcome.wheel)) or "none of the wheels"
    extras = ", ".join(dict.fromkeys(f"[{outcome.extra}]" for outcome in outcomes))
    verdict = "WORKS" if all(outcome.works for outcome in outcomes) else "DOES NOT WORK"
    print(f"{verdict} here with {extras}: {names}")


def declared(names: Sequence[str]) -> list[Case]:
    """The rows of the matrix with these names, which this machine has to fit."""
    rows = [load().row(name) for name in names]
    if not rows:
        raise EnvironmentProblem("--row is empty", fix="give a name; `python -m ci matrix` prints them")
    for row in rows:
        if row.platform != host_platform().name:
            raise EnvironmentProblem(f"the row {row.name} is not for this machine's {host_platform().name}", fix="leave it out")
        if row.gpu:
            gpu.fits(row)
    return [Case(row.extra, bool(row.gpu), row.python, row.name) for row in rows]


def asked(args: argparse.Namespace) -> list[Case]:
    """Return the test that the other options describe."""
    fitting = gpu.extra()
    extra = fitting if args.extra in {None, "auto"} else args.extra
    on_gpu = load().cpu.extra not in {fitting, extra}
    if args.require_gpu and not on_gpu:
        why = "there is none that this driver can use" if fitting == load().cpu.extra else f"[{extra}] leaves it out"
        raise CheckFailed(f"a GPU is required, and {why}")
    return [Case(extra, on_gpu, python) for python in args.python or [None]]


def run(args: argparse.Namespace) -> int:
    if args.row and (args.extra or args.python):
        raise EnvironmentProblem("a row determines the Python and the extra", fix="omit --extra and --python")
    cases = declared(" ".join(args.row).split()) if args.row else asked(args)
    if args.benchmark and not cases[0].on_gpu:
        raise EnvironmentProblem("a benchmark needs a GPU", fix="omit --benchmark")
    with _workspace(keep=args.keep) as folder:
        wheels = artifacts.obtain(args.target, folder / "downloaded", repository=args.repository)
        environments = [Fresh.make(folder / f"environment-{number}", case.python) for number, case in enumerate(cases, 1)]
        work = copy_tests(folder / "work")
        outcomes: list[Outcome] = []
        for case, fresh in zip(cases, environments, strict=True):
            benchmark = args.benchmark if not outcomes else None  # one machine, one measurement
            outcomes.append(Trial(wheels, case, work, benchmark).examine(fresh))
        works = all(outcome.works for outcome in outcomes)
        kept = [fresh.activation for fresh in environments] if args.keep else []
        if args.json:
            report = [{"works": outcome.works, **asdict(outcome)} for outcome in outcomes]
            print(json.dumps({"works": works, "outcomes": report, "kept": kept}, indent=2))
        else:
            show(outcomes)
            print("".join(f"kept, activate with: {command}\n" for command in kept), end="")
    return 0 if works else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    extras = [each.extra for each in load().extras]
    add = parser.add_argument
    add("target", metavar="TARGET", help="a wheel, a directory of wheels, an artifact's zip, or the id or URL of a workflow run")
    add(
        "--row",
        action="append",
        metavar="NAME",
        help="a test of ci/matrix/matrix.toml, such as linux-x86_64-cp310-cpu (repeatable); python -m ci matrix --runners gpu lists them",
    )
    add("--extra", choices=["auto", *extras], help="the extra to install (default: the one that fits the driver)")
    add("--python", action="append", metavar="PYTHON", help="a version, or the path of an interpreter (repeatable; default: this version)")
    add("--repository", metavar="OWNER/NAME", help="repository of the run, if only its id is given (default: GITHUB_REPOSITORY)")
    required = os.environ.get("MLX_CUDA_REQUIRE_GPU") == "1"
    add("--require-gpu", action="store_true", default=required, help="fail without a GPU (as MLX_CUDA_REQUIRE_GPU=1)")
    add(
        "--benchmark",
        type=Path,
        metavar="FILE",
        help="also run the benchmark on the first Python; write the results to FILE (needs a GPU)",
    )
    add("--keep", action="store_true", help="keep the environments, and print how to activate them")
    console.add_json(parser)
