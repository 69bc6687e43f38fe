"""The pictures of docs/factory are of today's wheel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.platforms import load
from benchmarks.screenshots import DOCUMENTS, PICTURES, RECORD, TAKEN, blocks, find_chromium, run, templates
from benchmarks.table import BLOCK, fill_blocks
from ci.errors import CheckFailed, EnvironmentProblem

TAKE = "run: python -m benchmarks.screenshots WHEEL"
DATA: dict[str, Any] = load(RECORD)


def mib(size: int) -> str:
    """A size as the pictures show it."""
    return f"{size / 2**20:.1f} MiB"


@pytest.mark.parametrize("name", TAKEN)
def test_the_pictures_are_there_and_small(name: str) -> None:
    data = (PICTURES / name).read_bytes()
    picture = TAKEN[name]
    assert (data[:4], [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]) == (b"\x89PNG", [picture.width, picture.height]), TAKE
    assert len(data) < 150 << 10


def test_documents_show_what_was_taken() -> None:
    texts = [document.read_text("utf-8") for document in DOCUMENTS]
    known = blocks(DATA)
    assert {match[2] for text in texts for match in BLOCK.finditer(text)} & {*known} == {*known}
    assert [fill_blocks(text, known) for text in texts] == texts, TAKE
    assert all(f"commit `{DATA['commit']}` ({mib(DATA['size'])})" in " ".join(text.split()) for text in texts)


def test_the_trial_has_no_path_of_a_machine() -> None:
    lines = DATA["trial"].splitlines()
    assert lines[0] == f"$ python -m ci try wheelhouse/{DATA['wheel']}"
    assert (lines[-1].partition(" here with ")[0], lines[-1].rpartition(": ")[2]) == ("WORKS", DATA["wheel"])
    assert not [line for line in lines if re.search(r"(^|\s)/\w", line)]


def test_they_show_the_size_of_this_wheel(tested_wheel: Path) -> None:
    assert abs(tested_wheel.stat().st_size - DATA["size"]) < 0.1 * 2**20, TAKE


def test_they_show_the_pages_of_today() -> None:
    assert DATA["templates"] == templates(), TAKE


def test_pictures_are_of_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.screenshots.process.git", lambda *_, **__: " M ci/console.py\n")
    with pytest.raises(EnvironmentProblem, match=r"the checkout has changes.*\n  fix: commit them first"):
        run(tmp_path / "a.whl", "chromium")


def test_a_browser_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=r"(?s)Chromium is not installed.*apt-get install chromium"):
        find_chromium(None)


def test_a_page_wider_than_its_window_is_refused(tmp_path: Path) -> None:
    tab = Mock(evaluate=Mock(return_value=391))
    with pytest.raises(CheckFailed, match="the report is 391 px wide in a window of 390"):
        TAKEN["report-phone.png"].take(tab, tmp_path / "report.html", tmp_path / "report.png")
