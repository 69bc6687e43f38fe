"""A native module for all functions that ``patch`` replaces, which computes with MLX on the CPU what the rules send to kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda import _patch
from mlx_cuda._attention.composed import compose
from mlx_cuda._attention.options import Options
from mlx_cuda._common.gradients import with_gradients
from mlx_cuda._loader import native as _native
from mlx_cuda._mlx_lm import places as mlx_lm
from mlx_cuda._recurrence import rules, short_conv
from mlx_cuda._recurrence.fused import unfused

from tests.gpu.mlx_lm_parts import part

from .compiled import compiles
from .matmuls import Matmuls

KERNELS = {
    "quantized_small_m", "dequantize_then_gemm", "gather_mm", "grouped_quantized", "decode_attention", "flash_attention", "cudnn_attention",
    "quantized_attention", "linear_attention", "short_conv", "all_sum",
}  # fmt: skip


class Engines(Matmuls):
    """With ``compiled``, the cache of calls is the real one. ``calls`` are those of kernels."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.broken: Callable[[], mx.array] | None = None  # what kernels do in place of their work
        if compiled is not None:
            self.cached, self.in_shapeless_trace = compiled.cached, compiled.in_shapeless_trace

    def __getattribute__(self, name: str) -> Any:
        if name in KERNELS and self.broken is not None:
            broken = self.broken
            return lambda *_: broken()
        return super().__getattribute__(name)

    def traced(self, _: list[mx.array]) -> bool:
        return True  # so that all have their gradients from Python

    def cudnn_refusal(self, *_: Any) -> str:
        return ""

    def decode_attention(self, q: mx.array, k: mx.array, v: mx.array, options: Options, _: mx.Stream) -> list[mx.array]:
        self.calls.append(f"attention {q.shape}")
        given: dict[str, Any] = {name: each for name in ("mask", "sinks") if (each := getattr(options, name)) is not None}

        def attend(q: mx.array, k: mx.array, v: mx.array, *rest: Any) -> mx.array:
            return compose(q, k, v, options._replace(**dict(zip(given, rest, strict=True))))[0]

        return [primitive(attend, q, k, v, *given.values())]

    flash_attention = cudnn_attention = decode_attention

    def quantized_attention(self, q: mx.array, *rest: Any) -> list[mx.array]:
        k, v, form, options, *_ = rest
        self.calls.append(f"quantized attention {q.shape}")
        keys, values = (self.dequantize(*of, *form, q.dtype) for of in (k, v))
        return compose(q, keys, values, options)

    def dequantize(self, w: mx.array, scales: mx.array, biases: mx.array, *rest: Any) -> mx.array:
        group_size, bits, mode, dtype, *_ = rest
        return mx.dequantize(w, scales, biases, group_size, bits, mode, dtype=dtype)

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

    def all_sum(self, x: mx.array, *_: Any) -> mx.array | None:
        if x.dtype not in {mx.float16, mx.bfloat16, mx.float32}:
            return None
        self.calls.append(f"sum {x.shape}")
        return primitive(lambda x: x + 0, x)


def primitive(function: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """As one operation, whose shapes hold for the sizes of this call alone."""

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        found = mx.vjp(function, primals, [cotangent])[1]
        return found[0] if len(found) == 1 else found

    return with_gradients(function, backward)(*arrays)


def _mlx_compiles() -> bool:
    calls = []

    def function(x: mx.array) -> mx.array:
        calls.append(x)
        return x

    compiled = mx.compile(function)
    compiled(compiled(mx.array(1.0)))
    return len(calls) == 1  # a trace, in the place of both calls


traced_by_mlx = pytest.mark.skipif(not _mlx_compiles(), reason="MLX compiles no functions for this system's CPU")
both_ways = pytest.mark.parametrize(
    "engines", [pytest.param(False, id="in Python"), pytest.param(True, id="natively", marks=compiles)], indirect=True
)
natively_by_day = pytest.mark.parametrize(  # as users have it
    "engines",
    [pytest.param(False, id="in Python", marks=pytest.mark.nightly), pytest.param(True, id="natively", marks=compiles)],
    indirect=True,
)


@pytest.fixture
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Iterator[Engines]:
    """Every stream has an engine: an H200 with this module, whose cache of calls is the real one or none.

    ``patch`` replaces what mlx-lm computes by as well, but no steps of models.
    """
    with contextlib.suppress(ImportError):
        for module_name, _ in mlx_lm.PLACES:
            part(module_name.removeprefix("mlx_lm."))
    by_native = getattr(request, "param", False)
    module: Any = Engines(request.getfixturevalue("native") if by_native else None)
    engine = _native.Engine(module, (9, 0), (9, 28, 0))
    monkeypatch.setattr(_native, "engine", lambda _: engine)
    if by_native:
        monkeypatch.setattr(_native, "loaded", module)
    monkeypatch.setattr(short_conv, "FEWEST_NUMBERS", 1)
    put_before = _patch._put

    def put(functions: Any) -> Any:
        patched = put_before(functions)
        mlx_lm.put()
        patched.callback(mlx_lm.take_away)
        return patched

    monkeypatch.setattr(_patch, "_put", put)
    monkeypatch.setattr(_patch, "_install", lambda: None)
    yield module
    monkeypatch.undo()
    mlx_cuda.unpatch()
