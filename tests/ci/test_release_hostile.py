"""A release against an index that is hostile, or only out of order: whatever it says, nothing is lost and nothing is sent twice.

Real twine, in this process, a server of HTTP, and a clock that waiting alone moves.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from ci.errors import CheckFailed, CiError, EnvironmentProblem
from ci.index import Index, client
from ci.release import upload as uploading
from ci.release.dist import Dist, complete
from ci.release.publish import publish
from ci.release.upload import Limits
from ci.release.verify import verify

from .index_support import Silent, serving
from .release_support import MATRIX, VERSION, make_dist

JSON = "application/vnd.pypi.simple.v1+json"
LOGIN = b"<!doctype html><title>Sign in</title><form action=login><input name=user></form>"
FAR = 10**9


@dataclass
class Answer:
    status: int = 200
    data: bytes = b""
    kind: str = JSON
    after: str = ""


class Hostile:
    """An index that keeps what it is sent, and from the so-manieth upload on answers as `trouble` says; None is its honest answer."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.held: dict[str, bytes] = {}
        self.posts: Counter[str] = Counter()  # that it had, or took
        self.begins = FAR  # so many files that it holds
        self.since: float | None = None  # when the trouble began
        self.trouble: Callable[[str], Answer | None] = lambda _: None
        server = self

        class Handler(Silent, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(server.troubled("GET") or server.page())

            def do_POST(self) -> None:
                header = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
                message = email.message_from_bytes(header + self.rfile.read(int(self.headers["Content-Length"])), policy=email.policy.HTTP)
                (part,) = (part for part in message.walk() if part.get_filename())
                self.answer(server.troubled("POST") or server.take(str(part.get_filename()), part.get_payload(decode=True)))

            def answer(self, said: Answer) -> None:
                self.send_response(said.status)
                self.send_header("Content-Type", said.kind)
                if said.after:
                    self.send_header("Retry-After", said.after)
                self.send_header("Content-Length", str(len(said.data)))
                self.end_headers()
                self.wfile.write(said.data)

        self.handler = Handler

    def stands_at(self, url: str) -> None:
        self.url = url
        target = ("--repository-url", self.url, "--username", "me", "--password", "mine")
        self.index = Index("hostile", target, f"{self.url}simple/", timeout=10)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def troubled(self, method: str) -> Answer | None:
        if len(self.held) < self.begins:
            return None
        self.since = self.now if self.since is None else self.since
        return self.trouble(method)

    def take(self, name: str, data: Any) -> Answer:
        self.posts[name] += 1
        if name in self.held:
            return Answer(400, b"File already exists", "text/plain")
        self.held[name] = data
        return Answer(kind="text/plain")

    def page(self, *spoiled: dict[str, Any], **changes: Any) -> Answer:
        """The honest page, with these changes of each file, after others."""
        files = [
            {"filename": name, "url": name, "hashes": {"sha256": hashlib.sha256(data).hexdigest()}} | changes
            for name, data in self.held.items()
        ]
        twice = [file | each for each in spoiled for file in files]
        return Answer(data=json.dumps({"meta": {"api-version": "1.1"}, "name": MATRIX.name, "files": twice + files}).encode())

    def publish(self, dist: Dist) -> None:
        publish(dist, self.index, tags=(), limits=Limits(upload=60))

    def whole(self, dist: Dist) -> bool:
        """Nothing lost, nothing sent twice."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in self.held.items()}
        return digests == {entry.name: entry.sha256 for entry in dist.entries} and set(self.posts.values()) == {1}


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, twine_here: None) -> Iterator[Hostile]:
    made = Hostile()
    clock = SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now)
    for module in (client, uploading):
        monkeypatch.setattr(module, "time", clock)
    with serving(made.handler) as url:
        made.stands_at(url)
        yield made


@pytest.fixture
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    return complete(make_dist(tmp_path_factory.mktemp("release") / "dist"))


def outage(hostile: Hostile, *methods: str, status: int = 503, after: str = "") -> Callable[[str], Answer | None]:
    """Two minutes of it, from the moment on at which it is first met."""
    return lambda method: (
        Answer(status, kind="text/html", after=after) if method in methods and hostile.now < (hostile.since or 0) + 120 else None
    )


@pytest.mark.parametrize("begins", [pytest.param(0, marks=pytest.mark.nightly), 1, pytest.param(5, marks=pytest.mark.nightly), 6])
@pytest.mark.parametrize("methods", [("GET",), ("GET", "POST")])
def test_503_for_two_minutes(hostile: Hostile, dist: Dist, begins: int, methods: tuple[str, ...]) -> None:
    """The same run goes on, wherever it meets it."""
    hostile.begins, hostile.trouble = begins, outage(hostile, *methods)
    hostile.publish(dist)
    assert hostile.whole(dist)
    assert hostile.since is not None
    assert hostile.now >= hostile.since + 120


def test_503_for_two_minutes_for_uploads_alone(hostile: Hostile, dist: Dist) -> None:
    hostile.begins, hostile.trouble = 3, outage(hostile, "POST")
    hostile.publish(dist)
    assert hostile.whole(dist)
    assert 1120 <= hostile.now < 1180


def test_an_upload_that_is_kept_and_answered_with_503(hostile: Hostile, dist: Dist) -> None:
    """twine sends it again by itself while it is told so; the page has the last word."""
    take, refused = hostile.take, iter([True])

    def takes(name: str, data: Any) -> Answer:
        said = take(name, data)
        return Answer(503, kind="text/plain") if next(refused, False) else said

    hostile.take = takes  # type: ignore[method-assign]
    hostile.publish(dist)
    assert {name: hashlib.sha256(data).hexdigest() for name, data in hostile.held.items()} == {e.name: e.sha256 for e in dist.entries}
    assert sorted(hostile.posts.values()) == [1, 1, 1, 1, 1, 2], "the second was refused: the index has it already"


def test_429_with_the_time_to_wait(hostile: Hostile, dist: Dist) -> None:
    hostile.begins, hostile.trouble = 2, outage(hostile, "GET", status=429, after="121")
    hostile.publish(dist)
    assert hostile.whole(dist)
    assert hostile.now == 1121


TROUBLES: dict[str, tuple[Callable[[Hostile], Answer], type[CiError], str]] = {
    "a login page": (lambda _: Answer(data=LOGIN, kind="text/html"), EnvironmentProblem, "is no page of an index"),
    "a login page that says 404": (lambda _: Answer(404, LOGIN, "text/html"), EnvironmentProblem, "but is no index"),
    "a login page that says that it is JSON": (lambda _: Answer(data=LOGIN), EnvironmentProblem, "is no page of an index"),
    "no files": (
        lambda _: Answer(data=b'{"meta": {"api-version": "1.1"}, "name": "mlx-cuda"}'),
        EnvironmentProblem,
        "files: Field required",
    ),
    "a list": (lambda _: Answer(data=b"[]"), EnvironmentProblem, "is no page of an index"),
    "503 for good": (lambda _: Answer(503), EnvironmentProblem, "HTTP 503"),
    "429 for an hour": (lambda _: Answer(429, after="3600"), EnvironmentProblem, "wait for 3600 s"),
    "each name twice, other bytes first": (lambda its: its.page({"hashes": {"sha256": "0" * 64}}), EnvironmentProblem, "2 times"),
    "each name twice, with the same bytes": (lambda its: its.page({}), EnvironmentProblem, "2 times"),
    "all yanked": (lambda its: its.page(yanked="a mistake"), CheckFailed, "was yanked"),
    "other bytes": (lambda its: its.page(hashes={"sha256": "0" * 64}), CheckFailed, "has other bytes"),
    "no digests": (lambda its: its.page(hashes={"md5": "0"}), EnvironmentProblem, "without a sha256"),
    "quarantine": (
        lambda _: Answer(
            data=b'{"meta": {"api-version": "1.4"}, "name": "mlx-cuda", "files": [], "project-status": {"status": "quarantined"}}'
        ),
        EnvironmentProblem,
        "hostile has quarantined mlx-cuda; it takes no file of it",
    ),
}


SPOILED = [name for name in TROUBLES if re.match("each|all|other|no digests", name)]  # that need a file which is there


@pytest.mark.parametrize(
    ("trouble", "begins"),
    [*((each, 3) for each in TROUBLES), *(pytest.param(each, 0, marks=pytest.mark.nightly) for each in TROUBLES if each not in SPOILED)],
)
def test_what_stops_a_release(hostile: Hostile, dist: Dist, trouble: str, begins: int) -> None:
    """Nothing is sent after it, and when it is over the next run sends the rest."""
    answer, error, said = TROUBLES[trouble]
    hostile.begins, hostile.trouble = begins, lambda _: answer(hostile)
    with pytest.raises(error, match=said):
        hostile.publish(dist)
    assert hostile.posts.total() == len(hostile.held) == begins
    hostile.begins = FAR
    hostile.publish(dist)
    assert hostile.whole(dist)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_is_not_verified(hostile: Hostile, dist: Dist, trouble: str) -> None:
    answer, error, said = TROUBLES[trouble]
    hostile.held = {path.name: path.read_bytes() for path in dist.paths}
    hostile.begins, hostile.trouble = 0, lambda _: answer(hostile)
    with pytest.raises(CiError if trouble == "other bytes" else error, match="other bytes" if trouble == "other bytes" else said):
        verify(Version(VERSION), hostile.index)


def test_digests_in_upper_case(hostile: Hostile, dist: Dist) -> None:
    page = hostile.page

    def upper(_: str) -> Answer:
        data = json.loads(page().data)
        for file in data["files"]:
            file["hashes"]["sha256"] = file["hashes"]["sha256"].upper()
        return Answer(data=json.dumps(data).encode())

    hostile.begins, hostile.trouble = 0, lambda method: upper(method) if method == "GET" else None
    hostile.publish(dist)
    assert hostile.whole(dist)
