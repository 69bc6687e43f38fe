"""Batches through captured steps, on the CPU: the model runs again instead, with stand-ins for its caches."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import _patch
from mlx_cuda._mlx_lm import batches, caches, pages
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._mlx_lm.stand_ins import PagedStandIn
from mlx_cuda._replay import packing, sequences
from mlx_cuda._replay.errors import NotReplayed
from mlx_cuda._replay.pool import Pool, held_by

from ..gpu.decoding_model import BatchKVCache, BatchRotatingKVCache, KVCache, Model, RotatingKVCache, merged, of_changing_size
from .sessions_on_cpu import Step, all_close, as_it_is, both_calls, close, joined, of_three, replayed, set_both, words

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("capacity", [16, 64])
def test_a_batch_whose_size_changes(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", capacity)
    expected, own = of_changing_size(model, words(64), lambda tokens, cache: model(tokens, cache=cache))
    logits, ours = of_changing_size(model, words(64), replayed(decoding, model))
    assert all_close(logits, expected)
    for one, other in zip(ours, own, strict=True):
        assert one._idx == other._idx
        assert one.offset.tolist() == other.offset.tolist()
        assert one.left_padding.tolist() == other.left_padding.tolist()
        assert close(one.extract(1).keys, other.extract(1).keys)
    assert decoding.replayed == 32 - decoding.captured
    assert decoding.captured == 1  # and other sizes as they come
    assert {session.batch for session in decoding.batches.sessions} == {1, 2, 4}


def test_a_rotating_batch(decoding: Decoding, model: Model) -> None:
    tokens, prompts = words(64), (9, 2, 5)
    found = []
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate(prompts)], lambda: RotatingKVCache(16))
        logits = [call(tokens[:, i : i + 1], cache) for i in range(9, 17)]
        logits.append(model(tokens[:, 17:18], cache=cache))  # for which its layers have arrays of their own
        logits += [call(tokens[:, i : i + 1], cache) for i in range(18, 30)]
        for each in cache:
            each.filter([2, 0])
        found.append((logits + [call(tokens[:2, i : i + 1], cache) for i in range(30, 50)], cache))
    assert all_close(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one._offset, one.offset.tolist()) == (other._offset, other.offset.tolist())
        assert np.maximum(0, one.left_padding.tolist()).tolist() == other.left_padding.tolist()
        assert (other._idx, other.rotated) == (16, False)  # the oldest is the first
        assert close(mx.roll(one.keys, -one._idx, 2), other.keys)
    assert decoding.captured == 1
    assert decoding.replayed == 39


def test_layers_that_are_no_longer_equally_long(decoding: Decoding, model: Model) -> None:
    tokens, found = words(20)[:1], []
    for call in as_it_is(model), lambda tokens, cache: decoding.step(model, Model.__call__, tokens, cache, at_once=True):
        cache = [KVCache() for _ in model.layers]
        model(tokens[:, :6], cache=cache)
        logits = [call(tokens[:, i : i + 1], cache) for i in range(6, 9)]
        cache[-1].trim(1)
        found.append(logits + [call(tokens[:, i : i + 1], cache) for i in range(9, 12)])
    assert all_close(*found)
    assert decoding.replayed == 2  # before they were


def test_a_batch_between_steps_of_its_own(decoding: Decoding, model: Model) -> None:
    """It is trimmed, rows are hidden, and it runs as it is."""
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        for each in cache:
            each.trim(2)
        logits.append(call(tokens[:, 10:11], cache))
        for each in cache:
            each.left_padding += mx.array([1, 0, 2])
            each.offset += 3
        logits += [call(tokens[:, i : i + 1], cache) for i in range(11, 13)]
        logits.append(model(tokens[:, 13:14], cache=cache))
        found.append(logits + [call(tokens[:, i : i + 1], cache) for i in range(14, 18)])
    assert all_close(*found)
    assert {tuple(each.offset.tolist()) for each in cache} == {(18, 16, 21)}


def test_caches_that_begin_at_different_rows_are_not_replayed(decoding: Decoding, model: Model) -> None:
    tokens = words(9)
    cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
    cache[1].left_padding += mx.array([1, 0, 0])
    decoding.step(model, type(model).__call__, tokens[:, 8:], cache, at_once=True)
    assert decoding.reason == "the sequences of its caches begin at different rows"


@pytest.mark.parametrize("rows", [16, 64])
def test_a_window_shorter_than_a_rotating_batch(decoding: Decoding, rows: int) -> None:
    model, tokens, found = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, window=4), words(40), []
    mx.eval(model.parameters())
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))], lambda: RotatingKVCache(rows))
        found.append([call(tokens[:, i : i + 1], cache) for i in range(8, 40)])
    assert all_close(*found)
    assert decoding.captured == 1
    assert isinstance(cache[0], BatchRotatingKVCache)


def test_caches_that_a_capture_does_not_fit_run_as_they_are(decoding: Decoding, model: Model) -> None:
    class Other(KVCache):
        """Of a kind that is not known."""

    tokens = words(9)[:1]
    cache = [KVCache() for _ in model.layers]
    model(tokens[:, :5], cache=cache)
    replayed(decoding, model)(tokens[:, 5:6], cache)
    del cache
    logits = decoding.step(model, type(model).__call__, tokens[:, :1], [Other() for _ in model.layers], at_once=False)
    assert close(logits, model(tokens[:, :1], cache=[KVCache() for _ in model.layers]))
    assert (len(decoding.sessions), decoding.replayed) == (1, 0)


@pytest.mark.parametrize(("prompt", "replays"), [(0, 7 + 8), (3, 8 + 9)])
def test_conversations_after_each_other_share_a_capture(decoding: Decoding, model: Model, prompt: int, replays: int) -> None:
    """From the first step on, where there was a prompt."""
    tokens = words(prompt + 9)[:1]
    for _ in range(2):
        cache, own = [KVCache() for _ in model.layers], [KVCache() for _ in model.layers]
        if prompt:
            model(tokens[:, :prompt], cache=cache), model(tokens[:, :prompt], cache=own)
        for place in range(prompt, prompt + 9):
            token = tokens[:, place : place + 1]
            logits = decoding.step(model, type(model).__call__, token, cache, at_once=False)
            assert close(logits, model(token, cache=own))
        del cache
    assert (decoding.captured, decoding.replayed) == (1, replays)


def test_one_conversation_still_has_one_offset(decoding: Decoding, model: Model) -> None:
    tokens, found = words(40)[:1], []
    for call in both_calls(decoding, model):
        cache = [KVCache() for _ in model.layers]
        model(tokens[:, :5], cache=cache)
        found.append([call(tokens[:, i : i + 1], cache) for i in range(5, 30)])
    assert all_close(*found)


def test_batches_share_pages(decoding: Decoding, model: Model) -> None:
    """Sequences join and leave without a copy, and what they leave behind is used again."""
    tokens, call = words(64), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)
    pool = decoding.batches.pool
    assert pool is not None
    free = len(pool.regions[0].free)
    one = merged(model, [tokens[:1, :6]])
    call(tokens[:1, 6:7], one)
    for each, more in zip(cache, one, strict=True):
        each.extend(more)
        each.filter([3, 1])
    del one, more
    assert len(pool.regions[0].free) == free + 1 + sequences.AHEAD  # two went, one came
    wanted = merged(model, [tokens[:1, :6], tokens[1:2, :3]])
    logits = [call(tokens[:2, i : i + 1], cache) for i in range(12, 16)]
    expected = []
    model(mx.concatenate([tokens[:1, 6:7], tokens[1:2, 8:9]]), cache=wanted)
    for each in wanted:
        each.filter([0])
    expected = [model(tokens[:1, i : i + 1], cache=wanted) for i in range(12, 16)]
    assert all(close(ours[:1], theirs) for ours, theirs in zip(logits, expected, strict=True))
    assert all(map(sequences.is_in_pages, cache))
    assert cache[0].nbytes == 2 * (1 + sequences.AHEAD) * sequences.PAGE * 16 * 4 * 2
    taken, held = len(pool.regions[0].free), held_by(cache)
    given = [each.extract(0) for each in cache]
    assert (len(pool.regions[0].free), held_by(cache)) == (taken, held)  # what was given away has arrays of its own
    assert {type(each) for each in given} == {KVCache}
    before = np.array(given[1].keys)
    call(tokens[:2, 16:17], cache)
    assert np.array_equal(np.array(given[1].keys), before)
    assert np.array_equal(np.array(cache[1].extract(0).keys)[:, :, :-1], before)
    del given, each, held
    for cache_ in cache:
        pages.settle(cache_)
    assert len(pool.regions[0].free) == pool.regions[0].count - 1


@pytest.mark.parametrize("memory", [False, True])
def test_nothing_is_kept_of_batches_that_are_gone(decoding: Decoding, memory: bool) -> None:
    model, tokens = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32, memory=memory), words(40)
    call, sizes = replayed(decoding, model), []
    for _ in range(6):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
        for i in range(8, 11):
            call(tokens[:, i : i + 1], cache)
        pool = decoding.batches.pool
        assert pool is not None
        sizes.append((len(pool.regions[0].free), len(pool.states._apart), len(pool.batches), len(pool.replaced)))
        del cache
    assert len({*sizes[1:]}) == 1, sizes


def test_a_copy_of_a_batch_has_arrays_of_its_own(decoding: Decoding, model: Model) -> None:
    tokens, call = words(30), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)
    other = copy.deepcopy(cache)
    logits = [call(tokens[:, 12:13], each) for each in (cache, other)]
    assert close(*logits)
    for each in cache:
        each.filter([0, 0, 2])  # a sequence twice
    first, second, _ = call(mx.array([[1], [2], [1]]), cache)
    assert not close(first, second)
    first, second, _ = call(mx.array([[1], [1], [1]]), cache)
    assert not close(first, second)  # each has keys of its own


def test_a_batch_that_joined_another_goes_on_by_itself(decoding: Decoding, model: Model) -> None:
    """As upstream's does: both write a row after the same ones."""
    tokens, found = words(30), []
    for call in both_calls(decoding, model):
        one, logits = joined(call, model, tokens)
        for each in one:
            each.filter([0, -4])
        logits += [call(tokens[:2, 24:25], one), call(tokens[:2, 25:26], one)]
        found.append(mx.concatenate(logits))
    assert close(*found)


