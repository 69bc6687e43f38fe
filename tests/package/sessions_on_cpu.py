"""Captured steps on the CPU: what Session and PagedSession use of the native module, with a model that runs again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._attention.paged import _written as written
from mlx_cuda._mlx_lm import batches, caches, models, pages, prompts, stand_ins
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._mlx_lm.stand_ins import PagedStandIn, ReplacedStandIn
from mlx_cuda._replay import capture, pool, prefixes, sequences, states, step, watch
from mlx_cuda._replay.capture import Capture, while_captured
from mlx_cuda._replay.kinds import Place

from ..gpu.decoding_model import Model, merged


class CaptureError(RuntimeError):
    """The native module's."""


def native_module(**others: Any) -> Any:
    """What all captures use of the native module, where no model is changed and nobody keeps arrays; and others."""
    return SimpleNamespace(
        CaptureError=CaptureError,
        Watch=lambda *_: SimpleNamespace(unchanged=lambda _: True),
        lifetimes_between=lambda *_: SimpleNamespace(any_left=lambda _: False),
        **others,
    )


class OneStep:
    """Captured as one kernel, which no array outlives."""

    nodes = 1
    has_sums = False
    shared: list[mx.array]

    def owns(self, arrays: list[mx.array]) -> bool:
        return len(arrays) == len(self.shared) and all(one is other for one, other in zip(arrays, self.shared, strict=True))

    def has_arrays_left(self) -> bool:
        return False


class Step(OneStep):
    """What `Session` uses of src/decoding/capture/step.h, and `again`, which is given it."""

    def __init__(self, tokens: mx.array, places: int, _: mx.Stream, pages: tuple[int, int] | None = None) -> None:
        self.batch = tokens.shape[0]
        self.pages = None if pages is None else mx.zeros((places, self.batch, pages[1]), mx.int32)
        self.given = tokens
        self.sequences = mx.zeros((places, 2, self.batch), mx.int32)
        self.shared = []
        self.again: Callable[[], mx.array] | None = None
        self.there = self.batch

    def tokens(self) -> mx.array:
        return self.given

    def offset(self, place: int) -> mx.array:
        return mx.array(self.places[place].offset)

    def row(self, place: int) -> mx.array:
        return mx.array(self.places[place].row)

    def offsets(self, place: int) -> mx.array:
        return self.places[place].offset + self.sequences[place, 0]

    def lengths(self, place: int) -> mx.array:
        if self.pages is not None:
            return mx.where(mx.arange(self.batch) < self.there, self.offsets(place) + 1, 0).astype(mx.int32)
        return mx.full(self.batch, self.places[place].length, mx.int32)

    def starts(self, place: int) -> mx.array:
        return self.places[place].start + self.sequences[place, 1]

    def table(self, place: int) -> mx.array:
        assert self.pages is not None
        return self.pages[place]

    def set_sequences(self, sequences: mx.array, table: mx.array | None = None) -> None:
        assert sequences.shape == self.sequences.shape
        assert (table is None) == (self.pages is None)
        assert table is None or (self.pages is not None and table.shape == self.pages.shape)
        self.sequences, self.pages = sequences, table

    def append(self, keys: mx.array, values: mx.array, k_cache: mx.array, v_cache: mx.array, place: int) -> list[mx.array]:
        return self._append([keys, values], [k_cache, v_cache], place)

    def _append(self, rows: list[mx.array], memory: list[mx.array], place: int) -> list[mx.array]:
        if self.pages is not None:
            write_to_pages(memory, rows, self.pages[place], self.lengths(place))
            return [array + 0 for array in memory]
        if not self.shared:
            return memory
        row, first = self.places[place].row, next(i for i, array in enumerate(self.memory) if array is memory[0])
        shared = self.shared[first : first + len(memory)]
        for cache, new in zip(shared, rows, strict=True):
            cache[..., row : row + 1, :] = new
        return [array + 0 for array in shared]

    def append_quantized(
        self, keys: mx.array, values: mx.array, memory: list[mx.array], group: int, bits: int, place: int
    ) -> list[mx.array]:
        return self._append([*mx.quantize(keys, group, bits), *mx.quantize(values, group, bits)], memory, place)

    def content(self, memory: mx.array) -> mx.array:
        return memory + 0

    def finish(self, result: mx.array, _: list[mx.array], __: list[mx.array]) -> mx.array:
        return result

    def record(self, _: mx.array, tokens: mx.array, places: list[Place]) -> None:
        assert tokens.shape[0] == self.batch
        assert len(places) == self.sequences.shape[0]

    def replay(self, tokens: mx.array, places: list[Place], _: mx.Stream) -> mx.array:
        self.there, self.places = tokens.shape[0], places
        self.given = mx.pad(tokens, [(0, self.batch - self.there), (0, 0)])
        assert self.again
        logits = self.again()
        mx.eval(logits, self.shared)
        return logits

    def fill(self, content: list[mx.array], rows: list[int], memory: list[mx.array]) -> list[mx.array]:
        self.memory = memory
        self.shared = [array + 0 for array in memory]
        for shared, array, count in zip(self.shared, content, rows, strict=True):
            shared[..., :count, :] = array[..., :count, :]
        mx.eval(self.shared)
        return list(self.shared)

    def clear(self, rows: list[int | None]) -> None:
        for shared, count in zip(self.shared, rows, strict=True):
            if count is not None:
                shared[..., count:, :] = 0
        mx.eval(self.shared)

    def moved(self) -> bool:
        return False

    def free(self) -> bool:
        return holders(self.shared) == holders([mx.array(0)])


