"""Batches of models whose layers have states in the place of rows, through captured steps, on the CPU."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._mlx_lm import batches, pages
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay import sequences, states, step

from ..gpu.decoding_model import ArraysCache, Model, caches_of, merged, of_changing_size
from .sessions_on_cpu import CaptureError, Step, all_close, as_it_is, both_calls, close, joined, of_three, replayed, words

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def model() -> Model:
    mx.random.seed(7)
    model = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, memory=True)
    mx.eval(model.parameters())
    return model


def test_sequences_join_and_leave(decoding: Decoding, model: Model) -> None:
    expected, theirs = of_changing_size(model, words(64), as_it_is(model))
    logits, ours = of_changing_size(model, words(64), replayed(decoding, model))
    assert all_close(logits, expected)
    assert all(map(sequences.is_in_pages, ours))
    assert decoding.replayed == 32 - decoding.captured
    assert decoding.captured == 1
    assert {session.batch for session in decoding.batches.sessions} == {1, 2, 4}
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, ArraysCache):
            assert one.nbytes == sum(array.nbytes for array in other.cache)
            assert all_close(one.cache, other.cache)
            assert not sequences.is_in_pages(one)


def test_batches_take_turns(decoding: Decoding, model: Model) -> None:
    """Of which one has sequences of the other, and a third is another size."""
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        one, logits = joined(call, model, tokens)
        for each in one:
            each.filter([0, 3])
        third = merged(model, [tokens[:1, :7]])
        logits += [call(tokens[:1, 24:25], third), call(tokens[:2, 25:26], one), call(tokens[:1, 26:27], third)]
        for each, more in zip(third, one, strict=True):
            each.extend(more)
        del one
        found.append([*logits, call(tokens, third) if tokens.shape[1] == 1 else call(tokens[:, 27:28], third)])
    assert all_close(*found)
    assert all(map(sequences.is_in_pages, third))


def test_what_is_given_away_stays_as_it_is(decoding: Decoding, model: Model) -> None:
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        one, other = [each.extract(1) for each in cache], copy.deepcopy(cache)
        logits += [call(tokens[:, i : i + 1], cache) for i in range(12, 14)]
        last = [each.extract(2) for each in cache]
        for each in cache:
            each.filter([1, 0])
        logits.append(call(tokens[:2, 14:15], cache))
        found.append([*logits, call(tokens[:, 20:21], other), *(model(tokens[:1, 21:22], cache=alone) for alone in (one, last))])
        found[-1] += [each.cache[0] for own in (one, last) for each in own if isinstance(each, ArraysCache)]
    assert all_close(*found)


def test_copies_may_be_the_first_that_go_on(decoding: Decoding, model: Model) -> None:
    """And what two caches hold is each one's own."""
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        one, other = copy.deepcopy(cache), copy.deepcopy(cache)
        for each in one:
            each.filter([2, 1])
        logits += [call(tokens[:2, 12:13], one), call(tokens[:, 13:14], cache), call(tokens[:, 14:15], other)]
        alone = [[each.extract(1) for each in cache] for _ in range(2)]
        logits += [call(tokens[:, 15:16], cache), *(model(tokens[:1, i : i + 1], cache=alone[i % 2]) for i in range(16, 20))]
        joined = merged(model, [tokens[1:2, :6], tokens[:1, :4]])
        logits += [call(tokens[:2, i : i + 1], joined) for i in range(20, 23)]
        for each, more in zip(cache, joined, strict=True):
            each.extend(more)
        five = mx.concatenate([tokens, tokens[:2]])
        found.append([*logits, call(tokens[:2, 24:25], joined), call(five[:, 25:26], cache), call(tokens[:2, 26:27], joined)])
    assert all_close(*found)
    kinds = [(session.batch, session.columns) for session in decoding.batches.sessions]
    assert len(kinds) == len({*kinds})


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_ends_while_states_are_put_in_order_loses_none(
    decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    tokens = words(40)
    found: list[list[mx.array]] = []

    def fail(*_: Any) -> None:
        raise error

    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        for each in cache:
            each.filter([2, 0, 1])
        with monkeypatch.context() as patched, contextlib.suppress(error):
            patched.setattr(states.States, "write", fail)
            if found:
                decoding.step(model, type(model).__call__, tokens[:, 12:13], cache, at_once=False)
        logits.append(model(tokens[:, 12:13], cache=cache))
        found.append(logits + [model(tokens[:, i : i + 1], cache=cache) for i in range(13, 16)])
    assert all_close(*found)


def test_a_step_that_ends_after_it_has_run_does_not_run_twice(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(40), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(batches, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(tokens[:, 12:13], cache)
    with pytest.raises(RuntimeError, match="A sequence's state is lost"):
        decoding.step(model, type(model).__call__, tokens[:, 12:13], cache, at_once=False)


def test_a_read_or_changed_state_is_the_cache_s_own(decoding: Decoding, model: Model) -> None:
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        cache[2][0] = cache[2][0] * 0.5
        logits += [call(tokens[:, i : i + 1], cache) for i in range(12, 16)]
        for each in cache:
            each.filter([2, 2, 0])
        found.append(logits + [call(tokens[:, i : i + 1], cache) for i in range(16, 20)])
    assert all_close(*found)


def test_more_sequences_than_there_is_memory_for(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "EXPECTED", 1)
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in ((0, 5), (2, 8))])
        logits = [call(tokens[:2, i : i + 1], cache) for i in range(8, 12)]
        for each, more in zip(cache, merged(model, [tokens[1:2, :3]]), strict=True):
            each.extend(more)
        found.append(logits + [call(tokens[:, i : i + 1], cache) for i in range(12, 18)])
    assert all_close(*found)
    assert decoding.batches.pool is not None
    assert decoding.batches.pool.states.most == 4


def test_a_size_that_differs_leaves_the_states_as_they_were(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = words(40)

    def two(call: Any) -> tuple[list[Any], list[mx.array]]:
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in ((0, 5), (2, 8))])
        return cache, [call(tokens[:2, i : i + 1], cache) for i in range(8, 12)]

    def more(cache: list[Any], call: Any) -> list[mx.array]:
        for each, new in zip(cache, merged(model, [tokens[1:2, :3]]), strict=True):
            each.extend(new)
        return [call(tokens[:, i : i + 1], cache) for i in range(12, 15)]

    theirs, expected = two(as_it_is(model))
    ours, logits = two(replayed(decoding, model))
    expected += more(theirs, as_it_is(model))
    compare = step.compare

    def wrong(*both: mx.array) -> None:
        compare(both[0] * 2, both[1])

    monkeypatch.setattr(batches, "compare", wrong)
    logits += more(ours, lambda tokens, cache: decoding.step(model, type(model).__call__, tokens, cache, at_once=False))
    assert all_close(logits, expected)
    assert decoding.batches.refused


