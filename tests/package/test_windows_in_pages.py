"""Batches of models with windows, in pages: a layer with a window has as many pages as that may lie in, however long a sequence is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay.pool import held_by

from benchmarks.mlx_lm_parts import part

from .sessions_on_cpu import both_calls, close, set_both

Call = Callable[[mx.array, list[Any]], mx.array]

try:
    caches = part("models.cache")
except ImportError as error:
    pytest.skip(f"mlx_lm.models.cache cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

PAGE, WINDOW = 8, 20
WORDS = mx.array(np.random.default_rng(3).integers(0, 100, (4, 300)))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAGE": PAGE, "AHEAD": 1, "LEAST_ROWS": 8, "HEADROOM": 100, "EXPECTED": 6}.items():
        set_both(monkeypatch, name, value)


@pytest.fixture
def model() -> Any:
    """Of three layers, of which the first two have windows."""
    module = part("models.gemma3_text")
    mx.random.seed(3)
    made = module.Model(module.ModelArgs.from_dict({
        "model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32, "head_dim": 16, "vocab_size": 100,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": WINDOW, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
    }))  # fmt: skip
    mx.eval(made.parameters())
    return made


@pytest.fixture
def both(decoding: Decoding, model: Any) -> tuple[Call, ...]:
    """Steps as they are, and in pages."""
    return both_calls(decoding, model)


def batch(model: Any, *lengths: int, first: int = 0) -> list[Any]:
    """Caches of sequences that have read so many tokens each."""
    made = []
    for row, length in enumerate(lengths, first):
        own = model.make_cache()
        if length:
            model(WORDS[row : row + 1, :length], cache=own)
        made.append(own)
    return [layer[0].merge(list(layer)) for layer in zip(*made, strict=True)]


def steps(call: Call, cache: list[Any], first: int, last: int, rows: int) -> mx.array:
    return mx.concatenate([call(WORDS[:rows, at : at + 1], cache) for at in range(first, last)], axis=1)


@pytest.mark.parametrize("lengths", [(5, 3, 7), (50, 3, 21), (20, 19, 64)])
def test_windows_have_as_many_pages_as_they_need(decoding: Decoding, model: Any, both: Any, lengths: tuple[int, ...]) -> None:
    found = []
    for call in both:
        cache = batch(model, *lengths)
        logits = [steps(call, cache, 64, 140, 3)]
        for each in cache:
            each.filter([2, 0])
        found.append((mx.concatenate([logits[0][:2], steps(call, cache, 140, 200, 2)], axis=1), cache))
    assert close(found[0][0], found[1][0])
    ours = found[1][1]
    held = held_by(ours)
    assert held is not None
    counts = [[len(own) for own in sequence.pages] for sequence in held.sequences]
    assert [windows for windows, _ in counts] == [4, 4]  # of 20 rows, which may begin within a page
    assert min(others for _, others in counts) > 17
    windows, others = (pool.count for pool in held.pool.regions)
    assert windows == 1 + 6 * 4 < others
    for one, other in zip(ours, found[0][1], strict=True):
        own, wanted = one.extract(1), other.extract(1)
        assert close(own.keys, wanted.keys)
        assert close(own.values, wanted.values)
        assert own.state[2:] == wanted.state[2:]
    assert decoding.captured == 1


def test_a_batch_that_joined_another_goes_on_by_itself(decoding: Decoding, model: Any, both: Any) -> None:
    """Its window is not what the other's steps have written over."""
    found = []
    for call in both:
        one, other = batch(model, 30, 3), batch(model, 11, 40, first=2)
        logits = [steps(call, cache, 50, 60, 2) for cache in (one, other)]
        for each, more in zip(one, other, strict=True):
            each.extend(more)
        logits.append(steps(call, one, 60, 100, 4))
        logits.append(steps(call, other, 60, 100, 2))
        logits.append(steps(call, one, 100, 110, 4))
        found.append(logits)
    assert all(map(close, *found))
    assert not decoding.batches.pool.states.copies  # type: ignore[union-attr]


def test_pages_of_windows_that_are_too_few(decoding: Decoding, model: Any, both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPECTED": 1, "HEADROOM": 8}.items():
        set_both(monkeypatch, name, value)
    found = []
    for call in both:
        cache = batch(model, 5, 30)
        logits = [steps(call, cache, 30, 50, 2)]
        for each, more in zip(cache, batch(model, 12, 3, first=2), strict=True):
            each.extend(more)
        found.append([*logits, steps(call, cache, 50, 120, 4)])
    assert all(map(close, *found))
    assert 1 < decoding.captured < 6
    assert held_by(cache) is not None