def write_to_pages(pages: list[mx.array], rows: list[mx.array], table: mx.array, lengths: mx.array, *_: Any) -> None:
    assert 0 not in {new.size for new in rows}  # the kernel is not launched for nothing
    for memory, new in zip(pages, rows, strict=True):
        memory[...] = written(memory, new, table, mx.where(lengths > 0, lengths, -1000))
        mx.eval(memory)


def row_sums(rows: list[mx.array], seed: int, _: mx.Stream) -> mx.array:
    """Numbers that are equal where all of a row's bytes are."""
    bytes_of = [np.array(part.view(mx.uint16)).swapaxes(1, 2) for part in rows]
    found = [[hash((seed, *(part[b, row].tobytes() for part in bytes_of))) for row in range(rows[0].shape[2])] for b in range(len(rows[0]))]
    return mx.array(np.array(found, np.int64).view(np.uint64))


def holders(arrays: list[mx.array]) -> set[int]:
    return {sys.getrefcount(array) for array in arrays}


class Session(stand_ins.Session):
    """With a model that runs again."""

    def record(self, taken: step.Taken, twins: list[Any] | None) -> mx.array:
        model, function = taken.model, taken.function  # nothing else is held: its caches may end
        given: Any = [SimpleNamespace(group_size=getattr(each, "group_size", 0), bits=getattr(each, "bits", 0)) for each in taken.caches]
        states = {
            layer: (type(cache), [one is not other for one, other in zip(before, cache.cache, strict=True)])
            for layer, (cache, before) in enumerate(zip(taken.caches, taken.before, strict=True))
            if before is not None
        }

        def again() -> mx.array:
            def record(capture: Capture) -> mx.array:
                shared, rest = iter(self.step.shared), zip(self.kinds, given, self.memory, self.groups, strict=True)
                stand_ins: list[Any] = []
                for layer, (kind, cache, memory, group) in enumerate(rest):
                    own = [next(shared) for _ in memory]
                    stand_ins.append(
                        ReplacedStandIn(capture, own, *states[layer])
                        if layer in states
                        else self.stand_in(capture, kind, cache, None, list(memory), group)
                    )
                logits: mx.array = function(model, self.step.tokens(), cache=[getattr(each, "shown", each) for each in stand_ins])
                for new, into in [pair for layer in states for pair in zip(*stand_ins[layer].replaced(), strict=True)]:
                    into[...] = new
                return logits

            try:
                return while_captured(Capture(self.step, max(self.groups) + self.apart), record)
            except ValueError:  # as `begin_capture` does
                fewer = Capture(self.step, max(self.groups) + self.apart)
                fewer.more_masks = False
                return while_captured(fewer, record)

        self.step.again, self.step.places = again, [Place(0, 0, 1)] * (max(self.groups) + 1 + self.apart)
        return super().record(taken, twins)


