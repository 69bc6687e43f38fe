"""Steps with sums over GPUs: whatever a process records, the others see each step's sums once. The native step is played by Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import pytest
from mlx_cuda._decoding import models
from mlx_cuda._decoding.models import Decoding
from mlx_cuda._loader import native as _native

from ..gpu.decoding_model import KVCache, RotatingKVCache
from .test_decoding_interrupts import Model, Step, _on_the_cpu, token

if TYPE_CHECKING:
    from mlx_cuda._decoding.caches import Place

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

    def fill(self, content: list[mx.array], memory: list[mx.array]) -> list[mx.array]:
        if self.fails("fill"):
            raise RuntimeError("out of memory")
        return super().fill(content, memory)

    def replay(self, tokens: mx.array, places: list[Place], stream: mx.Stream) -> mx.array:
        if self.fails("replay"):
            raise RuntimeError("out of memory")
        return super().replay(self.of(tokens) + 100 * self.fails("result"), places, stream)


class Parallel(Model):
    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return super().__call__(Sums.of(tokens) if tokens[0, 0].item() else tokens, cache)  # 0: what is recorded, and never run


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch, _on_the_cpu: None) -> None:
    monkeypatch.setattr(models, "several_processes", lambda: True)
    held = SimpleNamespace(unchanged=lambda: True)
    module = SimpleNamespace(step=Sums, Held=lambda _: held, same_arrays=lambda given, known: given == known)
    monkeypatch.setattr(_native, "module", lambda _: module)
    Sums.heard, Sums.wrong, Sums.alone = [], "", False


def logits(function: Any, caches: list[Any], count: int) -> list[float]:
    return [float(function(mx.array([[token(index)]]), caches).item()) for index in range(1, count)]


@pytest.mark.parametrize("make_cache", [KVCache, lambda: RotatingKVCache(8)], ids=["growing", "rotating"])
@pytest.mark.parametrize("wrong", ["", "model", "fill", "replay", "result"])
def test_each_step_is_heard_once(make_cache: Any, wrong: str) -> None:
    """Results are the model's, through its recording and what outgrows it."""
    model, count = Parallel(), 40
    expected = logits(lambda tokens, caches: Model()(2 * tokens, caches), [make_cache() for _ in range(3)], count)
    decoding, Sums.wrong = Decoding(), wrong

    def step(tokens: mx.array, caches: list[Any]) -> mx.array:
        result: mx.array = decoding.step(model, Parallel.__call__, tokens, caches, at_once=False)
        return result

    assert logits(step, [make_cache() for _ in range(3)], count) == expected
    assert Sums.heard == [token(index) for index in range(1, count)]
    assert not Sums.alone
    assert (decoding.replayed > 20) == (not wrong)
    assert decoding.recorded >= 1


def test_another_stream_has_a_recording_of_its_own() -> None:
    """The memory of its sums is a stream's."""
    model, decoding, caches = Parallel(), Decoding(), [KVCache()]
    for index in range(1, 12):
        with mx.stream(mx.new_stream(mx.cpu) if index == 6 else mx.default_stream(mx.cpu)):
            mx.eval(decoding.step(model, Parallel.__call__, mx.array([[token(index)]]), caches, at_once=False))
    assert Sums.heard == [token(index) for index in range(1, 12)]
    assert decoding.replayed < 8
