"""A server of plain files on this machine's loopback, as GitHub Pages is one: folders by their index.html, types by endings, no more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from .index_support import Silent, serving


@contextlib.contextmanager
def pages(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder below a path of its own, as a project's pages are; gives the URL and the paths of all that was asked for, as asked."""
    seen: list[str] = []

    class Handler(Silent, SimpleHTTPRequestHandler):
        def send_head(self):  # type: ignore[no-untyped-def]
            seen.append(self.path)
            prefix, self.path = self.path[:9], self.path[8:]
            return super().send_head() if prefix == "/project/" and "//" not in self.path else self.send_error(404)

    with serving(partial(Handler, directory=str(folder))) as url:
        yield f"{url}project", seen
