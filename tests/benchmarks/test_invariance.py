"""The cost of batch invariance, on the CPU: the sides take turns, and the table has a column of each."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda
import pytest

from benchmarks import invariance, models
from benchmarks.__main__ import main as tables
from tests.gpu.mlx_lm_parts import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


if find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Of a tiny model and two sequences, each side's second turn."""

    def measure() -> dict[str, Any]:
        monkeypatch.setitem(models.SHAPES, "tiny: of a test", ("qwen3", SIZES))
        before = mx.default_device()
        mx.set_default_device(mx.cpu)
        try:
            (result,) = invariance.measure("tiny: of a test", [2], 8, 3, 1, lambda _: None)
        finally:
            mx.set_default_device(before)
        return result

    return measure


def test_measures_three_sides(monkeypatch: pytest.MonkeyPatch, measured: Callable[[], dict[str, Any]]) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def patch(**options: Any) -> Iterator[None]:
        entered.append("batch_invariant" if options else "patch()")
        yield

    monkeypatch.setattr(mlx_cuda, "patch", patch)
    monkeypatch.setitem(invariance.SIDES, "patch()", patch)
    result = measured()
    assert entered == ["patch()", "batch_invariant"] * 2
    assert all(result[side]["decode tokens/s"] > 0 for side in invariance.SIDES)
    lines = invariance.table([result]).splitlines()
    assert lines[0] == "| model | sequences | tokens/s of | MLX | patch() | batch_invariant |"
    assert [line.startswith("| tiny | 2 | ") for line in lines[2:]] == [True, True]


def test_what_is_written_makes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"prefill tokens/s": 12345.6, "decode tokens/s": 100.0, "peak MiB": 10.0}
    result = {"model": "Tiny: one", "batch": 1, "prompt": 8, "generated": 3, **dict.fromkeys(invariance.SIDES, speeds)}
    monkeypatch.setattr(invariance, "measure", lambda *_: [result])
    path = tmp_path / "invariance.jsonl"
    assert invariance.main(["--model", invariance.MODELS[0], "-o", str(path)]) == 0
    capsys.readouterr()
    assert tables(["invariance", str(path)]) == 0
    assert "| Tiny | 1 | prefill | 12,350 | 12,350 | 12,350 |" in capsys.readouterr().out


def test_a_side_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[], dict[str, Any]]
) -> None:
    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        raise RuntimeError("invalid argument")
        yield

    sides = {"upstream": failing, "patch()": contextlib.nullcontext, "batch_invariant": contextlib.nullcontext}
    monkeypatch.setattr(invariance, "SIDES", sides)
    result = measured()
    assert result["upstream"] == {"error": "invalid argument"}
    assert invariance.table([result]).splitlines()[2].startswith("| tiny | 2 | decode | fails | ")
