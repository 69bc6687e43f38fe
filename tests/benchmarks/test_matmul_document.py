"""docs/reference/matmul.md: its examples run, and it names every engine and every operation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mlx_cuda._common.choice import MatmulEngine

if TYPE_CHECKING:
    import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "matmul.md"


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert len(blocks) > 5
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), {})  # noqa: S102  (ours, and each of them builds on those before)
    assert "engine=" in capsys.readouterr().out


def test_names_engines_and_operations() -> None:
    text = DOCUMENT.read_text("utf-8")
    for name in (*get_args(MatmulEngine), *("quantized_matmul", "gather_mm", "gather_qmm", "grouped_matmul", "fp8_matmul")):
        assert f"`{name}" in text
