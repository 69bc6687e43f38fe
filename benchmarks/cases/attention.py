"""Attention against ``mx.fast.scaled_dot_product_attention`` and torch's cuDNN and flash backends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx_cuda
import numpy as np

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Side
from .base import Prepared, Unit, input_sets, tolerance, torch_input_sets

if TYPE_CHECKING:
    from ..timing import TorchEngine


@dataclass(frozen=True)
class AttentionCase:
    head_dim: int
    mask: Literal["causal"] | None
    length: int
    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    dtype: str = "bfloat16"
    window: int | None = None  # keys that a query sees, its own among them; MLX and torch are given a bool mask

    @property
    def name(self) -> str:
        heads = "" if self.heads == self.kv_heads else f", {self.heads}/{self.kv_heads} heads"
        window = f", window {self.window}" if self.window else ""
        return f"D={self.head_dim} {self.mask or 'full'}, L={self.length}{heads}{window}"

    @property
    def unit(self) -> Unit:
        return "TFLOP/s"

    @property
    def work(self) -> float:
        """4 B H D for each query and key that it sees; of the causal mask half of all."""
        seen = self.length**2 / (2 if self.mask == "causal" else 1)
        if self.window:
            seen = self.window * (self.length - (self.window - 1) / 2)
        return 4.0 * self.batch * self.heads * seen * self.head_dim

    @property
    def primitive(self) -> str:
        return "Attention"

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        query, key = ((self.batch, heads, self.length, self.head_dim) for heads in (self.heads, self.kv_heads))
        shapes, scales = [query, key, key], [1.0, 1.0, 1.0]
        inputs = input_sets(shapes, scales, self.dtype)
        scale = self.head_dim**-0.5
        window = self.window - 1 if self.window else None
        mask: Any = self.mask
        if self.window:
            places = mx.arange(self.length)
            mask = (places <= places[:, None]) & (places > places[:, None] - self.window)
            mx.eval(mask)
        ours = Side("ours", MlxEngine(), partial(mlx_cuda.attention, scale=scale, mask=self.mask, window_size=window), inputs)
        upstream = Side("upstream", MlxEngine(), partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask), inputs)
        sides = [ours, upstream]
        if torch:
            backends = torch.torch.nn.attention
            call = partial(
                torch.torch.nn.functional.scaled_dot_product_attention,
                attn_mask=torch.torch.tensor(np.array(mask), device="cuda") if self.window else None,
                is_causal=self.mask == "causal" and not self.window,
                scale=scale,
                enable_gqa=self.heads != self.kv_heads,
            )
            torch_inputs = torch_input_sets(torch, shapes, scales, self.dtype)
            for name, backend in ("torch cuDNN", "CUDNN_ATTENTION"), ("torch flash", "FLASH_ATTENTION"):
                context = partial(backends.sdpa_kernel, getattr(backends.SDPBackend, backend))
                sides.append(Side(name, torch, call, torch_inputs, context))

        def errors() -> dict[str, float]:
            """Of some rows of some heads, the first and the last row among them."""
            rng = np.random.default_rng(0)
            rows = np.unique([0, self.length - 1, *rng.integers(0, self.length, 22)])
            heads = [(int(rng.integers(self.batch)), int(rng.integers(self.heads))) for _ in range(3)]
            q, k, v = inputs[0]
            columns = np.arange(self.length)
            results = {side.name: side.call(*inputs[0]) for side in (ours, upstream)}
            mx.eval(results)
            exact, values = [], {name: [] for name in results}  # type: tuple[list[references.Array], dict[str, list[references.Array]]]
            for b, h in heads:
                kv = h * self.kv_heads // self.heads
                parts = (host(each)[None, None] for each in (q[b, h][mx.array(rows)], k[b, kv], v[b, kv]))
                last = rows if self.mask == "causal" else self.length
                seen = columns <= np.broadcast_to(last, rows.shape)[:, None]
                if self.window:
                    seen &= columns > rows[:, None] - self.window
                exact.append(references.attention(*parts, scale=scale, mask=seen)[0, 0])
                for name, result in results.items():
                    values[name].append(host(result[b, h][mx.array(rows)]))
            return {name: relative_error(np.stack(parts), np.stack(exact)) for name, parts in values.items()}

        return Prepared(sides, errors, tolerance(self.dtype))


def cases(*, quick: bool) -> list[AttentionCase]:
    if quick:
        return [
            AttentionCase(64, "causal", 96, batch=1, heads=2, kv_heads=2),
            AttentionCase(256, None, 96, batch=1, heads=4, kv_heads=2),
            AttentionCase(64, "causal", 96, batch=1, heads=2, kv_heads=2, window=20),
        ]
    masks: tuple[Literal["causal"] | None, ...] = (None, "causal")
    return [
        *(AttentionCase(head_dim, mask, 8192) for head_dim in (64, 128, 256) for mask in masks),
        *(AttentionCase(head_dim, mask, 2048) for head_dim in (64, 128, 256) for mask in masks),
        AttentionCase(128, "causal", 8192, kv_heads=4),
        *(AttentionCase(head_dim, "causal", 4096) for head_dim in (80, 96, 192)),
        *(AttentionCase(head_dim, "causal", 8192, window=1024) for head_dim in (128, 256)),
    ]
