"""Words that tests/ci/words.md retires: tests/ci/retired_phrases.toml has those that no name, no document and no comment may have."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path
from typing import Any

import pytest

from ci.files import tomllib

ROOT = Path(__file__).parents[2]
RETIRED: dict[str, Any] = tomllib.loads((Path(__file__).with_name("retired_phrases.toml")).read_text("utf-8"))
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    *(f"docs/{each.relative_to(ROOT / 'docs').as_posix()}" for each in sorted((ROOT / "docs").rglob("*.md"))),
]
THEIRS = re.compile(r"itertools\.product|scaled_dot_product_attention")  # names of Python, MLX and torch
NO_IDENTIFIERS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)  # of C++: comments and strings
# Of documents: code, what programs write, and the addresses of links.
NO_PROSE = re.compile(
    r"""
    ^```.*?^``` | ^[ ]{4}[^\n]*$ | `+[^`]*`+ | \]\([^)]*\) |
    <!--\ results:.*?<!--\ end\ of\ results\ --> | <!--\ faults\ -->.*?<!--\ /faults\ -->
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
COMMENT = re.compile(r"//[^\n]*(?:\n *//[^\n]*)*")  # of C++, of all its lines
FILE = re.compile(r"[\w/]+\.(?:cpp|cuh?|h|py|txt)\b")
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(path: Path, text: str) -> set[str]:
    """Those of all identifiers of a source and of its path: of ``take_slopes``, take and slopes."""
    text = THEIRS.sub("", text)
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
    else:
        names = set(re.findall(r"[A-Za-z_]\w*", NO_IDENTIFIERS.sub("", text)))
    return parts(*names, *path.with_suffix("").parts)


def parts(*names: str) -> set[str]:
    return {part.lower() for name in names for part in PARTS.findall(name)}


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    """The text of each source of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in map(Path, listed.split("\0")) if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}]
    return {path: (ROOT / path).read_text("utf-8") for path in paths if (ROOT / path).exists()}


def test_no_name_has_a_retired_word(sources: dict[Path, str]) -> None:
    retired = {*RETIRED["names"]}
    suspects = {path: text for path, text in sources.items() if retired & parts(str(path), text)}  # to find the names in all takes long
    found = {str(path): words(path, text) & retired for path, text in suspects.items()}
    assert not {path: some for path, some in found.items() if some}, "tests/ci/words.md has other words"


def test_the_words_of_names() -> None:
    of_cuda = words(Path("src/chunk_slopes.cu"), 'void takeSlope() {} // recorded "early"')
    assert of_cuda == {"src", "chunk", "slopes", "void", "take", "slope"}
    assert words(Path("a.py"), "x = itertools.product(early, 'skinny')  # slopes\n") == {"a", "x", "early"}


def phrases(text: str) -> list[str]:
    """The retired phrases of a document's prose, in which a line's end is a space unless the next begins a row, an item or a heading."""
    prose = re.sub(r"(?<!\n)\n(?![\n|#<-])", " ", NO_PROSE.sub("`", text))
    return [name for name, pattern in RETIRED["phrases"].items() if re.search(pattern, prose, re.IGNORECASE | re.MULTILINE)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_document_has_a_retired_phrase(document: str) -> None:
    assert not phrases((ROOT / document).read_text("utf-8")), (
        "say it otherwise: tests/ci/retired_phrases.toml has the patterns, tests/ci/words.md the words"
    )


def test_the_phrases_of_documents() -> None:
    assert phrases("Whoever computes it.\n") == ["person"]
    assert phrases("The tools\nlie there. What is left is a\nstand-in.\n") == ["lie", "stand-in", "What as a noun"]
    assert phrases("`machine code`, [a](lies.md)\n```\ncure\n```\nWhat is it? It has\ndot products.\n") == []
    assert phrases("<!-- results: a -->\nspread\n<!-- end of results -->\n") == []


def comments(path: Path, text: str) -> list[str]:
    """Comments of a source, in one line each; of Python also its docstrings and messages: strings of several words."""
    if path.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [*(each for each in strings if " " in each), *(token.string for token in tokens if token.type == tokenize.COMMENT)]
    else:
        found = COMMENT.findall(re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text))
    return [FILE.sub("`", re.sub(r"\s*\n[ /]*", " ", each).lstrip("/# ")) for each in found]


def test_no_comment_has_a_retired_phrase(sources: dict[Path, str]) -> None:
    own = {path: text for path, text in sources.items() if path.parts[0] in {"src", "python", "ci"}}
    found = {(str(path), each): bad for path, text in own.items() for each in comments(path, text) if (bad := phrases(each))}
    assert not found, "say it otherwise: tests/ci/retired_phrases.toml has the patterns, tests/ci/words.md the words"


def test_the_comments_of_sources() -> None:
    of_cuda = comments(Path("a.cu"), 'f("// lies");  // What `lies`\n// there (see composed.cuh).\n')
    assert of_cuda == ["What `lies` there (see `)."]
    assert phrases(of_cuda[0]) == ["What as a noun"]
    assert comments(Path("a.py"), '"""It\n  lies."""\nx = "#"  # its room\n') == ["It lies.", "its room"]


def test_the_glossary_fits_a_page() -> None:
    text = Path(__file__).with_name("words.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert 0 < len(rows) <= 60
    assert all(line.count("|") == 4 for line in rows)
