"""A native module that computes matmuls with MLX, in float32, and remembers what it was asked."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_cuda._common.choice import Choice
from mlx_cuda._loader import native as _native
from mlx_cuda._matmul import fp8 as _fp8


class Matmuls:
    """Every function of the contract. As in the native module, some have no gradients of their own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def quantized_small_m(self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, *rest: Any) -> mx.array:
        group_size, bits, mode, lhs, rhs, transpose, small, _, _ = rest
        self.calls.append(f"{'small' if small else 'small_m'} {x.shape} {_shape(lhs)} {_shape(rhs)}")
        dense = self._dense(w, scales, biases, group_size, bits, mode)
        a = x.astype(mx.float32)
        if rhs is not None:
            assert x.ndim == w.ndim == 3
            assert rhs.dtype == mx.uint32
            a, dense = a if lhs is None else a[lhs], dense[rhs]
        else:
            assert w.ndim == 2
        return (a @ (dense.swapaxes(-1, -2) if transpose else dense)).astype(x.dtype)

    def quantized_kernel(self, x: mx.array, w: mx.array, *rest: Any) -> str:
        _, _, _, _, _, _, rhs, transpose, small, _, _ = rest
        assert w.ndim == (2 if rhs is None else 3)
        return "" if small else f"source {x.shape} {_shape(rhs)} {transpose}"

    def dequantize_then_gemm(self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, *rest: Any) -> mx.array:
        group_size, bits, mode, transpose, _ = rest
        self.calls.append(f"dequantize {x.shape} {transpose}")
        assert w.ndim == 2
        dense = self._dense(w, scales, biases, group_size, bits, mode)
        return mx.stop_gradient((x.astype(mx.float32) @ (dense.T if transpose else dense)).astype(x.dtype))

    def expert_offsets(self, indices: mx.array, experts: int, _: mx.Stream) -> mx.array:
        assert indices.dtype == mx.uint32
        assert indices.ndim == 1
        return (indices[:, None] < mx.arange(experts + 1, dtype=mx.uint32)).sum(axis=0).astype(mx.int32)

    def grouped_matmul(self, x: mx.array, w: mx.array, offsets: mx.array, transpose: bool, _: mx.Stream) -> mx.array:
        self.calls.append(f"grouped {x.shape} {w.shape} {transpose}")
        return self._groups(x, w.astype(mx.float32), offsets, transpose)

    def grouped_kernel(self, x: mx.array, w: mx.array, rhs: mx.array | None, transpose: bool, _: mx.Stream) -> str:
        assert (x.ndim, w.ndim, x.dtype) == (2 if rhs is None else 3, 3, w.dtype)
        return f"source {x.shape} {w.shape} {_shape(rhs)} {transpose}"

    def gather_mm(self, x: mx.array, w: mx.array, lhs: mx.array | None, rhs: mx.array, *rest: Any) -> mx.array:
        transpose, ordered, _ = rest
        self.calls.append(f"gather {x.shape} {w.shape} {_shape(lhs)} {_shape(rhs)} {transpose} {ordered}")
        a, b = x.astype(mx.float32), w.astype(mx.float32)[rhs]
        a = mx.repeat(a, rhs.size // x.shape[0], axis=0) if lhs is None else a[lhs]
        return (a @ (b.swapaxes(1, 2) if transpose else b)).astype(x.dtype)

    def grouped_quantized(self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, *rest: Any) -> mx.array:
        group_size, bits, mode, offsets, transpose, _ = rest
        self.calls.append(f"grouped quantised {x.shape} {transpose}")
        assert x.shape[1] % 8 == 0
        return mx.stop_gradient(self._groups(x, self._dense(w, scales, biases, group_size, bits, mode), offsets, transpose))

    def upstream_operand(self, matrices: mx.array, weights: bool, _: mx.Stream) -> mx.array:  # noqa: ARG002
        return matrices

    def traced(self, _: list[mx.array]) -> bool:
        return False

    def fp8_matmul(self, a: mx.array, b: mx.array, *rest: Any) -> mx.array:
        scale_a, scale_b, bias, out_dtype, stream = rest
        self.calls.append(f"fp8 {a.shape} {_shape(scale_a)} {_shape(scale_b)}")
        blocked = _fp8._blocked(a.shape, b.shape, *(None if array is None else array.shape for array in (scale_a, scale_b, bias)))
        choice = Choice("fallback", "")
        return _fp8._composed(_fp8.Fp8Call(a, b, scale_a, scale_b, bias, out_dtype, blocked, stream, choice))

    def quantize_fp8(self, x: mx.array, how: str, _: mx.Stream) -> tuple[mx.array, mx.array]:
        self.calls.append(f"quantise {how}")
        return _fp8._composed_quantize(x, how)

    def _dense(self, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str) -> mx.array:
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(w, scales, biases, group_size, bits, mode, dtype=mx.float32)

    def _groups(self, x: mx.array, w: mx.array, offsets: mx.array, transpose: bool) -> mx.array:
        assert offsets.dtype == mx.int32
        row = mx.arange(x.shape[0])[:, None]
        out = mx.zeros((x.shape[0], w.shape[1 if transpose else 2]))
        for e in range(w.shape[0]):
            inside = (row >= offsets[e]) & (row < offsets[e + 1])
            out = mx.where(inside, x.astype(mx.float32) @ (w[e].T if transpose else w[e]), out)
        return out.astype(x.dtype)


def _shape(array: mx.array | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


@pytest.fixture
def matmuls(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Matmuls:
    """Every stream has an engine: an H200 with this module."""
    module: Any = Matmuls()
    engine = _native.Engine(module, (9, 0), (9, 28, 0))
    monkeypatch.setattr(_native, "engine", lambda _: engine)
    return cast("Matmuls", module)
