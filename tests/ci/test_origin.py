"""``python -m ci origin``: what a pull request built never reaches our own machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ci import __main__ as cli
from ci.trial import origin
from ci.trial.actions import Run

from .trial_support import make_gh

if TYPE_CHECKING:
    from pathlib import Path

OWN = {"id": 7, "event": "push", "head_branch": "main", "head_repository": {"full_name": "owner/name"}}
RUN = Run("Owner/name", 7)


@pytest.mark.parametrize("event", ["push", "workflow_dispatch", "schedule"])
def test_the_repositorys_own_runs(event: str) -> None:
    assert origin.objection({**OWN, "event": event}, RUN) is None


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "workflow_run", "issue_comment", "merge_group", None, "new"])
def test_an_event_that_anybody_can_cause(event: str | None) -> None:
    assert f"started by the event {event!r}" in str(origin.objection({**OWN, "event": event}, RUN))


@pytest.mark.parametrize("head", [{"full_name": "stranger/name"}, None, {}])
def test_a_fork(head: dict[str, str] | None) -> None:
    assert "its commit is of the repository" in str(origin.objection({**OWN, "head_repository": head}, RUN))


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (OWN, 0, "run 7 of owner/name: push of main"),
        ({**OWN, "event": "pull_request"}, 1, "are not executed here"),
        ({**OWN, "id": 8}, 1, "answered with run 8"),
        ({"message": "?"}, 1, "answered with run None"),
        (None, 2, "Not Found (HTTP 404)"),
    ],
)
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, code: int, said: str
) -> None:
    gh = make_gh(tmp_path / "gh", monkeypatch)
    if answer is not None:
        gh.answer("repos/owner/name/actions/runs/7", json.dumps(answer))
    assert cli.main(["origin", "7", "--repository", "owner/name"]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["origin", "main"]) == 2
    assert "is no workflow run" in capsys.readouterr().err
