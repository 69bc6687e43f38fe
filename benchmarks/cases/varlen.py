"""Sequences of different lengths one after another in one array, against a call for each of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Side, TorchEngine
from .base import AttentionHeads, Prepared, Unit, both_sides, first, input_sets, operation, tolerance, torch_input_sets


@dataclass(frozen=True)
class VarlenCase(AttentionHeads):
    """``sequences`` of random lengths with ``total`` places in all, causal. MLX, and "ours, one by one", get a call for each."""

    unit: ClassVar[Unit] = "TFLOP/s"
    total: int
    sequences: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.sequences} sequences of {self.total} in all, D={self.head_dim} causal, {self.heads}/{self.kv_heads} heads"

    @cached_property
    def bounds(self) -> np.ndarray[Any, Any]:
        """Where the sequences begin, and the end of the last one."""
        inner = np.random.default_rng(0).choice(np.arange(1, self.total), self.sequences - 1, replace=False)
        return np.array([0, *sorted(inner.tolist()), self.total], np.int32)

    @property
    def work(self) -> float:
        return 2.0 * self.heads * float((np.diff(self.bounds).astype(np.int64) ** 2).sum()) * self.head_dim

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        shapes = [(self.total, heads, self.head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        inputs, scale = input_sets(shapes, [1.0] * 3, self.dtype), self.head_dim**-0.5
        bounds, longest = mx.array(self.bounds), int(np.diff(self.bounds).max())
        mx.eval(bounds)
        varlen = operation("attention_varlen", max_seqlen_q=longest, max_seqlen_k=longest, scale=scale, mask="causal")

        def ours(q: mx.array, k: mx.array, v: mx.array) -> Any:
            return varlen(q, k, v, bounds, bounds)

        single = operation("attention", scale=scale, mask="causal")
        fused = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
        sides = both_sides(ours, partial(self.one_by_one, fused), inputs)
        sides.append(Side("ours, one by one", MlxEngine(), partial(self.one_by_one, single), inputs))
        if torch:
            torch_inputs = torch_input_sets(torch, shapes, [1.0] * 3, self.dtype)
            sides.append(Side("torch varlen", torch, partial(self.torch_varlen, torch.torch, longest), torch_inputs))

        def error(result: Any) -> float:
            """Of some rows of the last sequence, and of one head."""
            start, end = (int(bound) for bound in self.bounds[-2:])
            rows = np.unique(np.linspace(start, end - 1, 24).astype(int))
            q, k, v = inputs[0]
            parts = (host(each)[None, None] for each in (q[mx.array(rows), -1], k[start:end, -1], v[start:end, -1]))
            seen = np.arange(start, end) <= rows[:, None]
            exact = references.attention(*parts, scale=scale, mask=seen)[0, 0]
            return relative_error(first(result)[mx.array(rows), -1], exact)

        return Prepared(sides, error, tolerance(self.dtype))

    def one_by_one(self, call: Callable[..., Any], q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        parts = []
        for start, end in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
            out = call(*(each[start:end].swapaxes(0, 1)[None] for each in (q, k, v)))
            parts.append(out[0].swapaxes(0, 1))
        return mx.concatenate(parts, axis=0)

    def torch_varlen(self, torch: Any, longest: int, q: Any, k: Any, v: Any) -> Any:
        """torch's own function for this, in either of its spellings of the causal mask."""
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        causal = {"is_causal": True} if "is_causal" in inspect.signature(function).parameters else {"window_size": (-1, 0)}
        bounds = torch.tensor(self.bounds, device="cuda")
        return function(q, k, v, bounds, bounds, longest, longest, **causal)


def cases(*, quick: bool) -> list[VarlenCase]:
    if quick:
        return [VarlenCase(60, 3, heads=4, kv_heads=2)]
    return [VarlenCase(16384, 16), VarlenCase(16384, 32, heads=32, kv_heads=8)]
