"""The files of the site: the simple API as HTML, which any server hands out as such, the same as JSON, and a page for people.

pip and uv read JSON only with a content type that a static file server does not send. The JSON file is for programs that request it by its
name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..matrix import load
from .wheels import Nightly

if TYPE_CHECKING:
    from jinja2 import Environment


def wheels(site: Path) -> Path:
    """The directory of the wheels: that of the page that lists them, so that its links are relative."""
    return site / "simple" / load().name


def write(site: Path, files: Sequence[Nightly], url: str, *, docs: bool) -> None:
    """Write everything except the wheels and the documentation, which is built into the folder docs/ of the finished site."""
    files = sorted(files, key=lambda each: (each.version, each.name), reverse=True)
    folder = wheels(site)
    for each in files:
        (folder / f"{each.name}.metadata").write_bytes(each.metadata)
    (folder / "index.json").write_text(json.dumps(_json(files), indent=1) + "\n", "utf-8")
    for path, template in {
        site / "index.html": "index.html",
        folder.parent / "index.html": "root.html",
        folder / "index.html": "simple.html",
    }.items():
        path.write_text(_render(template, files=files, project=load(), url=url.rstrip("/"), docs=docs), "utf-8", newline="\n")


def _json(files: Sequence[Nightly]) -> dict[str, Any]:
    return {
        "meta": {"api-version": "1.1"},
        "name": load().name,
        "versions": list(dict.fromkeys(str(each.version) for each in files)),
        "files": [
            {
                "filename": each.name,
                "url": each.name,
                "hashes": {"sha256": each.sha256},
                "requires-python": each.requires_python,
                "size": each.size,
                "upload-time": each.made.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "core-metadata": {"sha256": each.metadata_sha256},
            }
            for each in files
        ],
    }


@cache  # with its compiled templates
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)
