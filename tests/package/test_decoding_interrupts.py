"""An interrupt at any call within a step: the caches are as before it, and the step and those that follow give what they should.

The native step is played by Python; the interrupts come where Python looks for signals, by a profile function.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.replacing import alone
from mlx_cuda._mlx_lm import caches as caches_module
from mlx_cuda._mlx_lm import models
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._replay import capture, watch
from mlx_cuda._replay.kinds import Place

from ..gpu.decoding_model import KVCache, RotatingKVCache
from .sessions_on_cpu import OneStep, native_module

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
CAPTURING = [str(Path(str(module.__file__)).parent) for module in (models, capture)]
WATCHED = (*CAPTURING, __file__, contextlib.__file__, sys.modules[KVCache.__init__.__module__].__file__ or "")
POINTS = 2000  # a step has fewer
WINDOW = 8


class Model(nn.Module):  # type: ignore[misc]
    """A number for each token, from where it is and from all that its caches hold."""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = tokens.astype(mx.float32)[:, None, :, None]
        for each in cache:
            offset = each.offset
            keys, values = each.update_and_fetch(x % 8191, x % 127)
            x = x + self.mix(keys, values, offset)
        return x[:, 0]

    @staticmethod
    def mix(keys: mx.array, values: mx.array, offset: Any) -> mx.array:
        mixed: mx.array = 3 * keys.sum(axis=2, keepdims=True) + values.max(axis=2, keepdims=True) + 5 * offset
        return mixed


class Step(OneStep):
    """What `Session` uses of the native one, for that model."""

    def __init__(self, *_: Any) -> None:
        self.groups: list[int] = []
        self.shared = []

    def tokens(self) -> mx.array:
        return mx.zeros((1, 1), mx.int32)

    def offset(self, place: int) -> mx.array:
        return mx.array(place)

    def lengths(self, place: int) -> mx.array:
        return mx.array([place])

    def append(self, keys: mx.array, values: mx.array, k_cache: mx.array, v_cache: mx.array, place: int) -> tuple[mx.array, mx.array]:  # noqa: ARG002
        self.groups.append(place)
        return k_cache, v_cache

    def record(self, *_: Any) -> None:
        pass

    def replay(self, tokens: mx.array, places: list[Place], stream: mx.Stream) -> mx.array:  # noqa: ARG002
        x = tokens.astype(mx.float32)[:, None, :, None]
        for layer, group in enumerate(self.groups):
            place, (keys, values) = places[group], self.shared[2 * layer : 2 * layer + 2]
            keys[..., place.row : place.row + 1, :] = x % 8191
            values[..., place.row : place.row + 1, :] = x % 127
            x = x + Model.mix(keys[..., : place.length, :], values[..., : place.length, :], place.offset)
        return x[:, 0]

    def fill(self, content: list[mx.array], rows: list[int], memory: list[mx.array]) -> list[mx.array]:
        parts = zip(content, rows, memory, strict=True)
        self.shared = [mx.concatenate([array[..., :count, :], room[..., count:, :]], axis=2) for array, count, room in parts]
        return self.shared

    def clear(self, rows: list[int]) -> None:
        pass

    def free(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    module = native_module(step=Step, same_arrays=lambda given, known: given == known)
    monkeypatch.setattr(_native, "module", lambda _: module)
    monkeypatch.setattr(caches_module, "LEAST_CAPACITY", 16)
    monkeypatch.setattr(caches_module, "HEADROOM", 4)
    yield
    mx.set_default_device(before)


class Interrupting:
    """Raises KeyboardInterrupt at one of the places where Python looks for signals, while it is entered."""

    def __init__(self, point: int) -> None:
        self.left = point
        self.where = ""
        self.seen: set[tuple[str, int]] = set()  # of watch.py, which walks through all of a model: each place of it once

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        inside_native = event == "c_return" and isinstance(frame.f_locals.get("self"), Step)
        ended = event == "return" and frame.f_code is Decoding.step.__code__
        if event == "c_call" or inside_native or ended or not frame.f_code.co_filename.startswith(WATCHED):
            return
        if frame.f_code.co_filename == watch.__file__:
            if (event, frame.f_lineno) in self.seen:
                return
            self.seen.add((event, frame.f_lineno))
        self.left -= 1
        if self.left < 0 and not self.where:
            self.where = f"{event} of {name}, line {frame.f_lineno}"
            raise KeyboardInterrupt(self.where)


def run(decoding: Decoding, model: Model, cache: list[Any], token: int) -> float:
    return float(decoding.step(model, Model.__call__, mx.array([[token]]), cache, at_once=False).item())


def interrupted(decoding: Decoding, model: Model, cache: list[Any], token: int, point: int) -> tuple[float | None, str]:
    """The result, or None where an interrupt came; and where."""
    interrupt = Interrupting(point)
    logits = None
    sys.setprofile(interrupt)
    try:
        logits = decoding.step(model, Model.__call__, mx.array([[token]]), cache, at_once=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return (None if logits is None else float(logits.item())), interrupt.where


def token(index: int) -> int:
    return index * index % 61 + 1


def fresh(kinds: str) -> list[Any]:
    return [KVCache() if kind == "g" else RotatingKVCache(WINDOW, keep=2) for kind in kinds]


def expected(kinds: str, count: int) -> list[float]:
    model, cache = Model(), fresh(kinds)
    return [model(mx.array([[token(index)]]), cache=cache).item() for index in range(count)]  # type: ignore[misc]


def where(cache: list[Any]) -> list[tuple[int, int]]:
    return [(each.offset, getattr(each, "_idx", 0)) for each in cache]


ALIKE = [pytest.param(kinds, marks=pytest.mark.nightly) for kinds in ("gg", "rr")]  # each of them is a part of "gr"


# The token at whose step the interrupt comes: the second is captured, then those are replayed that the memory has room for.
@pytest.mark.parametrize("kinds", ["gr", *ALIKE])
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(1, id="recorded", marks=pytest.mark.nightly),
        pytest.param(2, id="replayed"),
        pytest.param(11, id="replayed where a window is full"),
        pytest.param(16, id="recorded with more memory", marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_step_can_be_taken_again(kinds: str, at: int) -> None:
    own = mx.fast.scaled_dot_product_attention
    results = expected(kinds, at + 6)
    points = 0
    for point in range(POINTS):
        decoding, model, cache = Decoding(), Model(), fresh(kinds)
        assert [run(decoding, model, cache, token(index)) for index in range(at)] == results[:at]
        before = where(cache)
        found, place = interrupted(decoding, model, cache, token(at), point)
        with pytest.raises(RuntimeError, match="un-acquired"):  # noqa: PT012
            alone.release()
            pytest.fail(place)
        assert mx.fast.scaled_dot_product_attention is own, place
        assert getattr(capture._current, "capture", None) is None, place
        assert not getattr(models._inside, "a_step", False), place
        if found is None:
            assert where(cache) == before, place
            found = run(decoding, model, cache, token(at))
        assert [found, *(run(decoding, model, cache, token(index)) for index in range(at + 1, at + 6))] == results[at:], place
        assert decoding.replayed >= 3, place
        if not place:
            break
        points += 1
    assert 10 < points < POINTS


@pytest.mark.parametrize("kinds", ["gr", *ALIKE[:1]])
def test_another_cache_that_takes_the_memory(kinds: str) -> None:
    results = expected(kinds, 9)
    for point in range(POINTS):
        decoding, model, cache = Decoding(), Model(), fresh(kinds)
        for index in range(4):
            run(decoding, model, cache, token(index) + 7)
        del cache
        other = fresh(kinds)
        for index in range(2):
            model(mx.array([[token(index)]]), cache=other)
        before = where(other)
        found, place = interrupted(decoding, model, other, token(2), point)
        if found is None:
            assert where(other) == before, place
            found = run(decoding, model, other, token(2))
        assert [found, *(run(decoding, model, other, token(index)) for index in range(3, 9))] == results[2:], place
        if not place:
            break
    assert 10 < point < POINTS - 1
