"""``python -m ci origin``: what a pull request built, or a workflow that makes no wheels, never reaches our own machines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as cli
from ci.matrix import REPOSITORY
from ci.trial import origin
from ci.trial.actions import Run

from .trial_support import Gh, make_gh

WHEELS = ".github/workflows/wheels.yml"
OWN: dict[str, Any] = {
    "id": 7,
    "event": "push",
    "head_branch": "main",
    "repository": {"full_name": "owner/name"},
    "head_repository": {"full_name": "owner/name"},
    "path": WHEELS,
    "status": "completed",
    "conclusion": "success",
}
RUN = Run("Owner/name", 7)


def said(**changed: Any) -> str | None:
    return origin.objection({**OWN, **changed}, RUN, itself=False)


@pytest.mark.parametrize("event", ["push", "workflow_dispatch", "schedule"])
def test_the_repositorys_own_runs(event: str) -> None:
    assert said(event=event) is None


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "workflow_run", "issue_comment", "merge_group", None, "new"])
def test_an_event_that_anybody_can_cause(event: str | None) -> None:
    assert said(event=event) == f"it was started by the event {event!r}, expected one of push, schedule, workflow_dispatch"


@pytest.mark.parametrize("other", [{"full_name": "stranger/name"}, None, {}])
@pytest.mark.parametrize(("key", "what"), [("head_repository", "its commit"), ("repository", "it")])
def test_a_fork_and_another_repository(key: str, what: str, other: dict[str, str] | None) -> None:
    assert said(**{key: other}) == f"{what} is of the repository {(other or {}).get('full_name')}, expected Owner/name"


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        (WHEELS, True),
        (f"{WHEELS}@refs/heads/main", True),
        (".github/workflows/release.yml@v1", True),
        (".github/workflows/nightly.yml", True),
        (".github/workflows/upstream.yml", False),
        (".github/workflows/wheels.yml.yml", False),
        (".github/workflows/evil.yml@.github/workflows/wheels.yml", False),
        ("wheels.yml", False),
        ("dynamic/pages", False),
        (None, False),
    ],
)
def test_of_which_workflow(path: str | None, *, taken: bool) -> None:
    found = said(path=path)
    assert (found is None) == taken
    assert taken or str(found).startswith(f"it is a run of {str(path).partition('@')[0]}, expected one of .github/workflows/wheels.yml, ")


def test_every_workflow_that_makes_wheels_is_taken() -> None:
    """Those that call wheels.yml; nightly.yml and others may come and go."""
    folder = REPOSITORY / ".github" / "workflows"
    callers = {
        path.name for path in folder.glob("*.yml") if re.search(r"uses: \./\.github/workflows/wheels\.yml\b", path.read_text("utf-8"))
    }
    assert {f".github/workflows/{name}" for name in callers | {"wheels.yml"}} <= set(origin.WORKFLOWS)


@pytest.mark.parametrize(
    ("status", "conclusion"),
    [("in_progress", None), ("queued", None), ("completed", "failure"), ("completed", "cancelled"), ("completed", None), (None, "success")],
)
def test_a_run_that_is_not_over_or_failed(status: str | None, conclusion: str | None) -> None:
    state = {"status": status, "conclusion": conclusion}
    assert said(**state) == f"it is {status}, with the conclusion {conclusion}, expected completed and success"
    assert origin.objection({**OWN, **state}, RUN, itself=True) is None, "a release tries its own wheels before it ends"


@pytest.mark.parametrize("key", ["id", "event", "path", "repository", "head_repository"])
def test_all_else_is_asked_of_the_asking_run_too(key: str) -> None:
    assert origin.objection({**OWN, key: None}, RUN, itself=True)


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    made = make_gh(tmp_path / "gh", monkeypatch)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setenv("GITHUB_RUN_ID", "8")
    return made


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (OWN, 0, f"run 7 of owner/name: push of main, {WHEELS}\n"),
        ({**OWN, "event": "pull_request"}, 1, "error: the artifacts of run 7 of owner/name may not run here: it was started by"),
        (
            {**OWN, "conclusion": "failure"},
            1,
            "expected completed and success\n  fix: start wheels.yml on a branch of owner/name, and wait for its end\n",
        ),
        ({**OWN, "id": 8}, 1, "the API answered with run 8\n"),
        ({"message": "?"}, 1, "the API answered with run None\n"),
        (None, 2, "Not Found (HTTP 404)"),
    ],
)
def test_the_command(gh: Gh, capsys: pytest.CaptureFixture[str], answer: Any, code: int, words: str) -> None:
    if answer is not None:
        gh.answer("repos/owner/name/actions/runs/7", json.dumps(answer))
    assert cli.main(["origin", "7"]) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
    assert bool(captured.out) == (code == 0)


def test_a_release_asks_about_itself(gh: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    release = {**OWN, "path": ".github/workflows/release.yml", "status": "in_progress", "conclusion": None}
    gh.answer("repos/owner/name/actions/runs/7", json.dumps(release))
    assert cli.main(["origin", "7"]) == 1
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    assert cli.main(["origin", "7"]) == 0


@pytest.mark.parametrize(
    "target",
    ["main", "https://github.com/owner/name/actions/runs/7", "", "0", "07", "-7", "7 ", "7\n", "\u0667", "7/../8", "1" * 20],
)
def test_digits_alone(target: str, gh: Gh, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["origin", "--", target]) == 2
    assert f"error: {target!r} is no id of a workflow run\n  fix: give the digits" in capsys.readouterr().err
    assert not (gh.folder / "calls").exists()


def test_the_longest_id(gh: Gh, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["origin", "9" * 19]) == 2
    assert "Not Found" in capsys.readouterr().err


@pytest.mark.parametrize("repository", [None, "", "name", "a/b/c", "owner/..", "owner/.", "../name"])
def test_the_repository_is_the_workflows_own(
    repository: str | None, gh: Gh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY")
    if repository is not None:
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    assert cli.main(["origin", "7"]) == 2
    assert "error: run 7 has no repository\n  fix: set GITHUB_REPOSITORY to OWNER/NAME" in capsys.readouterr().err
    assert not (gh.folder / "calls").exists()
    with pytest.raises(SystemExit):
        cli.main(["origin", "7", "--repository", "owner/name"])
