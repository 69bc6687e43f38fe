"""What a model does with the stand-ins for its caches, and when its step is not captured for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._mlx_lm.caches import Growing
from mlx_cuda._mlx_lm.stand_ins import RowStandIn
from mlx_cuda._replay import step
from mlx_cuda._replay.capture import Capture
from mlx_cuda._replay.errors import CaptureFailed, NotReplayed

ROW = mx.ones((1, 1, 1, 4))


def of_one_cache(capture: Capture) -> list[Any]:
    return [RowStandIn(capture, Growing, [mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4))], 0)]


def captured(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], object], *, same: bool = True, left: int = 0) -> Any:
    """The step that a model's ``function`` of its cache was captured for.

    ``same``: whether the model is what it was then; ``left``: how often somebody still has an array that was made.
    """
    made: list[Any] = []
    own = SimpleNamespace(
        nodes=1, offset=lambda _: mx.array(0), tokens=lambda: mx.zeros((1, 1)), record=lambda *arguments: made.append(arguments),
        append=lambda _keys, _values, *memory: [each + 0 for each in memory[:2]], has_arrays_left=iter([True] * left + [False]).__next__,
    )  # fmt: skip
    monkeypatch.setattr(step, "Watch", lambda *_: SimpleNamespace(same=lambda _: same))

    def model(_: object, tokens: mx.array, cache: list[Any]) -> mx.array:
        function(cache[0])
        return tokens + 1

    step.begin_capture(Capture(own), None, model, mx.zeros((1, 1)), of_one_cache, shape=(1, 1), places=1)
    return made


def append(cache: Any) -> None:
    cache.update_and_fetch(ROW, ROW)


def append_twice(cache: Any) -> None:
    append(cache)
    append(cache)


def read_and_append(cache: Any) -> None:
    cache.keys_and_values()
    append(cache)


def append_and_read(cache: Any) -> None:
    keys, values = cache.update_and_fetch(ROW, ROW)
    assert cache.keys_and_values() == (keys, values)


@pytest.mark.parametrize("function", [append, append_and_read])
def test_a_row_for_each_cache(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], object]) -> None:
    assert len(captured(monkeypatch, function)) == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda _: None, "no row"),
        (append_twice, "several rows"),
        (read_and_append, "before it has"),
    ],
)
def test_other_counts_of_rows(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], object], reason: str) -> None:
    with pytest.raises(NotReplayed, match=reason):
        captured(monkeypatch, function)


def test_a_model_that_changes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotReplayed, match="changes what it holds"):
        captured(monkeypatch, append, same=False)


def test_arrays_that_somebody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hook does; but not where Python's collector has not come yet."""
    assert captured(monkeypatch, append, left=1)
    with pytest.raises(NotReplayed, match="kept somewhere"):
        captured(monkeypatch, append, left=2)


def test_code_that_stand_ins_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(cache: Any) -> None:
        cache.keys.sum()

    with pytest.raises(NotReplayed, match="does not run while it is captured: AttributeError"):
        captured(monkeypatch, read)


def test_memory_that_is_full_while_it_is_captured_may_have_room_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise RuntimeError("cudaMallocAsync failed: out of memory")

    with pytest.raises(CaptureFailed, match="out of memory"):
        captured(monkeypatch, full)
