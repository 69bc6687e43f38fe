"""An index that answers with what is no page of an index, or with nothing for a while: what is never taken for a free name."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.errors import CheckFailed, EnvironmentProblem
from ci.index import Index, client

from .index_support import Silent, serving
from .release_support import MATRIX, VERSION

JSON = "application/vnd.pypi.simple.v1+json"
ADDRESS = "check the address of the index, and for a proxy or a login page before it"
LOGIN = b"<!doctype html><title>Sign in</title><form action=login><input name=user></form>"
NAME = f"mlx_cuda-{VERSION}-py3-none-any.whl"


def body(**changes: Any) -> bytes:
    file = {"filename": NAME, "url": NAME, "hashes": {"sha256": "0" * 64}}
    page = {"meta": {"api-version": "1.1"}, "name": MATRIX.name, "files": [file]} | changes
    return json.dumps({key: value for key, value in page.items() if value is not None}).encode()


@dataclass
class Said:
    """An answer of the server."""

    status: int = 200
    kind: str | None = JSON
    data: bytes = field(default_factory=body)
    headers: tuple[tuple[str, str], ...] = ()
    drip: float = 0  # seconds between two bytes
    cut: bool = False  # half of the bytes that were promised
    raw: bytes = b""  # all of the above by hand, and
    then: bytes = b""  # what follows it without end


class Server:
    """Answers each path with what it was told to, by default with a page of one file; the clock is moved by sleeping alone."""

    def __init__(self) -> None:
        self.answer: Callable[[str], Said] = lambda _: Said()
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.slept: list[float] = []
        self.over = threading.Event()  # of what has no end
        server = self

        class Handler(Silent, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.headers.append(dict(self.headers))
                said = server.answer(self.path)
                if said.raw:
                    self.endless(said)
                    return
                self.send_response(said.status)
                for name, value in said.headers:
                    self.send_header(name, value)
                if said.kind is not None:
                    self.send_header("Content-Type", said.kind)
                self.send_header("Content-Length", str(len(said.data) * (2 if said.cut else 1)))
                self.end_headers()
                for byte in (said.data[n : n + 1] for n in range(len(said.data))) if said.drip else (said.data,):
                    try:
                        self.wfile.write(byte)
                    except OSError:
                        return
                    time.sleep(said.drip)

            def endless(self, said: Said) -> None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.write(said.raw)
                    while not server.over.wait(0.01):
                        self.wfile.write(said.then)

        self.handler = Handler

    def stands_at(self, url: str) -> None:
        self.url = f"{url}simple/"
        self.index = Index("here", (), self.url, timeout=10)

    def refused(self, said: Said) -> str:
        """Why an answer is none; it is not asked for again."""
        self.answer = lambda _: said
        before = len(self.slept)
        with pytest.raises(EnvironmentProblem) as problem:
            self.index.files(MATRIX.name)
        assert len(self.slept) == before
        why, _, fix = str(problem.value).removeprefix("cannot read the index here: ").partition("\n  fix: ")
        assert fix == ADDRESS
        return why


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    clock = SimpleNamespace(sleep=made.slept.append, monotonic=lambda: 1000 + sum(made.slept))
    monkeypatch.setattr(client, "time", clock)
    with serving(made.handler) as url:
        made.stands_at(url)
        yield made
        made.over.set()


def test_a_page(server: Server) -> None:
    """Its name may be spelled in another way, and its type may have parameters."""
    server.answer = lambda _: Said(data=body(name="MLX_CUDA"), kind=f"{JSON.upper()}; charset=utf-8")
    (file,) = server.index.files(MATRIX.name)
    assert (file.name, file.url) == (NAME, f"{server.url}{MATRIX.name}/{NAME}")
    assert server.asked == [f"/simple/{MATRIX.name}/"]
    assert server.headers[0]["Cache-Control"] == "no-cache"
    assert server.headers[0]["Accept"].startswith(JSON)


@pytest.mark.parametrize(
    "data", [b'<meta name="pypi:repository-version" content="1.0">', f'<a href="x#sha256={"0" * 64}">{NAME}</a>'.encode()]
)
def test_a_page_of_html(server: Server, data: bytes) -> None:
    """That of a project without files says what it is."""
    server.answer = lambda _: Said(kind="text/html; charset=UTF-8", data=data)
    assert len(server.index.files(MATRIX.name)) == data.count(b"href")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            Said(kind="text/html", data=LOGIN),
            "its answer is no page of an index: it lists no file, and does not say that it is of an index",
        ),
        (Said(kind="text/html", data=b""), "its answer is no page of an index: it lists no file, and does not say that it is of an index"),
        (
            Said(kind="text/html; charset=nothing", data=LOGIN),
            "its answer is no page of an index: unknown encoding: nothing",
        ),
        (Said(kind="text/html", data=b'<meta name="pypi:repository-version" content="2.0">'), "its answer is no page of an index: "),
        (Said(kind="text/plain"), "its answer is no page of an index: its content type is text/plain"),
        (Said(kind="application/json"), "its answer is no page of an index: its content type is application/json"),
        (Said(kind=None), "its answer is no page of an index: its content type is missing"),
        (Said(kind=""), "its answer is no page of an index: its content type is missing"),
        (Said(data=b"[]"), "its answer is no page of an index: the whole: Input should be "),
        (Said(data=b"[" * 100_000), "its answer is no page of an index: "),
        (Said(data=b"{"), "its answer is no page of an index: Expecting property name"),
        (Said(data=LOGIN), "its answer is no page of an index: Expecting value: line 1 column 1 (char 0)"),
        (Said(data=b""), "its answer is no page of an index: Expecting value"),
        (Said(data=body(meta=None)), "its answer is no page of an index: meta: Field required"),
        (Said(data=body(files=None)), "its answer is no page of an index: files: Field required"),
        (Said(data=body(name=None, files={})), "its answer is no page of an index: name: Field required, and 1 more"),
        (Said(data=body(files=[{"filename": NAME, "url": NAME}])), "its answer is no page of an index: files.0.hashes: Field required"),
        (Said(data=body(meta={"api-version": "2.0"})), "its answer is no page of an index: "),
        (Said(data=body(meta={"api-version": "new"})), "its answer is no page of an index: "),
        (
            Said(data=body(**{"project-status": {"status": "new"}})),
            "its answer is no page of an index: project-status.status: Input",
        ),
        (Said(data=body(name="mlx")), "its answer is no page of an index: it is the page of 'mlx'"),
        (Said(status=204, data=b""), "it answers HTTP 204"),
        (Said(status=206), "it answers HTTP 206"),
        (Said(status=300), "it answers HTTP 300"),
        (Said(status=400), "it answers HTTP 400"),
        (Said(status=410), "it answers HTTP 410"),
        (Said(status=501), "it answers HTTP 501"),
        (Said(status=302, headers=(("Location", "/simple/there"),)), "Exceeded 30 redirects."),
        (Said(status=302, headers=(("Location", "ftp://there/"),)), "No connection adapters were found for 'ftp://there/'"),
        (Said(data=b"no gzip", headers=(("Content-Encoding", "gzip"),)), "('Received response with content-encoding: gzip, but failed"),
    ],
)
def test_what_is_no_page_of_an_index(server: Server, said: Said, why: str) -> None:
    """It is no free name either, and nothing that would pass."""
    assert server.refused(said).startswith(why)


STATUSES = [(status, adding) for status in ("active", "deprecated", "archived", "quarantined", None) for adding in (False, True)]


@pytest.mark.parametrize("kind", [JSON, "text/html"])
@pytest.mark.parametrize(("status", "adding"), STATUSES)
def test_the_status_of_a_project(server: Server, kind: str, status: str | None, adding: bool) -> None:
    """PEP 792: what is quarantined is offered to nobody, and its name is not free; what is archived takes no more files."""
    marks = {"status": status, "reason": "evil\x1b"} if status else None
    html = f"<meta name='pypi:repository-version' content=1.4><a href='x#sha256={'0' * 64}'>{NAME}</a>"
    for name, content in {"": status, "-reason": "evil\x1b"}.items() if status else ():
        html += f"<meta name='pypi:project-status{name}' content='{content}'>"
    data = body(**{"project-status": marks}) if kind == JSON else html.encode()
    server.answer = lambda _: Said(kind=kind, data=data)
    if status == "quarantined" or (status == "archived" and adding):
        with pytest.raises(EnvironmentProblem) as problem:
            server.index.files(MATRIX.name, adding=adding)
        said = rf"here has {status} {MATRIX.name}: evil\x1b; it takes no file of it"
        assert str(problem.value) == f"{said}\n  fix: find out why, and have its owner or the index end it"
    else:
        assert len(server.index.files(MATRIX.name, adding=adding)) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_an_index_that_wants_credentials(server: Server, status: int) -> None:
    server.answer = lambda _: Said(status=status)
    with pytest.raises(EnvironmentProblem) as problem:
        server.index.files(MATRIX.name)
    fix = "give the credentials of the index, in its address or in ~/.netrc"
    assert str(problem.value) == f"cannot read the index here: it answers HTTP {status}\n  fix: {fix}"


def test_a_password_is_not_told(server: Server) -> None:
    server.index = Index("here", (), server.url.replace("//", "//me:secret@"), timeout=10)
    for said in (Said(status=403), Said(status=404), Said(kind="text/html", data=LOGIN), Said(data=b"{")):
        server.answer = lambda _, said=said: said  # type: ignore[misc]
        with pytest.raises(EnvironmentProblem) as problem:
            server.index.files(MATRIX.name)
        assert "secret" not in str(problem.value)
    assert server.headers[0]["Authorization"] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize("kind", [JSON, "text/html"])
def test_a_name_is_free_where_an_index_says_so(server: Server, kind: str) -> None:
    server.answer = lambda path: Said(kind=kind) if path == "/simple/" else Said(status=404, kind="text/html", data=LOGIN)
    assert server.index.files(MATRIX.name) == ()
    assert server.asked == [f"/simple/{MATRIX.name}/", "/simple/"]


@pytest.mark.parametrize(
    ("root", "said"),
    [
        (Said(status=404, kind="text/html"), "HTTP 404, text/html"),
        (Said(kind="text/plain"), "HTTP 200, text/plain"),
        (Said(kind=None), "HTTP 200, no content type"),
    ],
)
def test_a_server_that_knows_nothing_at_all(server: Server, root: Said, said: str) -> None:
    """As where its address has a slip: it has no list of projects."""
    server.answer = lambda path: root if path == "/simple/" else Said(status=404)
    with pytest.raises(EnvironmentProblem) as problem:
        server.index.files(MATRIX.name)
    why = f"it answers HTTP 404 for {MATRIX.name}, but is no index: its list of projects is {said}"
    assert str(problem.value) == f"cannot read the index here: {why}\n  fix: {ADDRESS}"


def test_a_404_of_somebody_else(server: Server) -> None:
    """Where a login stands before the index."""
    there = server.url.replace("127.0.0.1", "localhost") + "login"
    server.answer = lambda path: Said(status=404) if path.endswith("login") else Said(status=302, headers=(("Location", there),))
    with pytest.raises(
        EnvironmentProblem, match=r"^cannot read the index here: it leads to localhost, which answers HTTP 404\n  fix: check the address"
    ):
        server.index.files(MATRIX.name)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_an_index_that_is_out_of_order_for_two_minutes(server: Server, capsys: pytest.CaptureFixture[str], status: int) -> None:
    server.answer = lambda _: Said(status=status) if sum(server.slept) < 120 else Said()
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == [1, 2, 4, 8, 16, 32, 60]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 7
    assert said[0].startswith(f"here: it answers HTTP {status}")
    assert said[0].endswith("; retrying in 1 s")


def test_an_index_that_stays_out_of_order(server: Server) -> None:
    server.answer = lambda _: Said(status=503)
    with pytest.raises(EnvironmentProblem) as problem:
        server.index.files(MATRIX.name)
    fix = "check the network and the index, then run again"
    assert str(problem.value) == f"cannot read the index here: it answers HTTP 503 Service Unavailable\n  fix: {fix}"
    assert server.slept == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(("header", "waits"), [("90", 90), ("0", 1), ("soon", 1), ("-7", 1), ("Thu, 01 Jan 1970 00:00:00 GMT", 1)])
def test_it_is_asked_again_when_it_says(server: Server, header: str, waits: int) -> None:
    server.answer = lambda _: Said() if server.slept else Said(status=429, headers=(("Retry-After", header),))
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == [waits]


def test_it_asks_for_more_than_there_is(server: Server) -> None:
    server.answer = lambda _: Said(status=429, headers=(("Retry-After", "301"),))
    with pytest.raises(EnvironmentProblem) as problem:
        server.index.files(MATRIX.name)
    assert str(problem.value) == "cannot read the index here: it answers HTTP 429 Too Many Requests\n  fix: wait for 301 s, then run again"
    assert server.slept == []


def test_an_answer_that_breaks_off(server: Server) -> None:
    server.answer = lambda _: Said() if server.slept else Said(cut=True)
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == [1]


def test_an_index_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.index = Index("here", (), server.url, timeout=0.2)

    def answer(_: str) -> Said:
        if not server.slept:
            server.over.wait()
        return Said()

    server.answer = answer
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == [1]


STATUS = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    "a body in drops": Said(drip=0.1),
    "headers in drops": Said(raw=STATUS + b"X: ", then=b"x"),
    "a status in drops": Said(raw=b"HTTP/1.1 200 ", then=b"O"),
    "interim answers": Said(raw=b"HTTP/1.1 100 Continue\r\n\r\n", then=b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a packed file's name": Said(raw=STATUS + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\xff", then=b"x"),
    "chunks' extensions": Said(raw=STATUS + b"Transfer-Encoding: chunked\r\n\r\n1;x=", then=b"x"),
    "chunks' trailers": Said(raw=STATUS + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", then=b"X: x\r\n"),
}


@pytest.mark.parametrize(
    "endless", [pytest.param(each, marks=pytest.mark.nightly if number % 3 else ()) for number, each in enumerate(ENDLESS)]
)
def test_an_answer_that_does_not_end(server: Server, endless: str) -> None:
    """Each of its bytes is in time, and all of them would take minutes."""
    server.index = Index("here", (), server.url, timeout=0.3)
    server.answer = lambda _: Said() if server.slept else ENDLESS[endless]
    started = time.monotonic()
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == [1]
    assert time.monotonic() - started < 5


def test_a_redirect_with_a_page_that_does_not_end(server: Server) -> None:
    """Where it leads is known before that page, which nobody wants."""
    redirect = Said(raw=b"HTTP/1.1 302 Found\r\nLocation: /simple/there/\r\n\r\n", then=bytes(1 << 20))
    server.answer = lambda path: Said() if path == "/simple/there/" else redirect
    assert len(server.index.files(MATRIX.name)) == 1
    assert server.slept == []


@pytest.mark.parametrize("headers", [b"X: x\r\n" * 101, b"X: " + b"x" * (1 << 16)], ids=["many", "a long one"])
def test_too_many_headers(server: Server, headers: bytes) -> None:
    server.answer = lambda _: Said(raw=STATUS + headers + b"\r\n\r\n")
    with pytest.raises(EnvironmentProblem, match=r"^cannot read the index here: .*headers?\b.*\n  fix: "):
        server.index.files(MATRIX.name)
    assert server.slept == [1, 2, 4, 8]


def test_what_it_says_is_told_in_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda _: Said() if server.slept else Said(raw=b"HTTP/1.1 503 \x1b[2J" + b"x" * 9999 + b"\r\n\r\n")
    assert len(server.index.files(MATRIX.name)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(r"here: it answers HTTP 503 \x1b[2Jxxx")
    assert len(line) < 400


def test_an_answer_without_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of few bytes that become many."""
    monkeypatch.setattr(client, "LARGEST_PAGE", 1 << 20)
    packed = gzip.compress(bytes((1 << 20) + 1))
    assert server.refused(Said(data=packed, headers=(("Content-Encoding", "gzip"),))) == "its answer has more than 1 MiB"


