"""What the cases share: their interface, random inputs, and the check that comes before the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..timing import Side, TorchEngine

Unit = Literal["TFLOP/s", "TB/s"]
DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}

ROTATED_BYTES = 256 << 20  # several times the largest L2 cache, so that inputs come from memory
MOST_SETS = 64


class WrongResultError(Exception):
    """A result is too far from the reference to be worth timing."""


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs in place. ``errors`` gives each MLX side's relative error against float64, on the inputs to be timed."""

    sides: Sequence[Side]
    errors: Callable[[], dict[str, float]]
    tolerance: float


class Case(Protocol):
    """One row of the results. ``work`` is per call, in floating point operations or bytes as the unit says; ``primitive``
    is what has to be in the graph, so that no fallback is measured by mistake.
    """

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def work(self) -> float: ...
    @property
    def primitive(self) -> str: ...
    def parameters(self) -> dict[str, Any]: ...
    def prepare(self, torch: TorchEngine | None) -> Prepared: ...


def input_sets(shapes: Sequence[tuple[int, ...]], scales: Sequence[float], dtype: str) -> list[tuple[mx.array, ...]]:
    """Normally distributed inputs, in as many sets as it takes to keep them out of the caches."""
    kind = DTYPES[dtype]
    sets = [
        tuple(mx.random.normal(shape, dtype=kind, scale=scale) for shape, scale in zip(shapes, scales, strict=True))
        for _ in range(_rotation(shapes, kind.size))
    ]
    mx.eval(sets)
    return sets


def torch_input_sets(engine: TorchEngine, shapes: Sequence[tuple[int, ...]], scales: Sequence[float], dtype: str) -> list[tuple[Any, ...]]:
    """The same distribution in torch's own arrays."""
    kind = getattr(engine.torch, dtype)
    return [
        tuple(engine.torch.randn(shape, dtype=kind, device="cuda") * scale for shape, scale in zip(shapes, scales, strict=True))
        for _ in range(_rotation(shapes, kind.itemsize))
    ]


def _rotation(shapes: Sequence[tuple[int, ...]], itemsize: int) -> int:
    size = itemsize * sum(math.prod(shape) for shape in shapes)
    return min(max(1, -(-ROTATED_BYTES // size)), MOST_SETS)


def tolerance(dtype: str) -> float:
    """Two roundings of the result's dtype; TF32's for a float32 product."""
    return {"bfloat16": 8e-3, "float32": 2e-3}[dtype]
