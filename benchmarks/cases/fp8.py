"""FP8 (e4m3) matmuls, next to torch's ``_scaled_mm`` and the same matmul in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import mlx.core as mx
import numpy as np

from tests.gpu.support import host, relative_error

from ..timing import MlxEngine, Side, TorchEngine
from .base import Case, Prepared, Unit, explanation, input_sets, operation, rotation, tolerance


@dataclass(frozen=True)
class Fp8Case(Case):
    unit: ClassVar[Unit] = "TFLOP/s"
    m: int
    n: int
    k: int
    scales: Literal["tensor", "row", "block128"] = "tensor"

    @property
    def name(self) -> str:
        return f"{self.m} x {self.n} x {self.k}, a scale for each {self.scales}"

    @property
    def work(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.scales == "block128":
            return (self.m, self.k // 128), (self.n // 128, self.k // 128)
        return ((), ()) if self.scales == "tensor" else ((self.m, 1), (self.n, 1))

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        plain = input_sets([(self.m, self.k), (self.n, self.k)], [1.0, self.k**-0.5], "bfloat16")
        small = [(mx.to_fp8(a), mx.to_fp8(b * self.k**0.5)) for a, b in plain]
        factors = [mx.random.uniform(0.5, 1.5, shape) for shape in self.scale_shapes()]
        sets = [(a, b, *factors) for a, b in small[: rotation(self.m * self.k + self.n * self.k)]]
        mx.eval(sets)
        ours = operation("fp8_matmul")

        def scaled(call: partial[Any]) -> Callable[..., Any]:
            return lambda a, b, one, other: call(a, b, scale_a=one, scale_b=other)

        sides = [
            Side("ours", MlxEngine(), scaled(ours), sets, explain=scaled(explanation(ours))),
            Side("bf16", MlxEngine(), lambda a, b: a @ b.T, plain),
        ]
        if torch and self.scales != "block128":
            sides.append(self.torch_scaled(torch))

        def error(result: mx.array) -> float:
            rng = np.random.default_rng(0)
            rows, columns = (rng.choice(size, min(size, most), replace=False) for size, most in ((self.m, 48), (self.n, 512)))
            taken = [host(mx.from_fp8(x[mx.array(those)], mx.float32)) for x, those in zip(sets[0][:2], (rows, columns), strict=True)]
            one, other = (host(scale) for scale in factors)
            if self.scales == "block128":
                one, other = np.repeat(one, 128, 1), np.repeat(np.repeat(other, 128, 0), 128, 1)
            wide = [np.broadcast_to(scale, (size, 1 if scale.size <= size else self.k)) for scale, size in ((one, self.m), (other, self.n))]
            expected = (taken[0] * wide[0][rows]) @ (taken[1] * wide[1][columns]).T
            return relative_error(result[mx.array(rows)][:, mx.array(columns)], expected)

        return Prepared(sides, error, tolerance("bfloat16"), unchecked={"bf16"})

    def torch_scaled(self, engine: TorchEngine) -> Side:
        torch = engine.torch
        kind = torch.float8_e4m3fn
        inputs = [
            tuple(torch.randn(shape, device="cuda").to(kind) for shape in ((self.m, self.k), (self.n, self.k)))
            for _ in range(rotation(self.m * self.k + self.n * self.k))
        ]
        if self.scales == "tensor":
            scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
        else:
            scales = torch.rand((self.m, 1), device="cuda") + 0.5, torch.rand((1, self.n), device="cuda") + 0.5
        options = {"out_dtype": torch.bfloat16}  # sums in float32, as ours
        return Side("torch", engine, lambda a, b: torch._scaled_mm(a, b.T, *scales, **options), inputs)


def cases(*, quick: bool) -> list[Fp8Case]:
    if quick:
        return [Fp8Case(64, 128, 128)]
    return [
        *(Fp8Case(8192, 8192, 8192, scales) for scales in ("tensor", "row", "block128")),
        Fp8Case(512, 14336, 4096),
        Fp8Case(512, 14336, 4096, "row"),
    ]