def test_an_index_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute, and not five, for who has no network."""
    slept: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 1000 + sum(slept)))
    fix = "check the network and the index, then run again"
    with pytest.raises(EnvironmentProblem, match=f"^cannot read the index there: .*\n  fix: {fix}$"):
        Index("there", (), "http://127.0.0.1:9/simple/", timeout=1).files(MATRIX.name)
    assert slept == [1, 2, 4, 8]


def test_a_file(server: Server, tmp_path: Path) -> None:
    """The bytes of a broken attempt are not in it."""
    wheel = bytes(range(256)) * 1000
    page = body(files=[{"filename": NAME, "url": "../wheel", "hashes": {"sha256": hashlib.sha256(wheel).hexdigest()}}])
    attempts = [Said(status=503), Said(data=wheel, cut=True), Said(data=wheel)]
    server.answer = lambda path: attempts.pop(0) if path.endswith("wheel") else Said(data=page)
    (remote,) = server.index.files(MATRIX.name)
    assert server.index.fetch(remote, tmp_path / "new").read_bytes() == wheel
    assert server.slept == [1, 2]


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        (
            Said(status=404),
            EnvironmentProblem,
            rf"^cannot read the index here: it answers HTTP 404 for /simple/{MATRIX.name}/{NAME}\n  fix: ",
        ),
        (
            Said(data=b"other"),
            CheckFailed,
            rf"^here serves other bytes of {NAME} than it lists: sha256 d9298a10d1b0\w+ instead of 0{{64}}$",
        ),
    ],
)
def test_a_file_that_is_not_there(server: Server, tmp_path: Path, said: Said, error: type[Exception], why: str) -> None:
    (remote,) = server.index.files(MATRIX.name)
    server.answer = lambda _: said
    with pytest.raises(error, match=why):
        server.index.fetch(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []
