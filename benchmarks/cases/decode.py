"""Attention of few queries to a long cache: keys and values are read once, at best at the speed of memory."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
class DecodeCase:
    """``padded``: the batch entries begin at different keys, as in a batch of prompts padded on the left; the first one has them all,
    the last one half of them. MLX and torch are given a bool mask, as mlx-lm gives it; ours the same, or the numbers alone.
    """

    batch: int
    length: int
    head_dim: int = 128
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    padded: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        size = f"B={self.batch}, {self.queries} of {self.length}, D={self.head_dim}, {self.heads}/{self.kv_heads} heads"
        return f"{size}, padded" if self.padded else size

    @property
    def unit(self) -> Unit:
        return "TB/s"

    @property
    def work(self) -> float:
        """Bytes of the keys and values that are there."""
        keys = self.batch * self.length - (sum(self.starts) if self.padded else 0)
        return 2.0 * keys * self.kv_heads * self.head_dim * 2

    @property
    def starts(self) -> list[int]:
        return [int(start) for start in np.linspace(0, self.length / 2, self.batch)]

    @property
    def primitive(self) -> str:
        return "DecodeAttention"

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        query = (self.batch, self.heads, self.queries, self.head_dim)
        key = (self.batch, self.kv_heads, self.length, self.head_dim)
        shapes, scales = [query, key, key], [1.0, 1.0, 1.0]
        inputs = input_sets(shapes, scales, self.dtype)
        scale = self.head_dim**-0.5
        starts = mx.array(self.starts, mx.int32)
        seen = mx.arange(self.length) >= starts.reshape(-1, 1, 1, 1)
        mx.eval(starts, seen)
        mask: Any = seen if self.padded else "causal" if self.queries > 1 else None
        plain = partial(mlx_cuda.attention, scale=scale, mask=mask)
        ours = Side("ours", MlxEngine(), partial(plain, mask=None, left_padding=starts) if self.padded else plain, inputs)
        upstream = Side("upstream", MlxEngine(), partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask), inputs)
        sides = [ours, upstream]
        if self.padded:
            sides.append(Side("ours, mask", MlxEngine(), plain, inputs))
        if torch:
            backends = torch.torch.nn.attention
            torch_mask = torch.torch.tensor(np.array(seen), device="cuda") if self.padded else None
            corner = importlib.import_module("torch.nn.attention.bias").causal_lower_right
            bias = corner(self.queries, self.length) if self.queries > 1 else torch_mask
            call = partial(torch.torch.nn.functional.scaled_dot_product_attention, attn_mask=bias, scale=scale, enable_gqa=True)
            torch_inputs = torch_input_sets(torch, shapes, scales, self.dtype)
            for name, backend in ("torch cuDNN", "CUDNN_ATTENTION"), ("torch flash", "FLASH_ATTENTION"):
                context = partial(backends.sdpa_kernel, getattr(backends.SDPBackend, backend))
                sides.append(Side(name, torch, call, torch_inputs, context))

        def errors() -> dict[str, float]:
            """Of the last batch entry."""
            q, k, v = (each[-1:] for each in inputs[0])
            exact = references.attention(
                host(q),
                host(k),
                host(v),
                scale=scale,
                mask=references.seen(self.queries, self.length, window=(-1, 0), starts=np.array(self.starts[-1:]) if self.padded else None),
            )
            return {side.name: relative_error(side.call(*inputs[0])[-1:], exact) for side in sides if isinstance(side.engine, MlxEngine)}

        return Prepared(sides, errors, tolerance(self.dtype))


def cases(*, quick: bool) -> list[DecodeCase]:
    if quick:
        return [DecodeCase(2, 70, heads=4, kv_heads=2), DecodeCase(2, 70, heads=4, kv_heads=2, padded=True)]
    return [
        *(DecodeCase(batch, length) for batch in (1, 8, 64) for length in (1024, 8192, 32768)),
        *(DecodeCase(1, length) for length in (256, 512, 2048)),
        DecodeCase(8, 8192, head_dim=64),
        DecodeCase(8, 8192, head_dim=256, heads=16),
        *(DecodeCase(8, 8192, queries=queries) for queries in (2, 4, 8, 16)),
        *(DecodeCase(batch, length, padded=True) for batch, length in ((8, 1024), (8, 8192), (64, 8192))),
    ]
