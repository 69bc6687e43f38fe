"""Sequences that begin alike have the same pages."""

from __future__ import annotations

import copy
import gc
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay import prefixes, sequences
from mlx_cuda._replay.pool import held_by
from mlx_cuda._replay.prefixes import Free, Page, Prefixes

from ..gpu.decoding_model import KVCache, Model, RotatingKVCache, merged
from .sessions_on_cpu import close, replayed, row_sums, set_both, words

LENGTHS = (40, 25, 9)  # of sequences, in pages of eight rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAGE": 8, "AHEAD": 1}.items():
        set_both(monkeypatch, name, value)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    monkeypatch.setattr(prefixes, "native", SimpleNamespace(module=lambda _: SimpleNamespace(row_sums=row_sums)))
    mx.random.seed(1)
    return [mx.random.normal((3, 2, 40, 16)).astype(mx.bfloat16) for _ in range(4)]


def digests(known: Prefixes, rows: list[mx.array]) -> list[list[bytes]]:
    return known.digests(rows, LENGTHS, mx.default_stream(mx.cpu))


def test_pages_before_the_last_row_have_digests(rows: list[mx.array]) -> None:
    found = digests(Prefixes(8), rows)
    assert [len(each) for each in found] == [4, 3, 1]
    assert len({digest for own in found for digest in own}) == 8


@pytest.mark.parametrize("part", range(4))
def test_a_digest_is_of_all_that_a_page_holds(rows: list[mx.array], part: int) -> None:
    known = Prefixes(8)
    first = digests(known, rows)
    rows[part][1, 1, 24, 15] += 0.5  # the ninth of 25 rows, of which the first fifteen are padding
    rows[part][2, 0, 30, 3] += 0.5  # in padding
    second = digests(known, rows)
    assert [one == other for one, other in zip(first[1], second[1], strict=True)] == [True, False, True]
    assert (second[0], second[2]) == (first[0], first[2])
    assert not {*digests(Prefixes(8), rows)[0]} & {*second[0]}  # each has a secret of its own


def test_a_page_is_free_again_when_nobody_has_it(rows: list[mx.array]) -> None:
    known, free = Prefixes(8), Free([1, 2, 3])
    given = digests(known, rows)[0]
    one: list[Page] = []
    other: list[Page] = []
    known.fill(one, given, free)
    assert [page.number for page in one] == [3, 2, 1]  # as many as there are
    known.fill(other, given[:2], free)
    assert other == one[:2]
    del one[1:]
    gc.collect()
    assert len(free) == 1
    assert free.take().number == 1
    del one[0], other[:]
    gc.collect()
    assert len(free) == 3
    assert not known.known
    taken = [free.take() for _ in range(3)]
    assert sorted(page.number for page in taken) == [1, 2, 3]


def test_pages_that_another_thread_lets_go_of(rows: list[mx.array]) -> None:
    """None is had while it is free."""
    known, free, given = Prefixes(8), Free(range(8)), digests(Prefixes(8), rows)[0]
    dropped: queue.SimpleQueue[list[Page] | None] = queue.SimpleQueue()

    def drop() -> None:
        while dropped.get() is not None:
            pass

    thread, interval = threading.Thread(target=drop), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            pages: list[Page] = []
            known.fill(pages, given, free)
            own = [free.take() for _ in range(min(2, len(free)))]
            numbers = [page.number for page in pages + own]
            assert len({*numbers}) == len(numbers)
            dropped.put(pages)
            del pages, own
    finally:
        dropped.put(None)
        thread.join()
        sys.setswitchinterval(interval)
    gc.collect()
    assert len(free) == 8


@pytest.mark.usefixtures("small")
def test_requests_with_one_prefix(decoding: Decoding, model: Model) -> None:
    tokens, call = words(64), replayed(decoding, model)
    prompts = [tokens[:1, :30], tokens[1:2, :21], mx.concatenate([tokens[:1, :20], tokens[1:2, 20:30]], axis=1)]
    prefix = [KVCache() for _ in model.layers]  # as mlx-lm's server keeps it
    model(tokens[:1, :20], cache=prefix)

    def batch(*chosen: int) -> list[Any]:
        caches = [copy.deepcopy(prefix) if index != 1 else [KVCache() for _ in model.layers] for index in chosen]
        for index, own in zip(chosen, caches, strict=True):
            model(prompts[index][:, own[0].offset :], cache=own)
        kind = type(merged(model, [prompts[0]])[0])
        return [kind.merge([own[layer] for own in caches]) for layer in range(len(model.layers))]

    def numbers(cache: list[Any]) -> list[list[int]]:
        held = held_by(cache)
        assert held is not None
        return [[page.number for page in sequence.pages[0]] for sequence in held.sequences]

    sizes = ((0, 1), (2,))
    wanted, ours = ([batch(*chosen) for chosen in sizes] for _ in range(2))
    for at in range(10):
        for chosen, theirs, cache in zip(sizes, wanted, ours, strict=True):
            token = tokens[: len(chosen), 30 + at : 31 + at]
            assert close(call(token, cache), model(token, cache=theirs))
    (first, second), (third,) = map(numbers, ours)
    assert first[:2] == third[:2]  # 16 of 20 rows
    assert len({*first, *second, *third}) == len(first + second + third) - 2
    pool = decoding.batches.pool
    assert pool is not None
    ours.pop(0)
    assert close(call(tokens[:1, 40:41], ours[0]), model(tokens[:1, 40:41], cache=wanted[1]))  # its pages are still its own
    del ours, cache
    gc.collect()
    assert len(pool.regions[0].free) == pool.regions[0].count - 1


@pytest.mark.usefixtures("small")
def test_no_pages_are_shared_where_rows_are_missing(decoding: Decoding, model: Model) -> None:
    tokens, call = words(40), replayed(decoding, model)
    cache = merged(model, [tokens[:1, :12], tokens[:1, :12]], lambda: RotatingKVCache(16))
    for i in range(20, 26):
        call(tokens[:2, i : i + 1], cache)
    assert decoding.batches.pool is not None
    assert decoding.batches.pool.prefixes is None


def two_in_pages(decoding: Decoding, model: Model) -> list[Any]:
    """Caches of two sequences after four steps."""
    tokens, call = words(40), replayed(decoding, model)
    cache = merged(model, [tokens[:1, :20], tokens[1:2, :9]])
    for i in range(20, 24):
        call(tokens[:2, i : i + 1], cache)
    return cache


@pytest.mark.usefixtures("small")
def test_copies_have_arrays_of_their_own(decoding: Decoding, model: Model) -> None:
    """As mlx-lm's server copies a cache before it trims it to what a request has in common with it."""
    cache = two_in_pages(decoding, model)
    given, free = [each.extract(0) for each in cache], len(decoding.batches.pool.regions[0].free)  # type: ignore[union-attr]
    copies, whole = copy.deepcopy(given), copy.deepcopy(cache)
    assert not any(map(sequences.is_in_pages, [*given, *copies, *whole]))
    assert all(map(sequences.is_in_pages, cache))
    assert len(decoding.batches.pool.regions[0].free) == free  # type: ignore[union-attr]
    for each in copies:
        each.trim(3)
    assert [each.offset for each in copies] == [21, 21]
    assert close(copies[1].keys[..., :21, :], given[1].keys[..., :21, :])
    assert close(whole[1].extract(0).keys, given[1].keys)
