"""The project's description on an index: the README, with absolute links, and the project's addresses.

scikit-build-core asks for it while it makes METADATA (pyproject.toml: tool.dynamic-metadata). It is the same on every platform: it comes
from the README, the version and the repository's address alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..matrix import REPOSITORY, load

# Code, which is skipped; or the text before the target of a link or a picture, in Markdown or in HTML, and one without a scheme.
_LINKS = re.compile(
    r"""
    ^```.*?^``` | `[^`\n]+` |
    (?P<before> \]\(\s* | ^\[[^]\n]+\]:\s* | \b(?:href|src|srcset)\s*=\s*["']? ) (?P<to> (?![#]|[a-z][a-z0-9+.-]*:) [^\s"'<>)]+ )
    """,
    re.DOTALL | re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_PICTURES = {".png", ".svg"}


def address() -> str:
    """The repository's, without a slash at its end: in CI the one that runs there, so that a fork does not speak for another."""
    server, name = (os.environ.get(f"GITHUB_{part}", "") for part in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else load().repository


def relative_links(text: str) -> list[str]:
    """Links that work on no other page than the README's own."""
    return [found["to"] for found in _LINKS.finditer(text) if found["to"]]


def absolute(text: str, repository: str, ref: str) -> str:
    """The README with absolute links: pictures as raw files, all else as the repository shows it."""

    def lead(found: re.Match[str]) -> str:
        if not found["to"]:
            return found[0]
        picture = PurePosixPath(urlsplit(found["to"]).path).suffix in _PICTURES
        page = f"{repository}/{'raw' if picture else 'blob'}/{ref}/README.md"
        return f"{found['before']}{urljoin(page, found['to'])}"

    return _LINKS.sub(lead, text)


def dynamic_metadata(_settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    repository, version = address(), str(project["version"])
    ref = "HEAD" if ".dev" in version else f"v{version}"  # a development version has no tag
    readme = absolute((REPOSITORY / "README.md").read_text("utf-8"), repository, ref)
    return {
        "readme": {"content-type": "text/markdown", "text": readme},
        "urls": {
            "Homepage": repository,
            "Documentation": f"{repository}/blob/{ref}/docs/index.md",
            "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
            "Source": f"{repository}/tree/{ref}",
        },
    }