def test_two_batches_in_pages_whose_common_size_differs(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no arrays of their own to go back to."""
    found = []
    for call in both_calls(decoding, model):
        one, other = (of_three(call, model, words(40))[0] for _ in range(2))
        for each, more in zip(one, other, strict=True):
            each.extend(more)
        found.append(one)
    compare = step.compare
    monkeypatch.setattr(batches, "compare", lambda *both: compare(both[0] * 2, both[1]))
    six = mx.concatenate([words(40), words(40)])
    for i in range(12, 15):
        logits = decoding.step(model, type(model).__call__, six[:, i : i + 1], found[1], at_once=False)
        assert close(logits, model(six[:, i : i + 1], cache=found[0]))
    assert decoding.batches.refused


def test_a_batch_whose_way_out_of_pages_was_interrupted(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in pages again, and its states are not another batch's to write over."""
    tokens, call = words(40), replayed(decoding, model)
    ours, second, theirs = (of_three(each, model, tokens)[0] for each in (call, call, as_it_is(model)))
    for each in ours + theirs:
        each.filter([2, 2, 0])
    left = [*range(len(ours))]

    def settle(cache: Any) -> Any:
        if left.pop() == 0:
            raise KeyboardInterrupt
        return pages.settle(cache)

    with monkeypatch.context() as patched:
        patched.setattr(batches, "settle", settle)
        with pytest.raises(KeyboardInterrupt):
            decoding.step(model, type(model).__call__, tokens[:, 12:13], ours, at_once=True)
    for i in range(12, 14):
        call(tokens[:, i : i + 1], second)
    for each in second:
        each.filter([0])
    call(tokens[:1, 14:15], second)
    assert close(call(tokens[:, 12:13], ours), model(tokens[:, 12:13], cache=theirs))


def test_more_sequences_than_states_after_weights_have_moved(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "EXPECTED", 1)
    tokens, call = words(40), replayed(decoding, model)
    two = merged(model, [tokens[i : i + 1, :n] for i, n in ((0, 5), (2, 8))])
    for i in range(8, 12):
        call(tokens[:2, i : i + 1], two)
    with monkeypatch.context() as patched:
        patched.setattr(Step, "moved", lambda _: True)
        of_three(call, model, tokens)
    assert decoding.batches.pool is not None
    assert decoding.batches.pool.states.most == 4


def test_what_is_given_away_leaves_its_pages_to_others(decoding: Decoding, model: Model) -> None:
    cache, _ = of_three(replayed(decoding, model), model, words(40))
    pool = decoding.batches.pool
    assert pool is not None
    before = len(pool.regions[0].free)
    given = [each.extract(i) for i in (1, 2) for each in cache]
    for each in cache:
        each.filter([0])
    assert len(pool.regions[0].free) == before + 2 * (1 + sequences.AHEAD)
    assert not any(map(sequences.is_in_pages, given))


def test_one_sequence_has_memory_of_its_own(decoding: Decoding, model: Model) -> None:
    cache = caches_of(model)
    model(words(5)[:1], cache=cache)
    assert not decoding.batches.take(cache)


def test_states_that_are_padded_are_not_in_pages(decoding: Decoding, model: Model) -> None:
    cache = merged(model, [words(5)[:1], words(5)[1:2]])
    assert decoding.batches.take(cache)
    cache[0].lengths = mx.array([3, 5])
    assert not decoding.batches.take(cache)
    assert np.all(np.isfinite(np.array(cache[0][0])))


def test_a_replay_that_was_not_launched_leaves_the_states(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(40), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)

    def full(*_: Any) -> mx.array:
        raise CaptureError("out of memory")

    other = copy.deepcopy(cache)
    expected = model(tokens[:, 12:13], other)
    with monkeypatch.context() as failing:
        failing.setattr(Step, "replay", full)
        found = decoding.step(model, type(model).__call__, tokens[:, 12:13], cache, at_once=False)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4).item()
    assert "out of memory" in decoding.reason
