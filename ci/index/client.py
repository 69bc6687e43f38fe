"""Query an index. Failing queries are repeated for minutes, and unclear answers are errors.

requests queries, and pypi-simple reads the pages. Decided here is which answers are a page of the simple API (PEP 503, 691), which of the
others may pass, and how long that is waited for: a login page that says 200 is no free name, and a restart is no reason to give up.
"""

from __future__ import annotations

import codecs
import json
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from email.message import Message
from typing import IO
from urllib.parse import urlsplit

import requests
from packaging.utils import canonicalize_name
from pypi_simple import ProjectPage, UnsupportedRepoVersionError
from urllib3 import Retry
from urllib3.exceptions import HTTPError, InvalidHeader, ProtocolError, ReadTimeoutError

from ..console import say, visible
from ..errors import EnvironmentProblem

JSON, HTML = "application/vnd.pypi.simple.v1+json", ("application/vnd.pypi.simple.v1+html", "text/html")
ACCEPT = f"{JSON}, {HTML[0]};q=0.2, {HTML[1]};q=0.01"
PASSING = {408, 425, 429, 500, 502, 503, 504}  # what a server says that may be able to answer later
LARGEST_PAGE, LARGEST_FILE = 64 << 20, 256 << 20
LONGEST_PAUSE = 60.0
UNREACHABLE = 30.0  # seconds, so that a missing network is reported soon
AGAIN = "check the network and the index, then run again"
ADDRESS = "check the address of the index, and for a proxy or a login page before it"


class _Passing(Exception):
    """A temporary error. `after`: the seconds that the server requests to wait; `patience`: the longest time to repeat the query."""

    def __init__(self, why: str, *, after: float = 0, patience: float = float("inf")) -> None:
        super().__init__(why)
        self.after, self.patience = after, patience


@dataclass(frozen=True)
class _Answer:
    body: bytes
    status: int
    url: str  # where it came from in the end
    kind: str  # the content type, "" where none is said
    charset: str | None


