"""``python -m ci origin``: what a pull request built never reaches our own machines."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from ci import __main__ as cli
from ci.trial import origin

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = {"id": 7, "event": "push", "head_branch": "main", "head_repository": {"full_name": "owner/name"}}


@pytest.mark.parametrize("event", ["push", "workflow_dispatch", "schedule"])
def test_the_repositorys_own_runs(event: str) -> None:
    assert origin.objection({**OWN, "event": event}, "Owner/Name") is None


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "workflow_run", "issue_comment", "merge_group", None, "new"])
def test_an_event_that_anybody_can_cause(event: str | None) -> None:
    assert f"started by the event {event!r}" in str(origin.objection({**OWN, "event": event}, "owner/name"))


@pytest.mark.parametrize("head", [{"full_name": "stranger/name"}, None, {}])
def test_a_fork(head: dict[str, str] | None) -> None:
    assert "its commit is of the repository" in str(origin.objection({**OWN, "head_repository": head}, "owner/name"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a server in place of GitHub answers, by path."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("GITHUB_API_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
        monkeypatch.setenv("GH_TOKEN", "secret")
        yield answers
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (OWN, 0, "run 7 of owner/name: push of main"),
        ({**OWN, "event": "pull_request"}, 1, "are not executed here"),
        ({**OWN, "id": 8}, 1, "answered with run 8"),
        ({"message": "?"}, 1, "answered with run None"),
        ([1], 2, "does not answer as GitHub's API does"),
        (None, 2, "not found"),
    ],
)
def test_the_command(runs: dict[str, Any], capsys: pytest.CaptureFixture[str], answer: Any, code: int, said: str) -> None:
    runs["/repos/owner/name/actions/runs/7"] = answer
    assert cli.main(["origin", "7"]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["origin", "main"]) == 2
    assert "is no workflow run" in capsys.readouterr().err