@pytest.mark.parametrize("arrays", [True, False])
def test_a_sequence_that_has_read_nothing_joins(decoding: Decoding, model: Model, arrays: bool) -> None:
    """Its prompt is one token, and is read by its first step; others that were in its batch may have left arrays there."""
    tokens, found = words(40), []
    for call in both_calls(decoding, model):
        cache, logits = of_three(call, model, tokens)
        one = merged(model, [tokens[:1, :4]])
        for each in one:
            each.trim(4)
            if not arrays:
                each.keys = each.values = None
        logits.append(call(tokens[:1, 20:21], one))
        among = [sequences.is_in_pages(each) for each in (*cache, *one)]
        for each, more in zip(cache, one, strict=True):
            each.extend(more)
        four = mx.concatenate([tokens, tokens[:1]])
        found.append(mx.concatenate(logits + [call(four[:, i : i + 1], cache) for i in range(21, 24)]))
    assert close(*found)
    assert all(among)
    assert decoding.captured == 1


def test_which_batches_without_rows_join(decoding: Decoding, model: Model) -> None:
    tokens, call, batches = words(40), replayed(decoding, model), decoding.batches
    prompts = [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))]

    def empty(*left_padding: int) -> list[Any]:
        return [BatchKVCache(list(left_padding)) for _ in model.layers]

    assert not batches.take(empty(0, 0))  # there are no pages that tell their form
    cache = merged(model, prompts)
    call(tokens[:, 8:9], cache)
    call(tokens[:, 9:10], cache)
    assert batches.take(empty(0, 0))
    assert not batches.take(empty(1, 0))  # a row is still to be hidden
    assert not batches.take(empty())  # nobody
    some = merged(model, prompts)
    for each in some:
        each.trim(8)
        each.offset = each.offset * 0
        each.left_padding = each.left_padding * 0
    assert batches.take(some)
    some[0].keys = some[0].values = None
    assert not batches.take(some)  # in one layer alone


