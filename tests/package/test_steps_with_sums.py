"""Steps with sums over GPUs: whatever a process records, the others see each step's sums once. The native step is played by Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _decode_step
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import batches, models
from mlx_cuda._mlx_lm.models import Decoding
from mlx_cuda._mlx_lm.stand_ins import Session
from mlx_cuda._replay.errors import NotReplayed
from mlx_cuda._replay.kinds import Place

from ..gpu.decoding_model import KVCache, RotatingKVCache
from .sessions_on_cpu import CaptureError, native_module
from .test_decoding_interrupts import Model, Step, _on_the_cpu, token

__all__ = ["_on_the_cpu"]


class Sums(Step):
    """Of a model whose tokens count twice while there is another process, which hears of it."""

    has_sums = True
    alone: ClassVar = False
    wrong: ClassVar = ""  # where something goes wrong while the others are left alone
    heard: ClassVar[list[int]] = []

    @classmethod
    def fails(cls, where: str) -> bool:
        return cls.alone and cls.wrong == where

    @classmethod
    def leave_alone(cls, alone: bool) -> None:
        Sums.alone = alone

    @classmethod
    def of(cls, tokens: mx.array) -> mx.array:
        if cls.fails("model"):
            raise RuntimeError("out of memory")
        if cls.alone:
            return tokens
        cls.heard.append(int(tokens.item()))  # type: ignore[arg-type]
        return 2 * tokens

    def fill(self, content: list[mx.array], rows: list[int], memory: list[mx.array]) -> list[mx.array]:
        if self.fails("fill"):
            raise CaptureError("out of memory")
        return super().fill(content, rows, memory)

    def replay(self, tokens: mx.array, places: list[Place], stream: mx.Stream) -> mx.array:
        if self.fails("replay"):
            raise CaptureError("out of memory")
        return super().replay(self.of(tokens) + 100 * self.fails("result"), places, stream)


class Parallel(Model):
    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return super().__call__(Sums.of(tokens) if tokens[0, 0].item() else tokens, cache)  # 0: what is captured, and never run


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch, _on_the_cpu: None) -> None:
    monkeypatch.setattr(models, "several_processes", lambda: True)
    module = native_module(step=Sums, same_arrays=lambda given, known: given == known)
    monkeypatch.setattr(_native, "module", lambda _: module)
    Sums.heard, Sums.wrong, Sums.alone = [], "", False


def logits(function: Any, caches: list[Any], count: int) -> list[float]:
    return [float(function(mx.array([[token(index)]]), caches).item()) for index in range(1, count)]


@pytest.mark.parametrize("make_cache", [KVCache, lambda: RotatingKVCache(8)], ids=["growing", "rotating"])
@pytest.mark.parametrize("wrong", ["", "model", "fill", "replay", "result"])
@pytest.mark.parametrize("prompt", [0, 3])
def test_each_step_is_heard_once(make_cache: Any, wrong: str, prompt: int) -> None:
    """Results are the model's, through its capture, what outgrows it, and another conversation that takes it over."""
    model, count = Parallel(), 40
    expected = logits(lambda tokens, caches: Model()(2 * tokens, caches), [make_cache() for _ in range(3)], count)
    decoding, Sums.wrong = Decoding(), wrong

    def step(tokens: mx.array, caches: list[Any]) -> mx.array:
        if caches[0].offset < prompt:
            return model(tokens, caches)
        result: mx.array = decoding.step(model, Parallel.__call__, tokens, caches, at_once=False)
        return result

    for _ in range(2):
        assert logits(step, [make_cache() for _ in range(3)], count) == expected
    assert Sums.heard == 2 * [token(index) for index in range(1, count)]
    assert not Sums.alone
    assert (decoding.replayed > 20) == (not wrong)
    assert decoding.captured >= 1


def test_another_stream_has_a_capture_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its sums is a stream's; so what another one has left serves nobody."""
    model, decoding, caches, own = Parallel(), Decoding(), [KVCache()], [KVCache()]
    for index in range(1, 12):
        with mx.stream(mx.new_stream(mx.cpu) if index == 6 else mx.default_stream(mx.cpu)):
            mx.eval(decoding.step(model, Parallel.__call__, mx.array([[token(index)]]), caches, at_once=False))
    assert Sums.heard == [token(index) for index in range(1, 12)]
    assert decoding.captured == 3
    taken: list[Any] = []
    monkeypatch.setattr(Session, "take", lambda _, each: taken.append(each))
    del caches[:]
    with mx.stream(mx.new_stream(mx.cpu)):
        for index in range(1, 4):
            decoding.step(model, Parallel.__call__, mx.array([[token(index)]]), own, at_once=False)
    assert taken == []


def test_batches_are_not_put_into_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their captures for other numbers of sequences would be compared as they run."""
    monkeypatch.setattr(batches, "begin_capture", lambda *_, **__: None)
    states = SimpleNamespace(leave=lambda: None, first=lambda _: [])
    pool: Any = SimpleNamespace(arrays=[], windows=[], places=[], regions=[None], packing=None, states=states, wait=lambda: None)
    session = batches.PagedSession(pool, mx.zeros((2, 1), mx.int32), 16, mx.default_stream(mx.cpu))
    with pytest.raises(NotReplayed, match="an all-reduce"):
        session.record(None, Model.__call__, (1, 5), [])


def test_decode_step_returns_what_the_others_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would have the program take the step, and send its sums, once more."""
    Sums.wrong, cache = "result", [KVCache()]
    for name in ("is_step", "several_processes"):
        monkeypatch.setattr(_decode_step, name, lambda *_: True)
    result = mlx_cuda.decode_step(Parallel(), mx.array([[3]]), cache, stream=mx.cpu)
    assert result.item() == Model()(mx.array([[6]]), [KVCache()]).item()
    assert (Sums.heard, cache[0].offset) == ([3], 1)


def test_steps_that_are_not_replayed_are_begun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As replayed ones are: all processes send in one order."""
    begun: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", begun.append)
    decoding, caches = Decoding(), [KVCache()]
    result = decoding.step(Parallel(), Parallel.__call__, mx.array([[3]]), caches, at_once=False)
    assert begun == [result]
    monkeypatch.setattr(models, "several_processes", lambda: False)
    decoding.step(Parallel(), Parallel.__call__, mx.array([[3]]), [KVCache()], at_once=False)
    assert len(begun) == 1
