"""A native module for all functions that ``patch`` replaces: it computes with MLX, on the CPU, where the rules send calls to a GPU's kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_cuda import _mlx_lm as mlx_lm
from mlx_cuda import _patch
from mlx_cuda._attention.composed import compose
from mlx_cuda._attention.quantized import Call as QuantizedCall
from mlx_cuda._common.choice import OLDEST_GPU
from mlx_cuda._common.gradients import with_gradients
from mlx_cuda._loader import native as _native
from mlx_cuda._recurrence import rules, short_conv
from mlx_cuda._recurrence.fused import unfused

from .products import Products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_cuda._attention.options import Options

COUNTED = ("quantized_skinny", "dequantize_then_gemm", "gather_mm", "grouped_quantized")


class Engines(Products):
    """With ``compiled``, the cache of calls is the real one. ``calls`` are those of kernels."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.broken: Callable[[], mx.array] | None = None  # what kernels do in place of their work
        if compiled is not None:
            self.cached, self.valid_for, self.in_shapeless_trace = compiled.cached, compiled.valid_for, compiled.in_shapeless_trace

    def __getattribute__(self, name: str) -> Any:
        if name in {*COUNTED, *KERNELS} and self.broken is not None:
            return lambda *_: self.broken()  # type: ignore[misc]
        return super().__getattribute__(name)

    def traced(self, _: list[mx.array]) -> bool:
        return True  # so that all have their gradients from Python

    def cudnn_refusal(self, *_: Any) -> str:
        return ""

    def decode_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream) -> list[mx.array]:
        self.calls.append(f"attention {q.shape}")
        given = {name: each for name in ("mask", "sinks") if (each := getattr(options, name)) is not None}

        def attend(q: mx.array, k: mx.array, v: mx.array, *rest: mx.array) -> mx.array:
            return compose(q, k, v, options._replace(**dict(zip(given, rest, strict=True))))[0]

        return [primitive(attend, q, k, v, *given.values())]

    flash_attention = cudnn_attention = decode_attention

    def quantized_attention(self, q: mx.array, k: Any, v: Any, form: Any, options: Options, on: mx.Stream, _: Any) -> list[mx.array]:
        self.calls.append(f"quantized attention {q.shape}")
        call = QuantizedCall(q, k, v, form, None, options, (0, 0))
        wide = [mx.dequantize(*of, form.group_size, form.bits, form.mode, dtype=q.dtype) for of in (k, v)]
        return compose(call.q, *wide, options)

    def dequantize(self, w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int, mode: str, *rest: Any) -> mx.array:
        return mx.dequantize(w, scales, biases, group, bits, mode, dtype=rest[0])

    def linear_attention(self, *arguments: Any) -> tuple[mx.array, mx.array]:
        *arrays, delta, _chunked, _on = arguments
        self.calls.append(f"linear attention {arrays[0].shape}")
        y, state = unfused(rules.Call(*arrays), delta=delta)
        return y, state

    def linear_attention_scan(self, *_: Any) -> None:
        return None  # their gradients are composed

    def short_conv(self, x: mx.array, weight: mx.array, *_: Any) -> tuple[mx.array, mx.array]:
        self.calls.append(f"convolution {x.shape}")
        return primitive(lambda x, weight: short_conv.upstream_conv1d(x, weight, groups=x.shape[2]), x, weight), x

    def all_sum(self, x: mx.array, *_: Any) -> mx.array:
        self.calls.append(f"sum {x.shape}")
        return primitive(lambda x: x + 0, x)


KERNELS = (
    *("decode_attention", "flash_attention", "cudnn_attention", "quantized_attention", "linear_attention", "short_conv", "all_sum"),
)


def primitive(function: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """As one operation, whose shapes hold for the sizes of this call alone."""

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        found = mx.vjp(function, primals, [cotangent])[1]
        return found[0] if len(found) == 1 else found

    return with_gradients(function, backward)(*arrays)


@pytest.fixture(params=[False, True], ids=["in Python", "by way of the native module"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native: Any, forgetful: None) -> Iterator[Engines]:
    """Every stream has an engine: an H200 with this module, whose cache of calls is the real one or none."""
    for name in ("models.base", "models.gated_delta", "models.ssm"):
        pytest.importorskip(f"mlx_lm.{name}")
    module: Any = Engines(native if request.param else None)
    engine = _native.Engine(module, (9, 0), (9, 28, 0))
    assert engine.capability >= OLDEST_GPU
    monkeypatch.setattr(_native, "engine", lambda _: engine)
    if request.param:
        monkeypatch.setattr(_native, "loaded", module)
    monkeypatch.setattr(short_conv, "FEWEST_NUMBERS", 1)
    monkeypatch.setattr(_patch, "_install", mlx_lm.put)
    monkeypatch.setattr(_patch, "_remove", mlx_lm.take_away)
    yield module
    importlib.import_module("mlx_cuda").unpatch()