@pytest.mark.parametrize("sizes", [{"kv_heads": 2}, {"dim": 24}])
def test_batches_of_another_form_do_not_fit(decoding: Decoding, model: Model, sizes: dict[str, Any]) -> None:
    tokens, call = words(40), replayed(decoding, model)
    prompts = [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))]
    cache = merged(model, prompts)
    call(tokens[:, 8:9], cache)
    call(tokens[:, 9:10], cache)
    assert decoding.batches._fits(merged(model, prompts))
    other = Model(**{"size": 32, "heads": 2, "kv_heads": 1, "dim": 16, "hidden": 32, **sizes})
    assert not decoding.batches._fits(merged(other, prompts))


def test_rows_of_no_whole_units_are_not_in_pages(decoding: Decoding, model: Model) -> None:
    cache = merged(model, [words(40)[i : i + 1, :5] for i in range(2)])
    assert decoding.batches.take(cache)
    cache[1].keys = cache[1].keys[..., :12]
    assert not decoding.batches.take(cache)


@pytest.mark.parametrize("offset", [3, -3])
def test_offsets_that_are_not_how_many_rows_there_are(decoding: Decoding, model: Model, offset: int) -> None:
    tokens, found = words(30), []
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :5] for i in range(2)])
        for each in cache:
            each.offset = each.offset + offset
        found.append(mx.concatenate([call(tokens[:2, i : i + 1], cache) for i in range(8, 14)]))
    assert close(*found)
    assert not decoding.batches.sessions


