"""The README: short, free of placeholders, its numbers those of committed results and of the matrix, its examples run."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import main
from benchmarks.front_page import PICTURE, drawing
from benchmarks.platforms import load as load_runs
from ci import matrix

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
TEXT = README.read_text("utf-8")
CODE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
UPDATE = "run: python -m benchmarks readme --picture docs/img/tokens-per-second.svg --update README.md"


def test_it_is_short() -> None:
    assert len(CODE.sub("", TEXT).split()) <= 900


def test_what_to_do_comes_first() -> None:
    """How it is switched on, within the first words; and the quickstart ends with a check of the results."""
    assert re.search(r"python -m mlx_cuda|mlx_cuda\.patch\(\)", " ".join(TEXT.split()[:300]))
    quickstart = TEXT.partition("\n## Quickstart\n")[2].partition("\n## ")[0]
    assert quickstart.strip().splitlines()[-2].startswith("$ python -m mlx_cuda check ")


def test_nothing_in_it_has_to_be_filled_in() -> None:
    assert not re.findall(r"OWNER|NAME\b|REPOSITORY|…|<(?!!--|img )\w+", TEXT)


def test_its_numbers_are_of_the_committed_results(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(re.sub(r"[\d.]+ times", "0.0 times", TEXT), "utf-8")
    assert copy.read_text("utf-8") != TEXT
    assert main(["readme", "--update", str(copy)]) == 0
    assert copy.read_text("utf-8") == TEXT, UPDATE


def test_its_picture_is_of_the_committed_results() -> None:
    assert PICTURE.read_text("utf-8") == drawing(), UPDATE
    assert "random weights" in drawing()
    assert PICTURE.relative_to(ROOT).as_posix() in TEXT


def test_its_requirements_are_those_of_the_matrix() -> None:
    declared = matrix.load()
    for version, cuda in declared.cuda.items():
        assert f"{cuda.driver} or newer for CUDA {cuda.major} (`[{cuda.extra}]`)" in TEXT
        assert f"--cuda {version}" in TEXT
    glibc = declared.platforms["linux-x86_64"].uv.rpartition("manylinux_")[2].replace("_", ".")
    assert f"glibc {glibc} or newer" in TEXT
    assert f"GCC {declared.compilers['linux'].minimum} or newer" in TEXT


def test_its_status_is_that_of_the_platforms() -> None:
    """No GPU of which nothing is said, and none that has not run the tests."""
    runs = load_runs(ROOT / "docs" / "results" / "platforms.toml")
    assert {run["machine"].removeprefix("two-") for run in runs["runs"]} == {"h100", "h200"}
    assert "| **Built and tested on** | H100 and H200, Linux x86_64, CUDA 12 and 13 (" in TEXT
    (tested,) = (stage for stage in runs["stages"] if stage["what"] == "tests on a GPU")
    assert {platform for platform, said in tested.items() if said == "never"} == {"linux-aarch64", "win-amd64"}


def linked(text: str) -> set[str]:
    return {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)}


def test_it_leads_to_every_page() -> None:
    """By the index of the pages, from whose links the site has its sidebar."""
    assert not {"docs/index.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"} - linked(TEXT)
    pages = {path.relative_to(INDEX.parent).as_posix() for path in INDEX.parent.rglob("*.md")} - {INDEX.name}
    found = re.findall(r"^- \[.*?\]\((.*?)\)", INDEX.read_text("utf-8"), re.MULTILINE)
    assert (set(found), len(found)) == (pages, len(pages))
