"""``python -m ci matrix``: the jobs of the workflows, and which of them a change needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci import matrix
from ci.matrix import Row, changes, jobs

LINUX, ARM, WINDOWS = ALL = list(matrix.load().platforms)
ROWS = (
    Row(LINUX, "3.13", "cu13", "hopper", "580"),
    Row(LINUX, "3.10", "cpu"),
    Row(LINUX, "3.15t", "cpu"),
    Row(WINDOWS, "3.10", "cpu"),
    Row(LINUX, "3.13", "cu12", "hopper", "550"),
    Row(LINUX, "3.10", "cu12", "ada", "550"),
)
ADA = f"{LINUX}-cp310-cu12-ada"
HOPPER = [f"{LINUX}-cp313-cu13-hopper", f"{LINUX}-cp313-cu12-hopper"]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = replace(matrix.load(), tests=ROWS)
    monkeypatch.setattr(matrix, "load", lambda: declared)


def github(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The outputs as GitHub reads them: a line each."""
    assert cli.main(["matrix", "--github", *arguments]) == 0
    return {name: json.loads(value) for name, _, value in (line.partition("=") for line in capsys.readouterr().out.splitlines())}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["matrix", "--github", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.usefixtures("rows")
def test_a_job_for_each_platform(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = github(capsys)
    assert list(outputs) == ["build", "platforms"]
    assert outputs["build"] is True
    assert [job["platform"] for job in outputs["platforms"]["include"]] == ALL
    first = outputs["platforms"]["include"][0]
    assert first == {
        "platform": LINUX,
        "runner": matrix.load().platforms[LINUX].runner,
        "rows": [
            {"name": f"{LINUX}-cp310-cpu", "python": "3.10"},
            {"name": f"{LINUX}-cp315t-cpu", "python": "3.15t"},
        ],
    }


@pytest.mark.usefixtures("rows")
def test_a_label_serves_every_family_with_all_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = github(capsys, "--runners", " any ")["gpu"]["include"]
    assert found == [
        {"kind": f"{LINUX}-hopper", "platform": LINUX, "family": "hopper", "label": "any", "names": " ".join(HOPPER)},
        {"kind": f"{LINUX}-ada", "platform": LINUX, "family": "ada", "label": "any", "names": ADA},
    ]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("runners", ['{"hopper": "h100"}', ' {"ada": "", "hopper": "h100"}'])
def test_a_family_without_a_runner_is_left_out_aloud(capsys: pytest.CaptureFixture[str], runners: str) -> None:
    assert cli.main(["matrix", "--json", "--runners", runners]) == 0
    out, err = capsys.readouterr()
    assert [(job["family"], job["label"]) for job in json.loads(out)["gpu"]["include"]] == [("hopper", "h100")]
    assert err == f"no runner for the GPU family ada on {LINUX}: not tried\n"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one family on two platforms, and of another on one."""
    declared = replace(matrix.load(), tests=(*ROWS, Row(WINDOWS, "3.13", "cu13", "hopper", "580")))
    monkeypatch.setattr(matrix, "load", lambda: declared)


@pytest.mark.usefixtures("both")
def test_a_machine_has_one_platform(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one family on two platforms are two jobs, and a label is of one of them."""
    runners = json.dumps({f"{WINDOWS}/hopper": "w", f"{LINUX}/hopper": "l", "ada": "a"})
    found = github(capsys, "--runners", runners)["gpu"]["include"]
    assert [(job["kind"], job["label"], job["names"]) for job in found] == [
        (f"{WINDOWS}-hopper", "w", f"{WINDOWS}-cp313-cu13-hopper"),
        (f"{LINUX}-hopper", "l", " ".join(HOPPER)),
        (f"{LINUX}-ada", "a", ADA),
    ]
    names = f"{LINUX}/hopper, {LINUX}/ada, {WINDOWS}/hopper, ada"
    assert f"error: the runners name hopper: no family with rows, or no label; there are {names}" in refused(
        capsys, "--runners", '{"hopper": "h100"}'
    )
    said = f"error: one runner is of one platform, and there are rows of {LINUX} and {WINDOWS}"
    assert said in refused(capsys, "--runners", "any")


@pytest.mark.usefixtures("rows")
def test_a_family_may_be_named_with_its_platform(capsys: pytest.CaptureFixture[str]) -> None:
    found = github(capsys, "--runners", json.dumps({f"{LINUX}/ada": "l4"}))["gpu"]["include"]
    assert [(job["kind"], job["label"]) for job in found] == [(f"{LINUX}-ada", "l4")]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("runners", "said"),
    [
        ("", f"no GPU family has a runner: {LINUX}/hopper, {LINUX}/ada"),
        ("{}", f"no GPU family has a runner: {LINUX}/hopper, {LINUX}/ada"),
        ('{"hopper": ""}', "no GPU family has a runner"),
        ('{"turing": "t4"}', "the runners name turing: no family with rows, or no label"),
        ('{"hopper": ["a", "b"]}', "the runners name hopper: no family with rows, or no label"),
        ('{"hopper": ', "the runners are not JSON: "),
    ],
)
def test_runners_that_cannot_be(capsys: pytest.CaptureFixture[str], runners: str, said: str) -> None:
    err = refused(capsys, "--runners", runners)
    assert f"error: {said}" in err
    assert "fix: set it to a runner's label, or for each family" in err


@pytest.mark.usefixtures("rows")
def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--runners", '{"hopper": "h100"}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*ALL, f"{LINUX}-hopper"]
    assert lines[-1].split()[1:] == ["h100", *HOPPER]


@pytest.mark.parametrize(
    ("files", "needed"),
    [
        ([], []),
        (["README.md", "docs/img/a.svg", "docs/results/platforms.toml", "src/notes.md", ".github/ISSUE_TEMPLATE/bug.yml"], []),
        (["docs/a.md", "ci/audit/policy.py"], [LINUX]),
        (["tests/ci/test_x.py", "wheel_hooks/factory.py", "noxfile.py", "benchmarks/table.py"], [LINUX]),
        (["ci/matrix/matrix.toml"], ALL),
        (["ci/matrix/targets.py"], ALL),
        (["ci/toolkit/locks/device.txt"], ALL),
        (["ci/device/plan.py"], ALL),
        (["ci/build/cmake.py"], ALL),
        (["tests/ci/test_x.py", "src/device/a.cu"], ALL),
        (["python/mlx_cuda/__init__.py"], ALL),
        (["CMakeLists.txt"], ALL),
        (["cmake/HostCode.cmake"], ALL),
        (["licenses/mlx.txt"], ALL),
        (["LICENSE"], ALL),
        (["pyproject.toml"], ALL),
        (["requirements/build.txt"], ALL),
        ([".github/workflows/wheels.yml"], ALL),
        (["anything/new"], ALL),
        (["docs"], ALL),
    ],
)
def test_what_a_change_needs(files: list[str], needed: list[str]) -> None:
    assert list(changes.needed(files)) == needed


def test_the_first_file_that_needs_a_platform_is_named() -> None:
    assert changes.needed(["docs/a.md", "ci/a.py", "src/b.cu", "src/c.cu"]) == {LINUX: "ci/a.py", ARM: "src/b.cu", WINDOWS: "src/b.cu"}


def test_patterns_of_needs_are_of_platforms() -> None:
    needs = {each for change in matrix.load().changes for each in change.needs}
    assert needs <= {"*", *ALL}


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """main: a, then d; topic, which is HEAD, leaves it after a. All files are of the topic but d."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    monkeypatch.setattr(changes, "REPOSITORY", tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "src/a.cu")
    git(tmp_path, "branch", "topic")
    commit(tmp_path, "src/d.cu")
    git(tmp_path, "checkout", "--quiet", "topic")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *settings, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("word\n" * 20)
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", name)


def test_what_changed_since_the_branches_parted(history: Path) -> None:
    assert changes.since("main") == []
    commit(history, "docs/é \n.md")
    commit(history, "tests/b.py")
    assert changes.since("main") == ["docs/é \n.md", "tests/b.py"]
    assert changes.since("HEAD~1") == ["tests/b.py"]
    assert changes.since(git(history, "rev-parse", "main")) == changes.since("main")


def test_what_is_moved_or_removed_counts_where_it_was(history: Path) -> None:
    (history / "docs").mkdir()
    git(history, "mv", "src/a.cu", "docs/a.md")
    git(history, "commit", "--quiet", "-m", "move")
    assert changes.since("main") == ["docs/a.md", "src/a.cu"]
    git(history, "rm", "--quiet", "docs/a.md")
    git(history, "commit", "--quiet", "-m", "remove")
    assert changes.since("main") == ["src/a.cu"]


def test_the_command_narrows(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(history, "docs/a.md")
    assert github(capsys, "--since", "main") == {"build": False, "platforms": {"include": []}}
    commit(history, "tests/b.py")
    outputs = github(capsys, "--since", "main")
    assert outputs["build"] is True
    assert outputs["platforms"]["include"] == jobs.platforms([LINUX])
    assert cli.main(["matrix", "--since", "main"]) == 0
    assert capsys.readouterr().err == f"{LINUX}: because of tests/b.py\n"
    assert [job["platform"] for job in github(capsys, "--since", "")["platforms"]["include"]] == ALL


@pytest.mark.parametrize("revision", ["nothing", "--help", "main:src", "0" * 40, "-1"])
def test_a_revision_that_is_not_here(history: Path, capsys: pytest.CaptureFixture[str], revision: str) -> None:
    err = refused(capsys, f"--since={revision}")
    assert f"error: git knows no revision {revision!r} here: " in err
    assert "\n  fix: check out the whole history (fetch-depth: 0)" in err


def test_a_history_that_is_cut_off(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(history, "checkout", "--quiet", "--orphan", "other")
    git(history, "commit", "--quiet", "-m", "other")
    assert "HEAD and main have no commit in common here: exit code 1\n  fix: check out the whole history" in refused(
        capsys, "--since", "main"
    )


def test_no_git(history: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "error: git is not installed\n  fix: install git\n" in refused(capsys, "--since", "main")