def test_what_was_given_away_leaves_its_pages_first(
    decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Then more are made; nothing keeps those before, not even until Python's collector comes."""
    gc.collect()
    request.addfinalizer(gc.enable)
    gc.disable()
    for name, value in {"PAGE": 8, "LEAST_ROWS": 8, "HEADROOM": 8, "EXPECTED": 1, "AHEAD": 1}.items():
        set_both(monkeypatch, name, value)
    tokens, call = words(60), replayed(decoding, model)
    kept, pools = [], weakref.WeakSet[Any]()
    for turn in range(12):
        cache = merged(model, [tokens[i : i + 1, : 5 + turn] for i in range(2)])
        for i in range(20, 30):
            call(tokens[:2, i : i + 1], cache)
        pools.add(decoding.batches.pool)
        kept.append([each.extract(1) for each in cache])
    assert {(each.keys.shape[2], each.values.shape[2]) for own, turn in zip(kept, range(12), strict=True) for each in own[:1]} <= {
        (15 + turn, 15 + turn) for turn in range(12)
    }
    assert len(pools) == 1
    assert PagedStandIn not in map(type, gc.get_objects())  # which hold the pages' memory
    assert decoding.batches.pool is not None
    assert decoding.batches.pool.regions[0].count < 60
    assert decoding.captured < 4


def test_pages_are_made_again_where_twice_as_many_have_no_room(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(40), replayed(decoding, model)
    decoding.batches._bytes = 1 << 60
    monkeypatch.setattr(mx, "get_active_memory", lambda: mx.get_memory_limit() - (1 << 26))
    cache, _ = of_three(call, model, tokens)
    assert sequences.is_in_pages(cache[0])
    assert 0 < decoding.batches.nbytes < 1 << 26


def test_fewer_pages_where_others_have_the_memory(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call, asked, cleared = words(40), replayed(decoding, model), list[int](), list[int]()

    def make(caches: list[Any], counts: dict[int | None, int], *others: Any) -> Pool:
        asked.append(counts[None])
        if counts[None] > 100:
            raise RuntimeError("[malloc] Unable to allocate 9 bytes.")
        return Pool(caches, counts, *others)

    monkeypatch.setattr(batches, "Pool", make)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(len(asked)))
    found = []
    for step in (lambda tokens, cache: model(tokens, cache=cache), call):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
        found.append([step(tokens[:, i : i + 1], cache) for i in range(8, 12)])
    assert all_close(*found)
    assert sequences.is_in_pages(cache[0])
    assert (
        asked[0] > asked[1] > asked[2] == 1 + 3 * sequences.pages_for(8 + batches.HEADROOM, np.inf)
    )  # as many as these need, if no others
    assert cleared == [1, 2]
    assert not decoding.errors
    monkeypatch.setattr(batches, "Pool", lambda *_: pytest.fail("the pages suffice"))
    call(tokens[:, 12:13], cache)


def test_weights_that_moved_are_captured_again(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(40), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)
    pool, before = decoding.batches.pool, decoding.captured
    with monkeypatch.context() as patched:
        patched.setattr(Step, "moved", lambda _: True)
        call(tokens[:, 12:13], cache)
    call(tokens[:, 13:14], cache)
    assert decoding.captured == before + 1
    assert decoding.batches.pool is pool
    assert sequences.is_in_pages(cache[0])


def test_a_batch_whose_further_sizes_differ_is_not_in_pages(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(40), replayed(decoding, model)
    cache, _ = of_three(call, model, tokens)

    def differs(*_: Any) -> None:
        raise NotReplayed("other logits")

    monkeypatch.setattr(batches, "compare", differs)
    for each in cache:
        each.filter([0, 1])
    decoding.step(model, type(model).__call__, tokens[:2, 12:13], cache, at_once=False)
    assert decoding.batches.refused
    assert not sequences.is_in_pages(cache[0])


def test_too_few_pages(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are made, and what was in the others goes on."""
    for name, value in {"PAGE": 8, "LEAST_ROWS": 8, "HEADROOM": 8, "EXPECTED": 1, "AHEAD": 1}.items():
        set_both(monkeypatch, name, value)
    tokens, found = words(60), []
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
        found.append([call(tokens[:, i : i + 1], cache) for i in range(8, 60)])
    assert all_close(*found)
    assert decoding.batches.pool is not None
    assert decoding.batches.pool.regions[0].count > 10
    assert 1 < decoding.captured < 5


def test_an_interrupt_leaves_a_batch_as_it_was(decoding: Decoding, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, call = words(30), replayed(decoding, model)
    found = []
    for interrupted in (False, True):
        cache, logits = of_three(call, model, tokens)
        if interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(Step, "replay", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    call(tokens[:, 12:13], cache)
        found.append([*logits, *(call(tokens[:, i : i + 1], cache) for i in range(12, 16))])
    assert all_close(*found)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_newest_bits_count_for_batches_that_begin(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are under way go on as they are; what has read nothing has no form yet."""
    monkeypatch.setattr(_patch, "_remove", lambda: None)  # as within a further patch() on a GPU
    mx.random.seed(7)
    model, tokens = Model(size=64, heads=2, kv_heads=1, dim=32, hidden=32), words(40)
    model.set_dtype(mx.bfloat16)
    call, batches = replayed(decoding, model), []

    def packing(*, anew: bool = True) -> tuple[int, int] | None:
        if anew:
            batches.append(merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))]))
        for i in range(8, 12):
            call(tokens[:, i : i + 1], batches[-1])
        held = held_by(batches[-1])
        assert held is not None
        return held.pool.packing

    assert packing() is None
    with mlx_cuda.patch(kv_bits=4, kv_group_size=32):
        assert packing(anew=False) is None
        assert packing() == (32, 4)
        with mlx_cuda.patch(kv_bits=8, kv_group_size=32):
            assert packing() == (32, 8)
            with mlx_cuda.patch(kv_bits=16):
                assert packing() is None
            assert packing() == (32, 8)
        with mlx_cuda.patch():
            assert packing() == (32, 4)
    assert packing(anew=False) == (32, 4)
    assert packing() is None
    one = [BatchKVCache([0, 0]) for _ in model.layers]
    assert decoding.batches._fits(one)
    with mlx_cuda.patch(kv_bits=4, kv_group_size=32):
        assert not decoding.batches._fits(one)


@pytest.mark.parametrize("bits", [4, 8])
def test_pages_that_are_quantised(decoding: Decoding, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(packing.settings, "packing", packing.Packing(32, bits))
    mx.random.seed(7)
    model, tokens = Model(size=64, heads=2, kv_heads=1, dim=32, hidden=32), words(40)
    model.set_dtype(mx.bfloat16)
    found = []
    for call in both_calls(decoding, model):
        cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
        logits = [call(tokens[:, i : i + 1], cache) for i in range(8, 20)]
        for each in cache:
            each.filter([2, 0])
        found.append(mx.concatenate([*logits, *(call(tokens[:2, i : i + 1], cache) for i in range(20, 30))]).astype(mx.float32))
    pool = decoding.batches.pool
    assert pool is not None
    assert pool.packing == (32, bits)
    assert [array.dtype for array in pool.arrays[0]] == [mx.uint32, mx.bfloat16, mx.bfloat16] * 2
    error = mx.linalg.norm(found[1] - found[0]) / mx.linalg.norm(found[0])
    assert 0 < error.item() < {4: 0.1, 8: 0.03}[bits]  # type: ignore[operator]
    assert cache[0].keys.dtype == mx.bfloat16
