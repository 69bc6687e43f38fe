"""Sphinx's configuration: `nox -s docs` builds the site from the Markdown of this folder and from the package's docstrings.

The pages are written for GitHub. Sphinx gets what it needs beside: the sidebar from the links of index.md, links to files of the
repository as addresses, and MLX's documentation by the names of its pages, so that a build needs no network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils.nodes import reference

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from mlx_cuda._version import __version__  # noqa: E402

from ci.build.description import address  # noqa: E402

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx

MLX = "https://ml-explore.github.io/mlx/build/html/python"

project, author, version = "mlx-cuda", "the mlx-cuda contributors", __version__
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# Types that signatures and fields name, and that are no part of the API.
PRIVATE = "Activation|Axis|Callable|Calls|Change|DispatchThresholds|Path|PathLike|Row|Steps|StreamOrDevice|Tuned|\\w+Keywords"
nitpick_ignore_regex = [("py:class", rf"([\w.]+\.)?({PRIVATE})")]

html_theme = "furo"
html_title = f"mlx-cuda {__version__}"
html_theme_options = {"source_repository": f"{address()}/", "source_branch": "main", "source_directory": "docs/"}
pygments_style, pygments_dark_style = "default", "monokai"

myst_heading_anchors = 4
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100

LINK = re.compile(r"(\]\()(?!#|[a-z]+:)([^)\s#]+)")
ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>$', re.MULTILINE)


def adapt(_: Sphinx, page: str, content: list[str]) -> None:
    """Make MyST of a page that is written for GitHub."""
    folder, text = (DOCS / page).parent, ANCHOR.sub(r"(\1)=", content[0])

    def lead(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(DOCS) and target.suffix in {".md", ".png", ".svg"}:
            return found[0]
        return f"{found[1]}{address()}/{'tree' if target.is_dir() else 'blob'}/HEAD/{target.relative_to(ROOT).as_posix()}"

    content[0] = LINK.sub(lead, text) + (sidebar(text) if page == "index" else "")


def sidebar(index: str) -> str:
    """Return a table of contents for each section of index.md, of the pages that it links."""
    text = ""
    for section in index.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        pages = re.findall(r"^- \[.*?\]\((.*?)\.md\)", body, re.MULTILINE)
        text += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])
    return text


def link_to_mlx(_: Sphinx, __: Any, node: Element, content: Element) -> Element | None:
    """Return a link to the page that MLX's documentation has for each of its names."""
    target = re.sub(r"^mx\.", "mlx.core.", str(node["reftarget"]))
    if not target.startswith("mlx."):
        return None
    module, _, name = target.rpartition(".")
    folder = "_autosummary" if module != "mlx.nn" else "nn/_autosummary" if name[0].isupper() else "nn/_autosummary_functions"
    page = "nn" if target == "mlx.nn" else f"{folder}/{target}"
    return reference("", "", content, internal=False, refuri=f"{MLX}/{page}.html")


def setup(app: Sphinx) -> None:
    """Connect these to Sphinx's events."""
    app.connect("source-read", adapt)
    app.connect("missing-reference", link_to_mlx)
