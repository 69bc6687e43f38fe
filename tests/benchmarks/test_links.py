"""The documents hold together: links and anchors lead somewhere, files that they name are there, lines are not too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Their links lead to pages of GitHub, as `../../security/advisories/new`.
ON_GITHUB = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|^ {4}[^\n]*$", re.DOTALL | re.MULTILINE)
FOLDERS = "benchmarks|ci|cmake|docs|licenses|python|src|tests|wheel_hooks"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w\.\w+)`")
BARE = re.compile(r"`(\w+\.(?:cu|cuh|cpp))`")
LONGEST = 140


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    found = re.findall(r"^#+ (.*)$", CODE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found)
    return {*plain, *re.findall(r"<a id=\"([\w-]+)\">", text)}


def broken(document: Path) -> list[str]:
    """The links of a document that lead nowhere."""
    text, found = document.read_text("utf-8"), []
    for link in (match[1] or match[2] for match in LINK.finditer(CODE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = document.parent / target if target else document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text("utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    assert not broken(document)


@pytest.mark.parametrize("document", [*DOCUMENTS, *ON_GITHUB], ids=name)
def test_files_that_are_named_are_there(document: Path) -> None:
    text = document.read_text("utf-8")
    sources = {path.name for path in (ROOT / "src").rglob("*.*")}
    assert not [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not set(BARE.findall(text)) - sources


@pytest.mark.parametrize("document", [*DOCUMENTS, *ON_GITHUB], ids=name)
def test_lines_are_not_too_long(document: Path) -> None:
    """But for rows of tables, which cannot be broken, and HTML."""
    lines = document.read_text("utf-8").splitlines()
    assert not [line for line in lines if len(line) > LONGEST and not line.lstrip().startswith(("|", "<"))]


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# What `MLX` exports, and why\n", "utf-8")
    document = tmp_path / "document.md"
    good = "[a](other.md) [b](other.md#what-mlx-exports-and-why) [c](#here) [d](https://example.org/x)\n\n# Here\n"
    document.write_text(good, "utf-8")
    assert broken(document) == []
    document.write_text(good + "[e](absent.md) [f](other.md#absent) [g](#absent)\n", "utf-8")
    assert broken(document) == ["absent.md", "other.md#absent", "#absent"]
