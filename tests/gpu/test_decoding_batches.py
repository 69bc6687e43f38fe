"""Captured steps of batches: as good as the model's own against float32, whichever sequences join and leave."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._mlx_lm import batches, caches
from mlx_cuda._mlx_lm.models import decoding_of
from mlx_cuda._replay.sequences import is_in_pages

from .decoding_checks import FOUR, PROMPT, TOLERANCE, as_it_is, make, replayed, wide, words
from .decoding_model import KVCache, Model, RotatingKVCache, merged, of_changing_size
from .formats import Form
from .support import DTYPES, host, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_buckets")]


def check_batch(model: Model, tokens: mx.array, dtype: mx.Dtype, make_cache: Callable[[], Any], lengths: list[int]) -> None:
    """The logits of each token after prompts of these lengths, of which the longest is `PROMPT`."""

    def logits(model: Model, step: Callable[..., mx.array]) -> mx.array:
        cache = merged(model, [tokens[i : i + 1, :length] for i, length in enumerate(lengths)], make_cache)
        return mx.concatenate([step(tokens[:, i : i + 1], cache) for i in range(PROMPT, tokens.shape[1])], axis=1)

    exact = host(logits(wide(model), as_it_is(wide(model))))
    own, ours = logits(model, as_it_is(model)), logits(model, replayed(model))
    for sequence in range(len(lengths)):
        assert relative_error(ours[sequence], exact[sequence]) <= TOLERANCE[dtype]
    assert relative_error(ours, exact) <= 1.3 * max(relative_error(own, exact), 2**-10)


@pytest.mark.parametrize("form", [None, FOUR], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_batch_with_left_padding(rng: np.random.Generator, dtype: mx.Dtype, form: Form | None) -> None:
    model, tokens = make(rng, dtype, form), words(rng, 3, 100)
    check_batch(model, tokens, dtype, KVCache, [PROMPT, 3, 7])
    if dtype != mx.float32:
        assert "head norms + rope + append" in mlx_cuda.explain(mlx_cuda.decode_step, model).kernel


def test_a_batch_of_one(rng: np.random.Generator) -> None:
    check_batch(make(rng, mx.bfloat16), words(rng, 1, 60), mx.bfloat16, KVCache, [PROMPT])


@pytest.mark.parametrize("arrays", [True, False], ids=["rows of others", "none"])
def test_a_sequence_that_has_read_nothing_joins(rng: np.random.Generator, arrays: bool) -> None:
    """Its prompt is one token; where others have left its batch of prompts, there are arrays of which no row is its own."""
    model, tokens = make(rng, mx.float16), words(rng, 4, 60)

    def logits(model: Model, step: Callable[..., mx.array]) -> mx.array:
        cache = merged(model, [tokens[i : i + 1, :length] for i, length in enumerate((PROMPT, 3, 7))])
        for i in range(PROMPT, 30):
            step(tokens[:3, i : i + 1], cache)
        one = merged(model, [tokens[3:, :5]])
        for each in one:
            each.trim(5)
            if not arrays:
                each.keys = each.values = None
        first = step(tokens[3:, 20:21], one)
        among.append(all(map(is_in_pages, (*cache, *one))))
        for each, other in zip(cache, one, strict=True):
            each.extend(other)
        return mx.concatenate([first, *(step(tokens[:, i : i + 1], cache) for i in range(30, 60))])

    among: list[bool] = []
    sides = (wide(model), as_it_is(wide(model))), (model, as_it_is(model)), (model, replayed(model))
    exact, own, ours = (host(logits(*side)) for side in sides)
    assert among == [False, False, True]
    assert not decoding_of(model).errors
    assert relative_error(ours, exact) <= TOLERANCE[mx.float16]
    assert relative_error(ours, exact) <= 1.3 * max(relative_error(own, exact), 2**-10)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_batch_with_a_window(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    check_batch(make(rng, dtype, window=9), words(rng, 3, 60), dtype, KVCache, [PROMPT, 3, 7])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_rotating_batch(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    model, tokens = make(rng, dtype), words(rng, 3, 120)
    check_batch(model, tokens, dtype, lambda: RotatingKVCache(48), [4, PROMPT, 7])
    assert decoding_of(model).captured == 1


@pytest.mark.parametrize("capacity", [32, 64])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_batch_whose_size_changes(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, capacity: int) -> None:
    monkeypatch.setattr(caches, "LEAST_CAPACITY", capacity)
    model, tokens = make(rng, dtype), words(rng, 3, 64)
    expected, own = of_changing_size(wide(model), tokens, as_it_is(wide(model)))
    logits, ours = of_changing_size(model, tokens, replayed(model))
    for one, exact in zip(logits, expected, strict=True):
        assert relative_error(one, host(exact)) <= TOLERANCE[dtype]
    for one, other in zip(ours, own, strict=True):
        assert one._idx == other._idx
        assert one.offset.tolist() == other.offset.tolist()
        assert one.left_padding.tolist() == other.left_padding.tolist()
        assert relative_error(one.extract(1).keys, host(other.extract(1).keys)) <= TOLERANCE[dtype]
    state = decoding_of(model)
    assert state.replayed == 32 - state.captured
    assert state.captured == 1  # and other sizes as they come
    assert {session.batch for session in state.batches.sessions} == {1, 2, 4}


def test_a_batch_between_steps_of_its_own(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 3, 40)

    def logits(step: Callable[..., mx.array]) -> mx.array:
        cache = merged(model, [tokens[i : i + 1, :length] for i, length in enumerate((PROMPT, 3, 7))])
        found = [step(tokens[:, i : i + 1], cache) for i in range(PROMPT, 16)]
        for each in cache:
            each.trim(2)
            each.left_padding += mx.array([1, 0, 2])  # rows that nobody shall see any more, in the same memory
        found += [step(tokens[:, i : i + 1], cache) for i in range(14, 18)]
        found.append(model(tokens[:, 18:21], cache=cache))
        return mx.concatenate(found + [step(tokens[:, i : i + 1], cache) for i in range(21, 40)], axis=1)

    assert relative_error(logits(replayed(model)), host(logits(as_it_is(model)))) < TOLERANCE[mx.float32]
    assert decoding_of(model).captured == 3  # in pages; then, as rows are hidden, 32 rows, and 64


def test_what_a_batch_gave_away_does_not_hold_its_memory(rng: np.random.Generator) -> None:
    model, tokens = make(rng, mx.bfloat16), words(rng, 2, 24)
    kept, expected = [], []
    with mlx_cuda.patch():
        for _ in range(3):
            cache = merged(model, [tokens[:1, :PROMPT], tokens[1:, :4]])
            for i in range(PROMPT, 24):
                model(tokens[:, i : i + 1], cache=cache)
            kept.append([each.extract(1) for each in cache])
            expected.append([host(each.keys[1:2, :, PROMPT - 4 : each._idx]) for each in cache])
            del cache
        assert decoding_of(model).captured == 1
    for given, exact in zip(kept, expected, strict=True):
        for one, keys in zip(given, exact, strict=True):
            assert np.array_equal(host(one.keys), keys)


def test_a_batch_where_others_have_the_memory(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for all that may come do not fit: there are fewer, and nothing is kept of what was tried."""
    children = pytest.importorskip("tests.soak.children", reason="tests.soak is in a checkout alone")
    model, tokens = make(rng, mx.float16), words(rng, 3, 40)
    prompts = [tokens[i : i + 1, :length] for i, length in enumerate((PROMPT, 3, 7))]

    def logits(step: Callable[..., mx.array]) -> tuple[mx.array, list[Any]]:
        cache = merged(model, prompts)
        return mx.concatenate([step(tokens[:, i : i + 1], cache) for i in range(PROMPT, 40)], axis=1), cache

    exact = host(logits(as_it_is(model))[0])
    logits(replayed(make(rng, mx.float16)))  # loads the kernels, which stay in memory
    gc.collect()
    total = int(mx.device_info(mx.gpu)["total_memory"])
    monkeypatch.setattr(batches, "EXPECTED", 1 << 16)  # a sixth of what MLX may use, which is more than there is
    mx.clear_cache()
    with Path(os.devnull).open("wb") as log:
        others = children.Child(["-m", "tests.soak.ballast"], log)
        try:
            others.ask(f"fill {100 * (1 - 1.5 * 2**30 / total)}", 60)
            ours, cache = logits(replayed(model))
            assert relative_error(ours, exact) <= TOLERANCE[mx.float16]
            assert all(map(is_in_pages, cache))
            assert not decoding_of(model).errors
            mx.eval(mx.zeros(700 << 20, mx.uint8))
        finally:
            others.end()
