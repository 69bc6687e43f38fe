"""docs/attention.md: its examples run, and its table is what the dispatch rules say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import mlx_cuda
import pytest
from mlx_cuda._attention import rules

from benchmarks.__main__ import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"

complete = pytest.mark.skipif(
    not hasattr(mlx_cuda, "attention_varlen") or "bool" not in get_args(rules.MaskKind),
    reason="this mlx_cuda is older than the document",
)


@complete
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert len(blocks) > 8
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), {})  # noqa: S102  (ours, and each of them builds on those before)
    assert "engine=" in capsys.readouterr().out


@complete
def test_the_gallery_is_what_the_rules_say(tmp_path: Path) -> None:
    text = DOCUMENT.read_text("utf-8")
    copy = tmp_path / "attention.md"
    copy.write_text(re.sub(r"\| `(decode|cudnn|flash)` \|", "| `nobody` |", text), "utf-8")
    assert copy.read_text("utf-8") != text
    assert main(["gallery", "--update", str(copy)]) == 0
    assert copy.read_text("utf-8") == text, "run: python -m benchmarks gallery --update docs/attention.md"