class PagedSession(batches.PagedSession):
    """With a model that runs again."""

    def record(self, model: Any, function: Any, logits: tuple[int, ...], changes: list[Any]) -> None:
        session = weakref.proxy(self)  # as the native step holds no session

        def again() -> mx.array:
            pool, own = session.pool, session.pool.states.first(session.batch)

            def record(capture: Capture) -> mx.array:
                given: list[Any] = [
                    PagedStandIn(capture, pair, session.columns * sequences.PAGE, pool.packing, window, place)
                    if change is None
                    else ReplacedStandIn(capture, state, change.cls, change.arrays)
                    for pair, window, place, state, change in zip(pool.arrays, pool.windows, pool.places, own, changes, strict=True)
                ]
                logits: mx.array = function(model, session.step.tokens(), cache=[getattr(each, "shown", each) for each in given])
                replace(pool.states, [[] if change is None else each.shown.cache for each, change in zip(given, changes, strict=True)])
                return logits

            return while_captured(Capture(session.step), record)

        self.step.again, self.step.places = again, [Place(0, 0, 1)] * self.count
        super().record(model, function, logits, changes)
        replace(self.pool.states, [[array + 9 for array in state] for state in self.pool.states.first(self.batch)])  # it has run once


def replace(of: states.States, content: list[list[mx.array]], *_: Any) -> None:
    """The first rows of the memory."""
    for memory, new in zip(of.memory, content, strict=True):
        for array, own in zip(memory, new, strict=True):
            array[: own.shape[0]] = own
    mx.eval(of.memory)


def same_arrays(given: list[mx.array], known: list[mx.array]) -> bool:
    return len(given) == len(known) and all(bool(mx.array_equal(*both).item()) for both in zip(given, known, strict=True))


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    native = native_module(
        step=Step,
        same_arrays=same_arrays,
        write_to_pages=write_to_pages,
        row_sums=row_sums,
    )
    for module in (models, step, batches, pool, prefixes, prompts, capture, watch):
        monkeypatch.setattr(module, "native", SimpleNamespace(module=lambda _: native, loaded=None))
    monkeypatch.setattr(batches, "PagedSession", PagedSession)
    monkeypatch.setattr(states.States, "write", lambda self, _, content, __: replace(self, content))
    monkeypatch.setattr(models, "Session", Session)
    monkeypatch.setattr(caches, "LEAST_CAPACITY", 16)
    monkeypatch.setattr(caches, "HEADROOM", 4)
    return Decoding()


@pytest.fixture
def model() -> Model:
    mx.random.seed(7)
    model = Model(size=32, heads=2, kv_heads=1, dim=16, hidden=32)
    mx.eval(model.parameters())
    return model


def as_it_is(model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    return lambda tokens, cache: model(tokens, cache=cache)


def replayed(decoding: Decoding, model: Any) -> Callable[[mx.array, list[Any]], mx.array]:
    def call(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = decoding.step(model, type(model).__call__, tokens, cache, at_once=True)
        assert decoding.reason == ""
        return logits

    return call


def both_calls(decoding: Decoding, model: Any) -> tuple[Callable[[mx.array, list[Any]], mx.array], ...]:
    """The model's call as it is, and through captured steps."""
    return as_it_is(model), replayed(decoding, model)


def of_three(call: Callable[..., mx.array], model: Any, tokens: mx.array) -> tuple[list[Any], list[mx.array]]:
    """A batch of three that has taken four steps, and their logits."""
    cache = merged(model, [tokens[i : i + 1, :n] for i, n in enumerate((5, 3, 8))])
    return cache, [call(tokens[:, i : i + 1], cache) for i in range(8, 12)]


def joined(call: Callable[..., mx.array], model: Any, tokens: mx.array) -> tuple[list[Any], list[mx.array]]:
    """A batch of four, in which another's sequences go on that has them by itself as well; and the logits of both so far."""
    one, other = (merged(model, [tokens[i : i + 1, :n] for i, n in pair]) for pair in (((0, 5), (1, 3)), ((2, 8), (0, 4))))
    logits = [call(tokens[:2, 9 + i : 10 + i], cache) for i in range(4) for cache in (one, other)]
    for each, more in zip(one, other, strict=True):
        each.extend(more)
    four = mx.concatenate([tokens, tokens[:1]])
    logits += [call(four[:, 20:21], one), call(tokens[:2, 21:22], other), call(four[:, 22:23], one), call(tokens[:2, 23:24], other)]
    return one, logits


def close(one: mx.array, other: mx.array) -> bool:
    return bool(np.allclose(np.array(one), np.array(other), atol=1e-4, rtol=1e-3))


def all_close(some: list[mx.array], others: list[mx.array]) -> bool:
    return all(close(*both) for both in zip(some, others, strict=True))


def words(count: int) -> mx.array:
    return mx.array(np.random.default_rng(5).integers(0, 500, (3, count)))


def set_both(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    for module in (batches, pages, pool, sequences):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
