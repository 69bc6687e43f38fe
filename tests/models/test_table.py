"""Tables of invented results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.result_file import read, write
from benchmarks.table import fill_blocks

from .__main__ import main
from .judging import Difference, Reading, compare
from .table import tables
from .trial import as_numbers

if TYPE_CHECKING:
    import pytest

OF = {"model": "gemma-3-270m", "form": "4 bit"}


def text() -> dict[str, Any]:
    side = Reading([1.0, 2.0], [3, 4], [0.0, 0.1], [0.01, 0.01], [0.1, 0.2])
    return {**OF, "part": "text", "quick": False, "steps": compare([1.0, 2.0], side, side), "replayed": 3}


def alone() -> dict[str, Any]:
    parts = Difference(7, {"upstream": 1, "patched": 2}, 2, 0.1, True, {"upstream": 0.02, "patched": 0.01})
    other = Difference(4, {"upstream": 1, "patched": 2}, 1, 0.1, False, {"upstream": 0.01, "patched": 0.02})
    counts = {"upstream": 60, "patched": 61}
    numbers = {"answers": counts, "tokens": counts, "other tokens": {"upstream": 2, "patched": 1}, "wrong tokens": {"patched": 0}}
    found = [as_numbers(each, 20) for each in (parts, None, other)]
    return {**OF, "part": "alone", **numbers, "replayed": 50, "differences": found}


def training() -> dict[str, Any]:
    losses = {side: [3.0 - 0.1 * step for step in range(20)] for side in ("float32", "upstream", "patched")}
    return {**OF, "part": "training", "losses": losses, "tokens/s": {"upstream": 1000.0, "patched": 1500.0}}


def test_each_kind_of_result_has_its_table() -> None:
    made = {name: table.splitlines()[2:] for name, table in tables([text(), alone(), training()]).items()}
    model = "Gemma 3 270M, 4 bit"
    assert made == {
        "real_texts": [f"| {model} | steps | 4.482, 4.482, 4.482 | 1.00%, 1.00% | 1, 1 of 2 | 0, 0 |"],
        "real_differences": [f"| {model} | 3 | 1 | 6 in the median, 4 at least | 1 of 2 | 1 of 2 | 1, 1 |"],
        "real_answers": [f"| {model} | alone | 60, 61 | 2, 1 | fails, 0 | 50 |"],
        "real_training": [f"| {model} | 20 | 2.9500, 2.9500, 2.9500 | 1.1500, 1.1500, 1.1500 | 1000, 1500 | 1.50x |"],
    }
    assert list(tables([text()])) == ["real_texts"]


def test_the_command_fills_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, document = tmp_path / "results.jsonl", tmp_path / "page.md"
    write(results, {"kind": "real", "cases": [training()]})
    document.write_text("# Page\n\n<!-- results: real_training -->\n<!-- end of results -->\n", "utf-8")
    assert main(["table", str(results)]) == 0
    printed = capsys.readouterr().out
    assert main(["table", str(results), "--update", str(document)]) == 0
    assert document.read_text("utf-8") == f"# Page\n\n<!-- results: real_training -->\n{printed}<!-- end of results -->\n"


def test_the_tables_of_the_document_are_of_committed_results() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "results" / "models.md").read_text("utf-8")
    made = tables(read(root / "benchmarks" / "results" / "real" / "nvidia-h100-cu13.jsonl", "real")["cases"])
    assert fill_blocks(text, made) == text, "run: python -m tests.models table … --update docs/results/models.md"
