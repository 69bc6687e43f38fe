"""A real index server (pypiserver) on this machine's loopback, and a proxy before it that fails in the ways networks and servers do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ci.errors import EnvironmentProblem
from ci.files import sha256
from ci.index import Index, named

HOST = "127.0.0.1"
START_SECONDS = 30

# What goes wrong with a request: a status refuses it; it is never answered; cut off half-way; half of it is handed on, and the server
# keeps that half; it is done, and the answer is lost.
Fault = Literal["400", "403", "404", "500", "silence", "half", "torn", "no-answer"]


class Silent(BaseHTTPRequestHandler):
    """Says nothing of its requests on stderr."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        pass


@contextlib.contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests by it, each in a thread; gives the URL. Whatever keeps a request waiting has to end before."""
    httpd = ThreadingHTTPServer((HOST, 0), handler)
    httpd.daemon_threads = True
    with _running(httpd) as url:
        yield url


@contextlib.contextmanager
def _running(httpd: HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{httpd.server_address[1]}/"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run pypiserver over `folder`, which anyone on this machine may upload to; gives its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    command = [sys.executable, "-m", "pypiserver", "run", "-p", str(port), "-i", HOST, "-a", ".", "-P", ".", "--disable-fallback"]
    command += ["--server", "wsgiref", "--backend", "simple-dir", "--log-stream", "none", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            _wait(process, port)
            yield f"http://{HOST}:{port}/"
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.05)
    process.kill()
    said = process.stderr.read().decode("utf-8", "replace").strip() if process.stderr else ""
    raise EnvironmentProblem(f"pypiserver did not start: {said}", fix="install the dependency group 'tests' of pyproject.toml")


class _Wsgi(WSGIServer):
    """Says nothing of clients that hang up."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Asked(WSGIRequestHandler):
    log_message = Silent.log_message


@contextlib.contextmanager
def server_here(folder: Path) -> Iterator[str]:
    """As `server`, in a thread, which takes less time; it leaves files open of which it has sent a part, as uv asks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the standard library's cgi
        import pypiserver

        nobody: dict[str, Any] = {"authenticate": [], "password_file": "."}
        app = pypiserver.app(roots=[folder.resolve()], disable_fallback=True, backend_arg="simple-dir", **nobody)
    # bottle, which it has a copy of, leaves a finder of its plugins that later imports of this process warn of.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_ImportRedirect"]
    with _running(make_server(HOST, 0, app, _Wsgi, _Asked)) as url:
        yield url


@dataclass
class Proxy:
    """What came by, and what is to go wrong. `fault` and `then` may be replaced at any time."""

    target: str
    url: str = ""
    fault: Callable[[str], Fault | None] = lambda _method: None  # asked for every request; None lets it pass
    then: Callable[[str], None] = lambda _method: None  # told when the server has done with it, before anyone has an answer
    seen: list[str] = field(default_factory=list)  # the methods of all requests, in order
    release: threading.Event = field(default_factory=threading.Event)  # ends every silence

    @property
    def uploads(self) -> int:
        return self.seen.count("POST")


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    state = Proxy(target)
    with serving(_handler(state)) as state.url:
        try:
            yield state
        finally:
            state.release.set()


def _handler(state: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(Silent):
        def _serve(self) -> None:
            if self.path == "/simple/":  # the list of projects, which an index has whatever it says of one
                self._pass(b"", answer=True)
                return
            state.seen.append(self.command)
            fault = state.fault(self.command)
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length // 2 if fault in {"half", "torn"} else length)
            self.close_connection = True
            if fault and fault.isdigit():
                self.send_error(int(fault))
            elif fault == "silence":
                state.release.wait()
            elif fault in {"half", "torn"}:
                if fault == "torn":
                    self._send_torn(body)
                state.then(self.command)
            else:
                self._pass(body, answer=fault != "no-answer")

        def _pass(self, body: bytes, *, answer: bool) -> None:
            connection = http.client.HTTPConnection(urlsplit(state.target).netloc, timeout=START_SECONDS)
            try:
                connection.request(self.command, self.path, body, {**self.headers, "Connection": "close"})
                response = connection.getresponse()
                data = response.read()
            finally:
                connection.close()
            state.then(self.command)
            if not answer:
                return
            self.send_response(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in {"connection", "transfer-encoding"}:
                    self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever asked may be gone
                self.wfile.write(data)

        def _send_torn(self, body: bytes) -> None:
            """Hand on what came, and hang up."""
            with socket.create_connection((HOST, urlsplit(state.target).port or 80), timeout=START_SECONDS) as connection:
                lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items()), "", ""]
                connection.sendall("\r\n".join(lines).encode("latin-1") + body)

        do_GET = do_HEAD = do_POST = _serve  # noqa: N815 (the base class names them)

    return Handler


def index(url: str, *, timeout: float = 10, patience: float = 2) -> Index:
    """The server as an index. It takes any name and password; twine wants some."""
    known = named(url)
    return Index(
        known.name, (*known.target, "--username", "rehearsal", "--password", "rehearsal"), known.simple, timeout, patience=patience
    )


def held(folder: Path) -> dict[str, str]:
    """What the server holds: sha256 by name."""
    return {path.name: sha256(path) for path in folder.glob("*.whl")}
