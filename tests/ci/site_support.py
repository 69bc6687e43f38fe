"""A server of plain files on this machine's loopback, as GitHub Pages is one: folders by their index.html, types by endings, no more."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from .index_support import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def pages(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder below a path of its own, as a project's pages are; gives the URL and the paths of all that was asked for, as asked."""
    seen: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self):  # type: ignore[no-untyped-def]
            seen.append(self.path)
            prefix, self.path = self.path[:9], self.path[8:]
            return super().send_head() if prefix == "/project/" and "//" not in self.path else self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
            pass

    httpd = ThreadingHTTPServer((HOST, 0), partial(Handler, directory=str(folder)))
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{httpd.server_address[1]}/project", seen
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
