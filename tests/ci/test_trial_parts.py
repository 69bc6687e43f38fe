"""``python -m ci try``, each part by itself: what is run, what is read of it, what is shown, and what is copied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import packaging
import pytest

from ci.errors import EnvironmentProblem
from ci.matrix import REPOSITORY
from ci.trial import trial
from ci.trial.fresh import Fresh
from ci.trial.trial import Case, Outcome, Trial

from .audit_support import VERSION
from .trial_support import DOCTOR, PURE, TAG


@pytest.mark.parametrize(
    ("case", "required", "place"),
    [
        (Case("cpu", on_gpu=False), "0", ""),
        (Case("cpu", on_gpu=False, row="linux-cpu"), "0", "try"),
        (Case("cu13", on_gpu=True), "1", ""),
        (Case("cu12", on_gpu=True, row="linux-cu12"), "1", "gpu"),
    ],
)
def test_what_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: Case, required: str, place: str
) -> None:
    """In this order, each with these arguments, this folder and these variables."""
    wheel, work, fresh = tmp_path / PURE, tmp_path / "work", Fresh(tmp_path / "fresh")
    fresh.folder.mkdir()
    runs: list[tuple[tuple[str, ...], object]] = []
    answers = {trial._TAGS: TAG, trial._ORIGIN: f"a warning\n{json.dumps([VERSION, str(fresh.folder / 'mlx_cuda.py')])}"}

    def run(_: Fresh, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        runs.append((arguments, options))
        if arguments[1] == "pytest":
            (fresh.folder / f"{arguments[-1].removeprefix('tests/')}.xml").write_text("<a><testcase/></a>")
        if arguments[1] == "benchmarks":
            (fresh.folder / "benchmark.json").write_text("{}")
        return subprocess.CompletedProcess(arguments, 0, answers.get(arguments[-1], ""), "")

    monkeypatch.setattr(Fresh, "version", "3.13.1")
    monkeypatch.setattr(Fresh, "run", run)
    monkeypatch.setattr(Fresh, "doctor", lambda _: DOCTOR)
    monkeypatch.setattr(Fresh, "install", lambda _, *requirements, options=(): runs.append((requirements, options)))
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=iter([1000.0, 1001.26]).__next__))
    output = tmp_path / "out.json"
    outcome = Trial([wheel], case, work, output).examine(fresh)
    suites = ["package", *["gpu"] * case.on_gpu]
    tests = {suite: trial.Tests(1, 0, ()) for suite in suites}
    assert outcome == Outcome(case.row, "3.13.1", case.extra, case.on_gpu, PURE, True, DOCTOR, tests, str(output), [], 1.3)
    needs = str(fresh.folder / "needs")
    variables = {"MLX_CUDA_REQUIRE_GPU": required, "MLX_CUDA_PLACE": place, "PYTHONPATH": needs}
    checkout = {"GIT_DIR": str(REPOSITORY / ".git"), "GIT_WORK_TREE": str(REPOSITORY), "PYTHONPATH": needs}
    pytest_run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ".")
    results = str(fresh.folder / "benchmark.json")
    assert runs == [
        ((), ["--target", needs, "--require-hashes", "--requirements", str(work / "package-tests.txt")]),
        (("-c", trial._TAGS), {"env": {"PYTHONPATH": str(Path(packaging.__file__).parents[1])}}),
        ((f"mlx-cuda[{case.extra}] @ {wheel.as_uri()}",), ()),
        (("-W", "ignore", "-c", trial._ORIGIN), {"cwd": work}),
        *(
            (
                (*pytest_run, *(f"--{what}" for what in (f"basetemp={base}", f"junitxml={base}.xml")), f"tests/{base.name}"),
                {"cwd": work, "env": variables, "show": True},
            )
            for base in map(fresh.folder.joinpath, suites)
        ),
        (("-m", "benchmarks", "run", "-o", results, "--wheel", str(wheel)), {"cwd": work, "env": checkout, "show": True}),
    ]
    stages = [f"{case.row or 'Python 3.13.1'}: install with [{case.extra}]", "doctor", *(f"tests/{suite}" for suite in suites), "benchmark"]
    assert [line.rstrip(" ─") for line in capsys.readouterr().err.splitlines()] == stages


def test_an_interpreter_that_cannot_say_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Fresh(tmp_path)
    monkeypatch.setattr(Fresh, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "no\n"))
    with pytest.raises(
        EnvironmentProblem, match=f"^{re.escape(str(fresh.python))} cannot list its tags: no\n  fix: give another --python$"
    ):
        trial.tags(fresh)


def test_what_pytest_reports(tmp_path: Path) -> None:
    """One test may fail and have an error too."""
    cases = ["", "", "", "<skipped/>", "<skipped/>", "<failure/>", "<error/>"]
    lines = [f"<testcase classname='tests.a.b' name='{number}'>{inside}</testcase>" for number, inside in enumerate(cases)]
    (tmp_path / "report.xml").write_text(f"<a><b>{''.join(lines)}{lines[-1]}<testcase name='c'><error/></testcase></b></a>")
    assert trial.read(tmp_path / "report.xml") == trial.Tests(3, 2, ("b::5", "b::6", "::c"))


WELL = Outcome("", "3.13.1", "cu12", gpu=True, wheel=PURE, installed=True, doctor=DOCTOR, seconds=12)
ILL = Outcome("", "3.14.0t", "cpu", gpu=False, wheel=PURE, doctor={"ok": False}, problems=["a", "b\n  fix: c"])
SUITES = {"package": trial.Tests(2, 3, ()), "gpu": trial.Tests(1, 0, ("a::b",))}
COUNTED = ("2 passed, 3 skipped", "1 passed, 1 failed")


@pytest.mark.parametrize(
    ("outcomes", "rows", "said"),
    [
        (
            [replace(WELL, tests=SUITES), replace(WELL, extra="cpu", tests={"package": trial.Tests(0, 0, ())})],
            [
                ("Python", "installed", "doctor", "tests/package", "tests/gpu", "seconds"),
                ("3.13.1", "yes", "ok", *COUNTED, "12.0"),
                ("3.13.1", "yes", "ok", "none", "", "12.0"),
            ],
            f"WORKS here with [cu12], [cpu]: {PURE}\n",
        ),
        (
            [ILL, replace(ILL, row="row", wheel="other.whl")],
            [("row", "installed", "doctor", "seconds"), ("3.14.0t", "no", "failed", "0.0"), ("row", "no", "failed", "0.0")],
            f"Python 3.14.0t: a\nPython 3.14.0t: b\n  fix: c\nrow: a\nrow: b\n  fix: c\nDOES NOT WORK here with [cpu]: {PURE}, other.whl\n",
        ),
        (
            [replace(ILL, wheel="", doctor=None, problems=["a"])],
            [("Python", "installed", "doctor", "seconds"), ("3.14.0t", "no", "", "0.0")],
            "Python 3.14.0t: a\nDOES NOT WORK here with [cpu]: none of the wheels\n",
        ),
    ],
)
def test_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcomes: list[Outcome], rows: list[tuple[str, ...]], said: str
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    trial.show(outcomes)
    table, _, verdict = capsys.readouterr().out.rpartition("┘\n")
    assert [tuple(map(str.strip, re.split("[│┃]", line)[1:-1])) for line in table.splitlines() if line[0] in "│┃"] == rows
    assert verdict == said


def test_a_checkout_without_benchmarks_or_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "REPOSITORY", tmp_path / "checkout")
    for name in ("tests/package/test_a.py", "pyproject.toml", "requirements/package-tests.txt"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).touch()
    assert sorted(each.name for each in trial.copy_tests(tmp_path / "work").iterdir()) == ["package-tests.txt", "pyproject.toml", "tests"]
    shutil.rmtree(tmp_path / "checkout" / "tests")
    with pytest.raises(EnvironmentProblem, match=r"^this checkout lacks tests/package\n  fix: "):
        trial.copy_tests(tmp_path / "again")


def test_only_tests_are_copied_from_the_real_repository(tmp_path: Path) -> None:
    folder = trial.copy_tests(tmp_path / "work")
    assert sorted(each.name for each in folder.iterdir()) == ["benchmarks", "package-tests.txt", "pyproject.toml", "tests"]
    assert sorted(each.name for each in (folder / "tests").iterdir() if each.is_dir()) == ["benchmarks", "gpu", "package"]
    assert not [each for name in ("mlx_cuda", "__pycache__", "results") for each in folder.rglob(name)]
