"""Attention and its gradients with respect to q, k and v, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from tests.gpu.support import host, relative_error

from ..timing import TorchEngine
from .attention import CUDNN
from .base import AttentionHeads, Prepared, Unit, both_sides, explanation, input_sets, operation, torch_input_sets, torch_sdpa

GRADIENT_TOLERANCE = 3e-2  # as in the GPU tests: more roundings to the dtype than in the forward pass
CHECKED_ROWS = 128


@dataclass(frozen=True)
class BackwardCase(AttentionHeads):
    unit: ClassVar[Unit] = "TFLOP/s"
    head_dim: int
    length: int
    batch: int = 2

    @property
    def name(self) -> str:
        batch = "" if self.batch == 2 else f", B={self.batch}"
        return f"D={self.head_dim} causal, L={self.length}{batch}"

    @property
    def work(self) -> float:
        """Two GEMMs forward and five backward, of the half that the causal mask leaves."""
        return 7.0 * self.batch * self.heads * self.length**2 * self.head_dim

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        query, key = ((self.batch, heads, self.length, self.head_dim) for heads in (self.heads, self.kv_heads))
        shapes, scales, scale = [query, key, key, query], [1.0] * 4, self.head_dim**-0.5
        inputs = input_sets(shapes, scales, self.dtype)

        def both(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array) -> Any:
                return mx.vjp(call, [q, k, v], [cotangent])

            return run

        ours = operation("attention", scale=scale, mask="causal")
        upstream = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
        sides = both_sides(both(ours), both(upstream), inputs, lambda *arrays: explanation(ours)(*arrays[:3]))
        if torch:

            def gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
                def run(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
                    with torch.torch.enable_grad():
                        out = forward(q, k, v)
                        return out.detach(), torch.torch.autograd.grad(out, (q, k, v), cotangent)

                return run

            torch_inputs = torch_input_sets(torch, shapes, scales, self.dtype)
            for *operands, _ in torch_inputs:
                for each in operands:
                    each.requires_grad_()
            sides += torch_sdpa(torch, CUDNN, torch_inputs, gradients, is_causal=True, scale=scale)

        def error(result: Any) -> float:
            return self.error(inputs[0], result[1], scale)

        return Prepared(sides, error, GRADIENT_TOLERANCE)

    def error(self, arrays: Sequence[mx.array], gradients: Sequence[mx.array], scale: float) -> float:
        """The largest of the three gradients' relative errors, at the last places of one head: only they see these keys."""
        b, h, most = self.batch - 1, self.heads - 1, min(CHECKED_ROWS, self.length)
        q, k, v, cotangent = (host(each[b, h * each.shape[1] // self.heads]) for each in arrays)
        rows = np.arange(self.length - most, self.length)
        scores = np.where(np.arange(self.length) <= rows[:, None], q[rows] @ k.T * scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        d_weights = cotangent[rows] @ v.T
        d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True)) * scale
        exact = [d_scores @ k, d_scores[:, -most:].T @ q[rows], weights[:, -most:].T @ cotangent[rows]]
        return max(relative_error(actual[b, -1, -most:], expected) for actual, expected in zip(gradients, exact, strict=True))


def cases(*, quick: bool) -> list[BackwardCase]:
    if quick:
        return [BackwardCase(64, 96, batch=1, heads=2, kv_heads=2)]
    return [
        BackwardCase(head_dim, length, batch=2 if length <= 8192 else 1) for head_dim in (128, 256) for length in (4096, 4100, 8192, 16384)
    ]
