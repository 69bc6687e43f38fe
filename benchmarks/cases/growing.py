"""A cache of keys and values that grows at each step: what each new length costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_cuda._loader import native as _native

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Settings, Side, Timing, TorchEngine
from .base import DecodingHeads, Prepared, Unit, explanation, input_sets, operation, tolerance


@dataclass(frozen=True)
class GrowingCase(DecodingHeads):
    """``steps`` of ``queries`` queries each, with as many new keys at every step, each step waited for. No length comes twice: what is
    made for a length shows. A side that takes too long is stopped after ``seconds``, and its steps are counted.
    """

    unit: ClassVar[Unit] = "steps/s"
    queries: int
    steps: int = 1000
    seconds: float = 2.0

    @property
    def name(self) -> str:
        return f"{self.steps} steps of {self.queries}, D={self.head_dim}, {self.heads}/{self.kv_heads} heads"

    @property
    def work(self) -> float:
        return 1.0

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002  (each length would be planned anew there as well)
        keys = (1, self.kv_heads, self.queries * (self.steps + 1), self.head_dim)
        inputs = input_sets([(1, self.heads, self.queries, self.head_dim), keys, keys], [1.0] * 3, self.dtype)[:1]
        scale = self.scale
        calls: dict[str, partial[Any]] = {
            "ours": operation("attention", scale=scale, mask="causal"),
            "upstream": partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal"),
        }
        q, k, v = inputs[0]
        numbers: dict[str, float] = {}

        def step(call: Callable[..., Any], index: int) -> mx.array:
            end = self.queries * (index + 1)
            return call(q, k[:, :, :end], v[:, :, :end])  # type: ignore[no-any-return]

        def run(name: str, call: Callable[..., Any]) -> Timing:
            before, start, seconds, steps = plans(), time.perf_counter(), 0.0, 0
            while steps < self.steps and seconds < self.seconds:
                steps += 1
                mx.eval(step(call, steps))
                seconds = time.perf_counter() - start
            numbers[f"{name}: steps"] = steps
            if name == "ours" and before is not None:
                numbers["ours: plans"] = (plans() or 0) - before
            return Timing(1, 0, 1, [seconds / steps])

        def measure(_: Settings) -> dict[str, Timing | Exception]:
            return {name: run(name, call) for name, call in calls.items()}

        def error(result: mx.array) -> float:
            """Of one step in the middle."""
            exact = references.attention(
                *(host(each) for each in (q[:, -1:], k[:, -1:, :result_keys], v[:, -1:, :result_keys])),
                scale=scale,
                mask=np.arange(result_keys) <= np.arange(self.queries)[:, None] + result_keys - self.queries,
            )
            return relative_error(result[:, -1:], exact)

        result_keys = self.queries * (self.steps // 2)
        middle = [(q, k[:, :, :result_keys], v[:, :, :result_keys])]
        sides = [
            Side(name, MlxEngine(), call, middle, explain=explanation(call) if name == "ours" else None) for name, call in calls.items()
        ]
        return Prepared(sides, error, tolerance(self.dtype), measure, numbers)


def plans() -> int | None:
    """cuDNN plans built so far, where the native module counts them."""
    counter = getattr(_native.load(), "attention_plans", None) if mx.cuda.is_available() else None
    return None if counter is None else int(counter())


def cases(*, quick: bool) -> list[GrowingCase]:
    if quick:
        return [GrowingCase(4, steps=10, heads=4, kv_heads=2)]
    return [GrowingCase(64), GrowingCase(1)]
