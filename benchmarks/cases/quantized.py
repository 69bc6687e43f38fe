"""``quantized_matmul`` in every mode beside MLX's own, dequantising before a matmul, and the same matmul with weights of 16 bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.gpu.support import host, relative_error

from ..timing import MlxEngine, Side, TorchEngine
from .base import DTYPES, Case, Prepared, Unit, both_sides, explanation, input_sets, operation, rotation, tolerance

ROWS = (1, 4, 16, 64, 512, 2048, 8192)  # of every mode
TILES = (16, 32, 64)  # rows of MLX's kernels, which it compiles for each mode; more rows take several of the last
FEW_ROWS = 64  # up to here it is the weights' way through memory that counts
MODES = (
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
    ("mxfp8", 8, 32),
)


@dataclass(frozen=True)
class Quantization:
    """How weights are stored, as ``mx.quantize`` calls it."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64

    @property
    def text(self) -> str:
        return f"affine {self.bits} bit" if self.mode == "affine" else self.mode

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self)

    def bytes_of(self, count: int) -> float:
        """Of ``count`` weights, with their scales and biases."""
        per_group = 4 if self.mode == "affine" else 1
        return count * self.bits / 8 + count / self.group_size * per_group

    def quantize(self, w: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(w, **self.options))

    def dequantize(self, parts: tuple[mx.array, ...], dtype: mx.Dtype) -> mx.array:
        w, scales, *biases = parts
        return mx.dequantize(w, scales, biases[0] if biases else None, dtype=dtype, **self.options)


def tile(rows: int) -> int | None:
    """Which of MLX's kernels so many rows take; fewer than 8 have one that it does not compile anew."""
    return None if rows < 8 else next((size for size in TILES if rows <= size), TILES[-1])


@dataclass(frozen=True)
class QuantizedCase(Case):
    rows: int
    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    n: int = 14336
    k: int = 4096
    dtype: str = "bfloat16"

    @property
    def stored(self) -> Quantization:
        return Quantization(self.mode, self.bits, self.group_size)

    @property
    def name(self) -> str:
        return f"{self.stored.text}, {self.rows} x {self.n} x {self.k}"

    @property
    def unit(self) -> Unit:
        return "TB/s" if self.rows <= FEW_ROWS else "TFLOP/s"

    @property
    def size(self) -> float:
        """Bytes of everything that is read and written."""
        return self.stored.bytes_of(self.n * self.k) + DTYPES[self.dtype].size * self.rows * (self.n + self.k)

    @property
    def work(self) -> float:
        return self.size if self.unit == "TB/s" else self.operations

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.n * self.k

    @property
    def kernels(self) -> tuple[Any, ...] | None:
        rows = tile(self.rows)
        return (self.stored, rows, self.dtype) if rows else None

    def parameters(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.size, "operations": self.operations}

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002  (its bfloat16 matmuls are as fast as MLX's: both are cuBLAS's)
        stored, shapes, scales = self.stored, [(self.rows, self.k), (self.n, self.k)], [1.0, self.k**-0.5]
        plain, kind = input_sets(shapes, scales, self.dtype), DTYPES[self.dtype]
        packed = []
        for index in range(rotation(self.size)):
            x, w = plain[index % len(plain)]
            packed.append((x, *stored.quantize(w + index // len(plain))))  # other bits in each
        mx.eval(packed)
        ours = operation("quantized_matmul", **stored.options)
        sides = both_sides(ours, lambda x, *parts: mx.quantized_matmul(x, *parts, **stored.options), packed, explanation(ours))
        sides.append(Side("bf16", MlxEngine(), lambda x, w: x @ w.T, plain))
        sides.append(Side("dequantised", MlxEngine(), lambda x, *parts: x @ stored.dequantize(parts, kind).T, packed))

        def error(result: mx.array) -> float:
            rng = np.random.default_rng(0)
            rows, columns = (mx.array(rng.choice(size, min(size, most), replace=False)) for size, most in ((self.rows, 48), (self.n, 512)))
            x, *parts = packed[0]
            w = stored.dequantize(tuple(part[columns] for part in parts), mx.float32)
            return relative_error(result[rows][:, columns], host(x[rows]) @ host(w).T)

        return Prepared(sides, error, 2 * tolerance(self.dtype), unchecked={"bf16"})  # weights are rounded as well


def cases(*, quick: bool) -> list[QuantizedCase]:
    if quick:
        return [QuantizedCase(3, n=96, k=128), QuantizedCase(80, "mxfp4", 4, 32, n=96, k=128)]
    return [
        *(QuantizedCase(rows, *mode) for mode in MODES for rows in ROWS),
        *(QuantizedCase(rows, *mode) for mode in MODES if mode[1] in (4, 8) for rows in (2, 8)),
        *(QuantizedCase(rows, "affine", bits, 64) for bits in (4, 8) for rows in (128, 256)),
    ]
