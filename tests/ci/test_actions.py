"""A run's artifacts through the API: a server on this machine answers as GitHub's does, another one stands for its storage."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.matrix import host_platform
from ci.trial import actions, artifacts
from ci.trial.actions import Run

from .audit_support import NAMES, write_wheel
from .trial_support import FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = "ghp_secret"  # noqa: S105
RUN = Run("owner/name", 42)
HOST = host_platform().name
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Server:
    """Answers each path with what it is told to, and remembers every request."""

    host: str
    routes: dict[str, Callable[[], Answer]] = field(default_factory=dict)
    seen: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def count(self, path: str) -> int:
        return sum(seen == path for seen, _ in self.seen)


def serve(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.seen.append((self.path, self.headers.get("Authorization")))
            status, headers, body = server.routes.get(self.path, lambda: (404, {}, b"{}"))()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.port = listening.server_address[1]
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def storage() -> Iterator[Server]:
    """Another host than the API, as far as a client can tell."""
    yield from serve(Server("localhost"))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("GITHUB_TOKEN", "GITHUB_REPOSITORY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib3.util.retry.Retry.get_backoff_time", lambda _: 0)
    monkeypatch.setattr("urllib3.util.retry.Retry.sleep_for_retry", lambda *_: pytest.fail("slept for as long as the server says"))
    for server in serve(Server("127.0.0.1")):
        monkeypatch.setenv("GITHUB_API_URL", server.address)
        monkeypatch.setenv("GH_TOKEN", TOKEN)
        yield server


LIST = "/repos/owner/name/actions/runs/42/artifacts?per_page=100"


def entry(number: int, name: str, **changed: Any) -> dict[str, Any]:
    return {"id": number, "name": name, "size_in_bytes": 1000, "expired": False, "digest": None, **changed}


def listed(api: Server, *entries: dict[str, Any], path: str = LIST, following: str = "") -> None:
    headers = {"Link": f'<{following}>; rel="next"'} if following else {}
    body = json.dumps({"total_count": len(entries), "artifacts": entries}).encode()
    api.routes[path] = lambda: (200, headers, body)


def stored(api: Server, storage: Server, number: int, body: bytes) -> None:
    """The API sends a download on to the storage, with a signed address."""
    api.routes[f"/repos/owner/name/actions/artifacts/{number}/zip"] = lambda: (302, {"Location": f"{storage.address}/{number}?sig=x"}, b"")
    storage.routes[f"/{number}?sig=x"] = lambda: (200, {}, body)


@pytest.fixture
def zipped(tmp_path: Path) -> bytes:
    """An artifact with a good wheel."""
    wheel = write_wheel(tmp_path / "dist" / NAMES["linux"], dict(FILES))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.write(wheel, wheel.name)
    return data.getvalue()


@pytest.mark.parametrize("how", ["id", "address"])
def test_a_run_becomes_its_wheels(
    api: Server, storage: Server, zipped: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    listed(api, entry(7, f"wheels-{HOST}", digest=f"sha256:{hashlib.sha256(zipped).hexdigest()}"), entry(8, "wheels-other-platform"))
    stored(api, storage, 7, zipped)
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    target = {"id": "42", "address": "https://github.com/owner/name/actions/runs/42/job/3?pr=1"}[how]
    wheels = artifacts.obtain(target, tmp_path / "downloaded")
    assert [wheel.name for wheel in wheels] == [NAMES["linux"]]
    assert [path for path, _ in api.seen] == [LIST, "/repos/owner/name/actions/artifacts/7/zip"]


def test_the_token_stays_with_the_api(api: Server, storage: Server, zipped: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(api, entry(7, "wheels"))
    stored(api, storage, 7, zipped)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    actions.download(RUN, tmp_path / "downloaded")
    assert {authorization for _, authorization in api.seen} == {f"Bearer {TOKEN}"}
    assert storage.seen == [("/7?sig=x", None)]


def test_the_token_does_not_go_to_another_port_either(api: Server, storage: Server, zipped: bytes, tmp_path: Path) -> None:
    storage.host = "127.0.0.1"
    listed(api, entry(7, "wheels"))
    stored(api, storage, 7, zipped)
    actions.download(RUN, tmp_path / "downloaded")
    assert storage.seen == [("/7?sig=x", None)]


def test_a_renamed_repository_still_gets_the_token(api: Server) -> None:
    api.routes[LIST] = lambda: (301, {"Location": f"{api.address}/repositories/1"}, b"")
    listed(api, entry(7, "wheels"), path="/repositories/1")
    assert [each.number for each in actions.Api().artifacts(RUN)] == [7]
    assert api.seen[-1] == ("/repositories/1", f"Bearer {TOKEN}")


def test_all_pages_are_read(api: Server) -> None:
    listed(api, *(entry(number, "x") for number in range(100)), following=f"{api.address}/page2")
    listed(api, entry(100, f"wheels-{HOST}"), path="/page2")
    found = list(actions.Api().artifacts(RUN))
    assert [each.number for each in found] == list(range(101))
    assert [each.number for each in actions.choose(found, RUN)] == [100]


def test_a_page_on_another_host_is_refused(api: Server, storage: Server) -> None:
    listed(api, following=f"{storage.address}/page2")
    with pytest.raises(EnvironmentProblem, match="sends on to another host"):
        list(actions.Api().artifacts(RUN))
    assert storage.seen == []


def test_all_are_taken_where_none_is_named_after_this_platform(api: Server) -> None:
    listed(api, entry(1, "dist"), entry(2, "more"), entry(3, "old", expired=True))
    assert [each.number for each in actions.choose(list(actions.Api().artifacts(RUN)), RUN)] == [1, 2]


def test_expired_and_missing_artifacts(api: Server) -> None:
    listed(api, entry(1, f"wheels-{HOST}", expired=True), entry(2, "report"))
    with pytest.raises(EnvironmentProblem, match=f"of run 42 have expired: wheels-{HOST}\n  cure: run the workflow again"):
        actions.choose(list(actions.Api().artifacts(RUN)), RUN)
    with pytest.raises(EnvironmentProblem, match="run 42 of owner/name has no artifacts\n  cure: wait"):
        actions.choose([], RUN)


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, r"the token is not valid \(401\)\n  cure: make a new one"),
        (403, {"X-RateLimit-Remaining": "59"}, r"the token may not read it \(403\)\n  cure: give the token the permission"),
        (
            403,
            {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1700000000"},
            r"rate limit is used up\n  cure: try again after 22:13 UTC",
        ),
        (403, {"Retry-After": "60"}, r"rate limit is used up\n  cure: try again in 60 s"),
        (429, {}, r"rate limit is used up\n  cure: try again later"),
        (404, {}, r"run 42 of owner/name: not found \(404\)\n  cure: check the id"),
        (410, {}, r"expired \(410\)\n  cure: run the workflow again"),
        (418, {}, r"the server answers 418 \(418\)"),
    ],
)
def test_a_refusal_has_a_cure_and_is_not_repeated(api: Server, status: int, headers: dict[str, str], said: str) -> None:
    api.routes[LIST] = lambda: (status, headers, b"{}")
    with pytest.raises(EnvironmentProblem, match=said) as raised:
        list(actions.Api().artifacts(RUN))
    assert api.count(LIST) == 1
    assert TOKEN not in str(raised.value)


def test_a_server_that_is_ill_is_asked_again(api: Server) -> None:
    good: list[Callable[[], Answer]] = []
    listed(api, entry(7, "wheels"))
    good.append(api.routes[LIST])
    api.routes[LIST] = lambda: (502, {}, b"") if api.count(LIST) < 3 else good[0]()
    assert [each.number for each in actions.Api().artifacts(RUN)] == [7]
    api.seen.clear()
    api.routes[LIST] = lambda: (503, {"Retry-After": "3600"}, b"")
    with pytest.raises(EnvironmentProblem, match="the server answers 503"):
        list(actions.Api().artifacts(RUN))
    assert api.count(LIST) == 4


def test_no_server(monkeypatch: pytest.MonkeyPatch, api: Server, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match=r"owner/name: http://127.0.0.1:9 cannot be reached \(ConnectionError\)\n  cure: "):
        list(actions.Api().artifacts(RUN))
    assert caplog.text == ""


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]", b'{"artifacts": [{"id": 1}]}'])
def test_another_kind_of_server(api: Server, body: bytes) -> None:
    api.routes[LIST] = lambda: (200, {}, body)
    with pytest.raises(EnvironmentProblem, match="does not answer as GitHub's API does\n  cure: check GITHUB_API_URL"):
        list(actions.Api().artifacts(RUN))


def test_a_token_is_needed_and_never_sent_in_the_clear(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_API_URL", "http://api.example.org")
    with pytest.raises(EnvironmentProblem, match="expected an https address"):
        actions.Api()
    monkeypatch.delenv("GITHUB_API_URL")
    assert actions.Api().base == actions.API
    monkeypatch.delenv("GH_TOKEN")
    with pytest.raises(EnvironmentProblem, match="with a token only\n  cure: set GH_TOKEN"):
        actions.Api()


def test_an_artifact_that_is_not_what_was_uploaded(api: Server, storage: Server, zipped: bytes, tmp_path: Path) -> None:
    listed(api, entry(7, "wheels", digest="sha256:" + "0" * 64))
    stored(api, storage, 7, zipped)
    with pytest.raises(CheckFailed, match="is not what was uploaded: it has sha256"):
        actions.download(RUN, tmp_path)


def test_an_artifact_that_is_too_large_by_its_word_or_in_fact(
    api: Server, storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MAX_BYTES", 2**20)
    listed(api, entry(7, "wheels", size_in_bytes=2**21))
    with pytest.raises(CheckFailed, match="artifact 'wheels' has 2 MiB or more, expected at most 1"):
        actions.download(RUN, tmp_path)
    listed(api, entry(7, "wheels"))
    stored(api, storage, 7, bytes(2**21))
    with pytest.raises(CheckFailed, match="expected at most 1"):
        actions.download(RUN, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**20


def test_a_download_that_breaks_off(api: Server, storage: Server, tmp_path: Path) -> None:
    listed(api, entry(7, "wheels"))
    stored(api, storage, 7, b"")
    storage.routes["/7?sig=x"] = lambda: (200, {"Content-Length": "1000", "Connection": "close"}, b"half")
    with pytest.raises(EnvironmentProblem, match=r"the download of 'wheels' broke off \(\w+\)\n  cure: try again") as raised:
        actions.download(RUN, tmp_path)
    assert "sig=" not in str(raised.value)


def test_a_storage_that_refuses_keeps_its_address_to_itself(api: Server, storage: Server, tmp_path: Path) -> None:
    listed(api, entry(7, "wheels"))
    stored(api, storage, 7, b"")
    storage.routes["/7?sig=x"] = lambda: (410, {}, b"")
    with pytest.raises(EnvironmentProblem, match=r"artifact 'wheels': expired \(410\)") as raised:
        actions.download(RUN, tmp_path)
    assert "sig=" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "run"),
    [
        ("https://github.com/o/n/actions/runs/7", Run("o/n", 7)),
        ("https://github.example.org/o/n/actions/runs/7/attempts/2#summary", Run("o/n", 7)),
        ("7", Run("from/option", 7)),
        ("dist/some.zip", None),
        ("https://github.com/o/n/pull/7", None),
        ("-7", None),
    ],
)
def test_what_names_a_run(target: str, run: Run | None) -> None:
    assert Run.parse(target, "from/option") == run


@pytest.mark.parametrize("repository", ["", "name", "a/b/c", "a/b?x=", "../x/y"])
def test_an_id_alone_needs_a_repository(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    with pytest.raises(EnvironmentProblem, match="run 7 of which repository\\?\n  cure: give --repository OWNER/NAME"):
        Run.parse("7")


def test_the_command_line(api: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", "42", "--repository", "owner/name", "--extra", "cpu"]) == 2
    assert "run 42 of owner/name: not found (404)" in capsys.readouterr().err
