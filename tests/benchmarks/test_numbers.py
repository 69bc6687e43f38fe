"""Measured numbers of the documents' prose: those with a marker are of committed results, and none with a unit has no marker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.numbers import documents, numbers
from benchmarks.platforms import load
from benchmarks.table import BLOCK, NUMBER, fill_blocks

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in documents()}
GENERATED = re.compile(r"^<!-- results: [\w-]+ -->\n.*?^<!-- end of results -->", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)\s]*\)", re.DOTALL | re.MULTILINE)
UNITS = "TFLOP/s|[TGM]B/s|tok(?:en)?s?/s|tokens? (?:per|a) second|[mun]s|µs|s|seconds?|minutes?|hours?|[KMG]i?B|times"
WITH_UNIT = re.compile(rf"(?<![\w.])\d(?:[\d.,]*\d)?(?: to \d(?:[\d.,]*\d)?)?(?: ?x\b(?! ?\d)| ?%|[ -](?:{UNITS})(?![\w/]))")


def measured(text: str) -> list[str]:
    """The numbers with a unit of measurement in the prose of a page, its tables that nobody generates included."""
    return [match[0] for match in WITH_UNIT.finditer(NO_PROSE.sub(" ", NUMBER.sub(" ", GENERATED.sub(" ", text))))]


@pytest.mark.parametrize("page", PAGES)
def test_its_numbers_are_of_the_committed_results(page: str) -> None:
    known = numbers()
    assert not {match[2] for match in NUMBER.finditer(PAGES[page])} - {*known}
    assert fill_blocks(PAGES[page], known) == PAGES[page], "run: python -m benchmarks numbers --update"
    assert not re.findall(r"^ *<!-- n: .*", PAGES[page], re.MULTILINE), "GitHub takes a line that begins with a comment for HTML"


@pytest.mark.parametrize("page", PAGES)
def test_no_number_with_a_unit_is_written_by_hand(page: str) -> None:
    found = measured(PAGES[page])
    assert not found, f"take them from `python -m benchmarks numbers`, or leave them out: {found}"


def test_numbers_are_found() -> None:
    text = "At 3.5 TB/s, 2 to 4 GB, 0.98x, 5 % and 12 ms; `7 ms`, 2 x 16 heads, 64 tokens, x of 3, x in 3.x, [a](b-3-s).\n"
    text += "<!-- results: one -->\n| 9 ms |\n<!-- end of results -->\nfast: <!-- n: mlx -->0 ms<!-- /n -->\n"
    assert measured(text) == ["3.5 TB/s", "2 to 4 GB", "0.98x", "5 %", "12 ms"]
    assert BLOCK.search(text)
    assert fill_blocks(text, {"mlx": "1 us"}).endswith("fast: <!-- n: mlx -->1 us<!-- /n -->\n")


def test_the_command_prints_all_and_fills_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["numbers"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: {value}" for name, value in numbers().items()]
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("Of <!-- n: h200-cases -->0<!-- /n --> cases.\n", "utf-8")
    other.write_text("Of 3 cases.\n", "utf-8")
    monkeypatch.setattr("benchmarks.numbers.documents", lambda: [page, other])
    assert main(["numbers", "--update"]) == 0
    assert capsys.readouterr().out == f"filled {page}\n"
    assert page.read_text("utf-8") == f"Of <!-- n: h200-cases -->{numbers()['h200-cases']}<!-- /n --> cases.\n"


def test_the_wheel_is_as_large_as_the_documents_say(tested_wheel: Path) -> None:
    size = tested_wheel.stat().st_size / 2**20
    said = load()["wheel"]["mib"]
    assert abs(size - said) < 0.1, f"[wheel] of docs/results/platforms.toml: mib = {size:.1f}; then python -m benchmarks numbers --update"
