"""MoE matmuls: ``gather_qmm``, ``gather_mm`` and ``grouped_matmul``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.gpu.support import host, relative_error

from ..timing import Side, TorchEngine
from .base import DTYPES, Case, Prepared, Unit, both_sides, explanation, operation, rotation, tolerance
from .quantized import Quantization

Sets = list[tuple[mx.array, ...]]


@dataclass(frozen=True)
class ExpertsCase(Case):
    """``rows`` rows sorted by expert, or tokens that choose ``chosen`` experts each."""

    operation: Literal["gather_qmm", "gather_mm", "grouped_matmul"]
    rows: int
    experts: int = 32
    chosen: int | None = None  # of each token, with the rows in the tokens' order
    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    n: int = 2048
    k: int = 2048
    dtype: str = "bfloat16"

    @property
    def stored(self) -> Quantization | None:
        return Quantization(self.mode, self.bits, self.group_size) if self.operation == "gather_qmm" else None

    @property
    def name(self) -> str:
        rows = f"{self.rows} sorted rows" if self.chosen is None else f"{self.rows} tokens of {self.chosen} experts"
        stored = f" {self.stored.text}" if self.stored else ""
        return f"{self.operation}{stored}, {rows}, {self.experts} experts of {self.n} x {self.k}"

    @property
    def unit(self) -> Unit:
        return "TFLOP/s" if self.chosen is None else "TB/s"

    @property
    def work(self) -> float:
        return self.size if self.unit == "TB/s" else 2.0 * self.rows * self.n * self.k

    @property
    def size(self) -> float:
        """Bytes of everything that is read and written; of the experts, those that are chosen."""
        weights = len(np.unique(self.indices(0))) * self.n * self.k
        size = DTYPES[self.dtype].size
        outputs = self.rows * (self.chosen or 1)
        return (self.stored.bytes_of(weights) if self.stored else weights * size) + size * (self.rows * self.k + outputs * self.n)

    def indices(self, index: int) -> NDArray[np.uint32]:
        """The expert of each row, or [tokens, chosen]; each set names other experts in the same pattern."""
        rng = np.random.default_rng(0)
        if self.chosen is None:
            return np.sort(rng.integers(self.experts, size=self.rows)).astype(np.uint32)
        pattern = np.stack([rng.permutation(self.experts)[: self.chosen] for _ in range(self.rows)])
        names = np.random.default_rng(index).permutation(self.experts)
        return names[pattern].astype(np.uint32)

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        kind = DTYPES[self.dtype]
        count = rotation(self.size)
        stored = self.stored
        shape = (self.experts, self.n, self.k)
        weights = [mx.random.normal(shape, dtype=kind, scale=self.k**-0.5) for _ in range(1 if self.chosen else min(count, 2))]
        parts = [stored.quantize(w) if stored else (w,) for w in weights]
        sets: Sets = []
        for index in range(count):
            x = mx.random.normal((self.rows, *([1] if self.chosen is None else [1, 1]), self.k), dtype=kind)
            sets.append((x, mx.array(self.indices(index)), *parts[index % len(parts)]))
        mx.eval(sets, weights)
        ours = operation(self.operation)
        sides = both_sides(self.ours(ours), self.call(mx.gather_qmm if stored else mx.gather_mm), sets, self.ours(explanation(ours)))
        if torch and self.chosen is None:
            sides.append(self.torch_grouped(torch))

        def error(result: mx.array) -> float:
            rng = np.random.default_rng(1)
            x, chosen, *own = sets[0]
            flat = result.reshape(-1, self.n)
            picked = rng.choice(flat.shape[0], min(flat.shape[0], 32), replace=False)
            columns = mx.array(rng.choice(self.n, min(self.n, 256), replace=False))
            experts = mx.array(np.array(chosen).reshape(-1)[picked])
            taken = tuple(part[experts][:, columns] for part in own)
            w = stored.dequantize(taken, mx.float32) if stored else taken[0]
            inputs = x.reshape(-1, self.k)[mx.array(picked // (self.chosen or 1))]
            return relative_error(flat[mx.array(picked)][:, columns], np.einsum("rk,rnk->rn", host(inputs), host(w)))

        return Prepared(sides, error, (2 if stored else 1) * tolerance(self.dtype))  # quantised weights are rounded as well

    def ours(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.operation != "grouped_matmul":
            return self.call(function)
        ends = np.searchsorted(self.indices(0), np.arange(self.experts + 1)).astype(np.int32)
        offsets = mx.array(ends)
        return lambda x, _, w: function(x.reshape(-1, self.k), w, offsets)

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"sorted_indices": self.chosen is None}
        if self.stored:
            quantized = self.stored.options
            return lambda x, chosen, *parts: function(x, *parts, rhs_indices=chosen, transpose=True, **options, **quantized)
        return lambda x, chosen, w: function(x, w.swapaxes(-1, -2), rhs_indices=chosen, **options)

    def torch_grouped(self, engine: TorchEngine) -> Side:
        torch = engine.torch
        kind = getattr(torch, self.dtype)
        ends = np.searchsorted(self.indices(0), np.arange(1, self.experts + 1)).astype(np.int32)
        offsets = torch.tensor(ends, device="cuda")
        inputs = [
            (
                torch.randn((self.rows, self.k), dtype=kind, device="cuda"),
                torch.randn((self.experts, self.n, self.k), dtype=kind, device="cuda") * self.k**-0.5,
            )
            for _ in range(2)
        ]
        return Side("torch grouped bf16", engine, lambda x, w: torch._grouped_mm(x, w.transpose(-1, -2), offs=offsets), inputs)


def cases(*, quick: bool) -> list[ExpertsCase]:
    if quick:
        tiny = {"experts": 3, "n": 64, "k": 64}
        return [
            ExpertsCase("gather_qmm", 20, **tiny),  # type: ignore[arg-type]
            ExpertsCase("gather_mm", 2, chosen=2, **tiny),  # type: ignore[arg-type]
            ExpertsCase("grouped_matmul", 20, **tiny),  # type: ignore[arg-type]
        ]
    return [
        *(ExpertsCase("gather_qmm", rows) for rows in (32, 512, 2048, 8192)),
        ExpertsCase("gather_qmm", 8192, bits=8),
        ExpertsCase("gather_qmm", 8192, mode="mxfp4", group_size=32),
        *(ExpertsCase("gather_mm", rows) for rows in (32, 512, 2048, 8192)),
        ExpertsCase("grouped_matmul", 8192),
        *(ExpertsCase("gather_qmm", tokens, experts=128, chosen=8) for tokens in (1, 2, 4, 8)),
        *(ExpertsCase("gather_qmm", tokens, experts=128, chosen=8, n=768) for tokens in (1, 8)),
        ExpertsCase("gather_qmm", 4, experts=128, chosen=8, bits=8),
        *(ExpertsCase("gather_mm", tokens, experts=128, chosen=8, n=768) for tokens in (1, 8)),
    ]
