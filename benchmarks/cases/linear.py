"""``activation(x @ w.T + bias)`` with MLX's addmm and torch's linear, each followed by its own activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx_cuda
import numpy as np
from mlx.nn.layers.activations import gelu_approx

from tests.gpu import reference
from tests.gpu.support import host, relative_error

from ..timing import Side, TorchEngine
from .base import DTYPES, Case, Prepared, Unit, both_sides, input_sets, tolerance, torch_input_sets


@dataclass(frozen=True)
class LinearCase(Case):
    m: int
    n: int
    k: int
    bias: bool = True
    activation: Literal["gelu_approx"] | None = None
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        parts = ["bias" if self.bias else "bare", *([self.activation] if self.activation else [])]
        return f"{self.m}x{self.n}x{self.k} {' + '.join(parts)}" + ("" if self.dtype == "bfloat16" else f", {self.dtype}")

    @property
    def unit(self) -> Unit:
        return "TB/s" if self.m <= 64 else "TFLOP/s"

    @property
    def work(self) -> float:
        if self.unit == "TFLOP/s":
            return 2.0 * self.m * self.n * self.k
        return float(DTYPES[self.dtype].size * (self.m * self.k + self.n * self.k + self.m * self.n + self.bias * self.n))

    @property
    def primitive(self) -> str:
        # One row without an epilogue is left to MLX's own matrix-vector kernel.
        return "Matmul" if self.m == 1 and not self.bias and self.activation is None else "Linear"

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        shapes = [(self.m, self.k), (self.n, self.k), (self.n,)][: 2 + self.bias]
        scales = [1.0, self.k**-0.5, 1.0][: 2 + self.bias]
        inputs = input_sets(shapes, scales, self.dtype)
        sides = both_sides(self.ours, self.upstream(), inputs)
        if torch:
            sides.append(Side("torch", torch, self.torch(torch.torch), torch_input_sets(torch, shapes, scales, self.dtype)))

        def error(result: mx.array) -> float:
            rng = np.random.default_rng(0)
            rows, columns = (mx.array(rng.choice(size, min(size, most), replace=False)) for size, most in ((self.m, 48), (self.n, 512)))
            x, w, *bias = inputs[0]
            exact = reference.linear(host(x[rows]), host(w[columns]), host(bias[0][columns]) if bias else None, self.activation)
            return relative_error(result[rows][:, columns], exact)

        return Prepared(sides, error, tolerance(self.dtype))

    def ours(self, x: mx.array, w: mx.array, *bias: mx.array) -> mx.array:
        if self.activation is not None:
            return mlx_cuda.linear(x, w, *bias, activation=self.activation)
        return mlx_cuda.linear(x, w, bias[0]) if bias else mlx_cuda.linear(x, w)  # as the other side: a default is not passed

    def upstream(self) -> Callable[..., mx.array]:
        def matmul(x: mx.array, w: mx.array, *bias: mx.array) -> mx.array:
            return mx.addmm(bias[0], x, w.T) if bias else x @ w.T

        if self.activation is None:
            return matmul
        return mx.compile(lambda *arrays: gelu_approx(matmul(*arrays)))

    def torch(self, torch: Any) -> Callable[..., Any]:
        functional = torch.nn.functional
        if self.activation is None:
            return functional.linear  # type: ignore[no-any-return]
        return lambda *arrays: functional.gelu(functional.linear(*arrays), approximate="tanh")


def cases(*, quick: bool) -> list[LinearCase]:
    if quick:
        return [LinearCase(64, 96, 128, activation="gelu_approx"), LinearCase(1, 96, 128, bias=False)]
    return [
        LinearCase(8192, 16384, 4096, activation="gelu_approx"),
        LinearCase(8192, 16384, 4096),
        LinearCase(8192, 16384, 4096, bias=False),
        LinearCase(512, 14336, 4096, activation="gelu_approx"),
        LinearCase(64, 14336, 4096, activation="gelu_approx"),
        LinearCase(1, 14336, 4096, activation="gelu_approx"),
        LinearCase(1, 14336, 4096, bias=False),
        LinearCase(4096, 4096, 4096, activation="gelu_approx", dtype="float32"),
    ]
