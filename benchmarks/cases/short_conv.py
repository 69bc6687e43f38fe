"""The short convolution before linear attention, with silu and the rows that it keeps, against what mlx-lm's models call for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
from mlx.nn.layers.activations import silu

from tests.gpu import reference
from tests.gpu.support import host, relative_error

from ..timing import TorchEngine
from .base import DTYPES, Case, Prepared, Unit, both_sides, explanation, input_sets, operation, tolerance

CHECKED_CHANNELS = 64


def upstream(x: mx.array, weight: mx.array, state: mx.array) -> list[mx.array]:
    rows = mx.concatenate([state, x], axis=1)
    return [silu(mx.conv1d(rows, weight, groups=x.shape[2])), mx.contiguous(rows[:, x.shape[1] :])]


@dataclass(frozen=True)
class ShortConvCase(Case):
    """That of a layer of Qwen 3 Next."""

    unit: ClassVar[Unit] = "TB/s"
    primitive: ClassVar[str] = "ShortConvolution"
    tokens: int
    batch: int = 1
    channels: int = 8192
    taps: int = 4
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens}, short convolution, {self.channels} channels, {self.taps} taps"

    @property
    def work(self) -> float:
        rows = self.batch * (2 * self.tokens + 2 * (self.taps - 1)) + self.taps
        return float(DTYPES[self.dtype].size * rows * self.channels)

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002  (torch's own takes one more dimension and no state)
        ours = operation("short_conv", activation="silu")
        shapes = [
            (self.batch, self.tokens, self.channels), (self.channels, self.taps, 1), (self.batch, self.taps - 1, self.channels)
        ]  # fmt: skip
        inputs = input_sets(shapes, [1.0, self.taps**-0.5, 1.0], self.dtype)

        def ours_of(x: mx.array, weight: mx.array, state: mx.array) -> list[mx.array]:
            return list(ours(x, weight, state=state))

        def error(result: list[mx.array]) -> float:
            x, weight, state = (host(each) for each in inputs[0])
            some = slice(0, CHECKED_CHANNELS)
            exact = reference.short_conv(x[..., some], weight[some, :, 0], state=state[..., some], activation="silu")
            return max(relative_error(mine[..., some], other) for mine, other in zip(result, exact, strict=True))

        explain = explanation(ours)
        sides = both_sides(ours_of, upstream, inputs, lambda x, weight, state: explain(x, weight, state=state))
        return Prepared(sides, error, tolerance(self.dtype))


def cases(*, quick: bool) -> list[ShortConvCase]:
    if quick:
        return [ShortConvCase(9, channels=64)]
    return [ShortConvCase(tokens) for tokens in (2, 64, 256, 2048, 32768)] + [ShortConvCase(2048, 8)]
