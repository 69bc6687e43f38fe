"""What a model does with the stand-ins for its caches, and when its step is not recorded for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_cuda._decoding import step, weights
from mlx_cuda._decoding.caches import Growing, NotReplayed
from mlx_cuda._decoding.recording import Recording, StandIn
from mlx_cuda._decoding.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = mx.ones((1, 1, 1, 4))


def of_one_cache(recording: Recording) -> list[Any]:
    return [StandIn(recording, Growing, [mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4))], 0)]


def hold(monkeypatch: pytest.MonkeyPatch, held: list[tuple[mx.array, mx.array]] | None, *, traced: bool = False) -> None:
    """Have models hold these arrays in the place of others."""
    native = SimpleNamespace(
        Held=lambda _: SimpleNamespace(unchanged=lambda: held == [], replaced=lambda: held),
        traced=lambda _: traced,
    )
    monkeypatch.setattr(weights, "native", SimpleNamespace(module=lambda _: native))


def recorded(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], object], held: list[tuple[mx.array, mx.array]] | None) -> Any:
    """The step that a model's ``function`` of its cache was recorded for; ``held``: what is in the place of the model's arrays then."""
    made: list[Any] = []
    own = SimpleNamespace(
        nodes=1, offset=lambda _: mx.array(0), tokens=lambda: mx.zeros((1, 1)), record=lambda *arguments: made.append(arguments),
        append=lambda _keys, _values, *memory: [each + 0 for each in memory[:2]],
    )  # fmt: skip
    hold(monkeypatch, held)

    def model(_: object, tokens: mx.array, cache: list[Any]) -> mx.array:
        function(cache[0])
        return tokens + 1

    step.begin_recording(own, None, model, mx.zeros((1, 1)), of_one_cache, (1, 1), 1)
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
    assert len(recorded(monkeypatch, function, [])) == 1


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
        recorded(monkeypatch, function, [])


def test_a_model_that_writes_its_weights_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded(monkeypatch, append, [(mx.ones(3), mx.ones(3)), (mx.zeros(2), mx.zeros(2))])


@pytest.mark.parametrize(
    "held",
    [
        None,
        [(mx.ones(3), mx.zeros(3))],
        [(mx.ones(3), mx.ones(2))],
        [(mx.ones(3), mx.ones(3, mx.float16))],
        [(mx.array([float("nan")]),) * 2],
    ],
)
def test_a_model_that_changes_itself(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    with pytest.raises(NotReplayed, match="changes what it holds"):
        recorded(monkeypatch, append, held)


def test_a_model_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are a transformation's while that runs, which nobody may evaluate."""
    found = []

    def loss(weight: mx.array) -> mx.array:
        hold(monkeypatch, [(mx.ones(3), weight)], traced=True)
        found.append(Weights(None, mx.default_stream(mx.cpu)).same(None))
        return weight.sum()

    mx.eval(mx.compile(loss)(mx.ones(3)))
    assert found == [False]
