"""``silu(gate) * up`` against the same formula, compiled by MLX, and eager in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx_cuda
import numpy as np
from mlx.nn.layers.activations import silu

from tests.gpu import reference
from tests.gpu.support import host, relative_error

from ..timing import Side, TorchEngine
from .base import DTYPES, Case, Prepared, Unit, both_sides, input_sets, tolerance, torch_input_sets


@mx.compile
def upstream(gate: mx.array, up: mx.array) -> mx.array:
    result: mx.array = silu(gate) * up
    return result


@dataclass(frozen=True)
class SwigluCase(Case):
    unit: ClassVar[Unit] = "TB/s"
    primitive: ClassVar[str] = "SwiGLU"
    rows: int
    columns: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}"

    @property
    def work(self) -> float:
        return 3.0 * DTYPES[self.dtype].size * self.rows * self.columns

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        shapes, scales = [(self.rows, self.columns)] * 2, [1.0, 1.0]
        inputs = input_sets(shapes, scales, self.dtype)
        sides = both_sides(mlx_cuda.swiglu, upstream, inputs)
        if torch:
            functional = torch.torch.nn.functional
            torch_inputs = torch_input_sets(torch, shapes, scales, self.dtype)
            sides.append(Side("torch", torch, lambda gate, up: functional.silu(gate) * up, torch_inputs))

        def error(result: mx.array) -> float:
            rows = mx.array(np.random.default_rng(0).choice(self.rows, min(self.rows, 64), replace=False))
            gate, up = inputs[0]
            return relative_error(result[rows], reference.swiglu(host(gate[rows]), host(up[rows])))

        return Prepared(sides, error, tolerance(self.dtype))


def cases(*, quick: bool) -> list[SwigluCase]:
    if quick:
        return [SwigluCase(16, 130)]
    return [SwigluCase(rows, 14336) for rows in (8192, 64, 1)]