@dataclass(frozen=True)
class Client:
    """Queries one index."""

    name: str
    simple: str  # the URL of the simple API
    timeout: float  # seconds without a byte
    patience: float  # seconds for which a failing index is queried again

    def page(self, project: str) -> ProjectPage | None:
        """The page of a project; None where the index says that it has none."""
        root = f"{self.simple.rstrip('/')}/"
        asked = f"{root}{canonicalize_name(project)}/"
        answer = self._patiently(asked, 2 * self.timeout, LARGEST_PAGE)
        if answer.status != 404:
            return self._read(answer, project)
        # A server that knows nothing says 404 too: an index has a page of all projects.
        if urlsplit(answer.url)[:2] != urlsplit(asked)[:2]:
            raise self._problem(f"it leads to {urlsplit(answer.url).hostname}, which answers HTTP 404", ADDRESS)
        whole = self._patiently(root, 2 * self.timeout)
        if whole.status != 200 or whole.kind not in {JSON, *HTML}:
            said = f"HTTP {whole.status}, {whole.kind or 'no content type'}"
            raise self._problem(f"it answers HTTP 404 for {project}, but is no index: its list of projects is {said}", ADDRESS)
        return None

    def download(self, url: str, stream: IO[bytes]) -> None:
        """Write the bytes of a file."""
        answer = self._patiently(url, 20 * self.timeout, LARGEST_FILE)
        if answer.status != 200:
            raise self._problem(f"it answers HTTP {answer.status} for {urlsplit(url).path}", _fix(answer.status))
        stream.write(answer.body)

    def _patiently(self, url: str, seconds: float, most: int = 0) -> _Answer:
        """Query until there is an answer; each time for so many seconds at most, and so many bytes of a body: 0 leaves it there."""
        started, pause = time.monotonic(), 1.0
        while isinstance(said := _within(seconds, lambda: self._ask(url, most)), _Passing):
            wait = max(pause, said.after)
            if time.monotonic() - started + wait > min(self.patience, said.patience):
                fix = f"wait for {said.after:.0f} s, then run again" if said.after else AGAIN
                raise self._problem(str(said), fix) from said
            say(f"{self.name}: {_line(said)}; retrying in {wait:.0f} s")
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)
        return said

    def _ask(self, url: str, most: int) -> _Answer:
        headers = {"Accept": ACCEPT, "Cache-Control": "no-cache"}  # no page of a cache will do
        try:
            with requests.Session() as session:
                session.hooks["response"].append(_pass_redirect)
                with session.get(url, headers=headers, timeout=self.timeout, stream=True) as response:
                    if response.status_code in PASSING:
                        said = f"it answers HTTP {response.status_code} {response.reason or ''}".rstrip()
                        raise _Passing(said, after=_after(response.headers.get("Retry-After", "")))
                    header = Message()
                    header["Content-Type"] = response.headers.get("Content-Type") or ""
                    kind = header.get_content_type() if header["Content-Type"] else ""
                    body = self._receive(response, most)
                    return _Answer(body, response.status_code, response.url, kind, header.get_content_charset())
        except requests.exceptions.SSLError as error:
            raise self._problem(str(error), "set REQUESTS_CA_BUNDLE to the certificates of your network") from error
        except requests.exceptions.ConnectTimeout as error:
            raise _Passing(str(error), patience=UNREACHABLE) from error
        except (requests.Timeout, ReadTimeoutError) as error:
            raise _Passing(f"no answer in {self.timeout:g} s") from error
        except requests.ConnectionError as error:
            raise _Passing(str(error), patience=UNREACHABLE) from error
        except ProtocolError as error:
            raise _Passing(f"its answer broke off: {error}") from error
        except (requests.RequestException, HTTPError) as error:
            raise self._problem(str(error), ADDRESS) from error

    def _receive(self, response: requests.Response, most: int) -> bytes:
        body = bytearray()
        while most and (data := response.raw.read1(1 << 16, decode_content=True)):
            body += data
            if len(body) > most:
                raise self._problem(f"its answer has more than {most >> 20} MiB", ADDRESS)
        return bytes(body)

    def _read(self, answer: _Answer, project: str) -> ProjectPage:
        """The page that an answer is, if it is one."""
        if answer.status != 200:
            raise self._problem(f"it answers HTTP {answer.status}", _fix(answer.status))
        try:
            if answer.kind == JSON:
                page = ProjectPage.from_json_data(json.loads(answer.body), answer.url)
            elif answer.kind in HTML:
                codecs.lookup(answer.charset or "utf-8")
                page = ProjectPage.from_html(project, answer.body, answer.url, answer.charset)
            else:
                raise ValueError(f"its content type is {answer.kind or 'missing'}")
            if canonicalize_name(page.project) != canonicalize_name(project):
                raise ValueError(f"it is the page of {page.project!r}")
            if not page.packages and not page.repository_version:
                raise ValueError("it lists no file, and does not say that it is of an index")
        except (ValueError, LookupError, RecursionError, UnsupportedRepoVersionError) as error:
            raise self._problem(f"its answer is no page of an index: {_first(error)}", ADDRESS) from error
        return page

    def _problem(self, why: str, fix: str) -> EnvironmentProblem:
        return EnvironmentProblem(f"cannot read the index {self.name}: {_line(why)}", fix=fix)


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer | _Passing:
    """Return its result within so many seconds. A socket's timeout is for each read: drop by drop, headers alone can take days."""
    future: futures.Future[_Answer] = futures.Future()

    def work() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # who waits raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a late one is not waited for, not even at the program's end
    if not futures.wait([future], seconds).done:
        return _Passing(f"its answer takes more than {seconds:g} s")
    try:
        return future.result()
    except _Passing as passing:
        return passing


def _pass_redirect(response: requests.Response, **_: object) -> None:
    """Without what it has to say besides, which requests would read to the end."""
    if response.is_redirect:
        response.close()


def _line(text: object) -> str:
    """Return untrusted text in one line of limited length."""
    return visible(" ".join(str(text).split()))[:300]


def _fix(status: int) -> str:
    return "give the credentials of the index, in its address or in ~/.netrc" if status in {401, 403, 407} else ADDRESS


def _after(header: str) -> float:
    """The seconds of a Retry-After, which is a number or a date; 0 for none, and for what is neither."""
    try:
        return float(Retry().parse_retry_after(header))
    except InvalidHeader:
        return 0


def _first(error: Exception) -> str:
    """The error in one line: the first of the fields that pydantic, with which pypi-simple reads, finds wrong."""
    found = getattr(error, "errors", None)
    if callable(found) and (fields := found(include_url=False, include_context=False, include_input=False)):
        place = ".".join(map(str, fields[0]["loc"]))
        return f"{place or 'the whole'}: {fields[0]['msg']}" + f", and {len(fields) - 1} more" * (len(fields) > 1)
    return str(error)
