"""Attention of few queries to a long cache: keys and values are read once, at best at the speed of memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import mlx.core as mx
import numpy as np

from tests.gpu.support import host
from tests.package import references

from ..timing import MlxEngine, Side, TorchEngine
from .attention import CUDNN, FLASH
from .base import (
    DTYPES,
    DecodingHeads,
    Prepared,
    Unit,
    both_sides,
    explanation,
    input_sets,
    operation,
    tolerance,
    torch_input_sets,
    torch_sdpa,
)


@dataclass(frozen=True)
class DecodeCase(DecodingHeads):
    """``ragged``: the batch entries begin at different keys, as in a batch of prompts padded on the left, or end at different ones. The
    first entry then has all keys, or the last one. MLX and torch are given a bool mask, as mlx-lm gives it; ours the same, or the numbers
    alone. ``latent``: the values are the first so many columns of the keys, as in multi-head latent attention.
    """

    unit: ClassVar[Unit] = "TB/s"
    batch: int
    length: int
    queries: int = 1
    ragged: Literal["padded", "lengths"] | None = None
    latent: int | None = None
    sinks: bool = False
    lse: bool = False

    @property
    def name(self) -> str:
        width = f"D={self.head_dim}/{self.latent}" if self.latent else f"D={self.head_dim}"
        size = f"B={self.batch}, {self.queries} of {self.length}, {width}, {self.heads}/{self.kv_heads} heads"
        notes = {"sinks": self.sinks, "lse": self.lse, self.dtype: self.dtype != "bfloat16", str(self.ragged): self.ragged}
        return ", ".join([size, *(note for note, given in notes.items() if given)])

    @property
    def work(self) -> float:
        """Bytes of the keys and values that are there."""
        columns = self.head_dim if self.latent else 2 * self.head_dim
        return float(int((self.ends - self.starts).sum()) * self.kv_heads * columns * DTYPES[self.dtype].size)

    @property
    def starts(self) -> np.ndarray[Any, Any]:
        last = self.length / 2 if self.ragged == "padded" else 0
        return np.linspace(0, last, self.batch).astype(np.int32)

    @property
    def ends(self) -> np.ndarray[Any, Any]:
        least = self.length / 8 if self.ragged == "lengths" else self.length
        return np.linspace(least, self.length, self.batch).astype(np.int32)

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        query = (self.batch, self.heads, self.queries, self.head_dim)
        key = (self.batch, self.kv_heads, self.length, self.head_dim)
        shapes, scales = [query, key, key][: 2 if self.latent else 3], [1.0, 1.0, 1.0]
        inputs, scale = self.sets(input_sets(shapes, scales[: len(shapes)], self.dtype)), self.scale
        starts, ends = mx.array(self.starts), mx.array(self.ends)
        keys = mx.arange(self.length)
        seen = (keys >= starts.reshape(-1, 1, 1, 1)) & (keys < ends.reshape(-1, 1, 1, 1))
        sinks = mx.random.normal((self.heads,), dtype=DTYPES[self.dtype]) if self.sinks else None
        mx.eval(starts, ends, seen, *([] if sinks is None else [sinks]))

        mask: Any = "causal" if self.queries > 1 else None
        rows = {"padded": {"left_padding": starts}, "lengths": {"lengths": ends}, None: {}}[self.ragged]
        options = {"scale": scale, "mask": mask, **rows, "sinks": sinks, "return_lse": self.lse or None}
        upstream: Callable[..., Any] = partial(
            mx.fast.scaled_dot_product_attention, scale=scale, mask=seen if self.ragged else mask, sinks=sinks
        )
        if self.lse:
            upstream = partial(self.with_lse, upstream, scale)
        ours = operation("attention", **options)
        sides = both_sides(ours, upstream, inputs, explanation(ours))
        if self.sinks or self.lse:
            sides.append(Side("ours, without", MlxEngine(), operation("attention", scale=scale, mask=mask), inputs))
        if self.ragged:
            sides.append(Side("ours, mask", MlxEngine(), operation("attention", scale=scale, mask=seen), inputs))
        if torch and not self.sinks:
            torch_mask = torch.torch.tensor(np.array(seen), device="cuda") if self.ragged else None
            corner = importlib.import_module("torch.nn.attention.bias").causal_lower_right
            bias = corner(self.queries, self.length) if self.queries > 1 else torch_mask
            torch_inputs = self.sets(torch_input_sets(torch, shapes, scales[: len(shapes)], self.dtype))
            backends = {"torch efficient": "EFFICIENT_ATTENTION"} if self.dtype == "float32" else CUDNN | ({} if self.ragged else FLASH)
            sides += torch_sdpa(torch, backends, torch_inputs, attn_mask=bias, scale=scale, enable_gqa=True)
            if self.latent:
                call = partial(torch.torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=True)
                sides.append(Side("torch", torch, call, torch_inputs))

        def error(result: Any) -> float:
            window = references.seen(self.queries, self.length, window=(-1, 0), starts=self.starts[-1:].astype(np.int64))
            sink = None if sinks is None else host(sinks[-(self.heads // self.kv_heads) :])
            return self.last_error(result, *inputs[0], mask=window, sinks=sink)

        unchecked = ("ours, without",) if self.sinks else ()
        return Prepared(sides, error, tolerance(self.dtype), unchecked=unchecked)

    def with_lse(self, call: Callable[..., Any], scale: float, q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """MLX's function has none: its scores are made once more."""
        scores = (q * scale).reshape(self.batch, self.kv_heads, -1, self.head_dim) @ k.swapaxes(-1, -2)
        return call(q, k, v), mx.logsumexp(scores, axis=-1).reshape(self.batch, self.heads, self.queries)

    def sets(self, sets: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Queries, keys and values: where the keys hold the values, a part of these."""
        return [(q, k, k[..., : self.latent]) for q, k in sets] if self.latent else sets


TINY = partial(DecodeCase, 2, 70, heads=4, kv_heads=2)


def cases(*, quick: bool) -> list[DecodeCase]:
    if quick:
        return [TINY(), TINY(ragged="padded"), TINY(ragged="lengths")]
    return [
        *(DecodeCase(1, length) for length in (1024, 8192, 32768)),
        *(DecodeCase(batch, length) for batch in (8, 64) for length in (1024, 2048, 4096, 8192, 16384, 32768)),
        DecodeCase(8, 8192, head_dim=64),
        DecodeCase(8, 8192, head_dim=256, heads=16),
        DecodeCase(8, 8192, head_dim=256),
        *(DecodeCase(8, 8192, queries=queries) for queries in (2, 4, 8, 16)),
        *(DecodeCase(batch, length, ragged="padded") for batch, length in ((8, 1024), (8, 8192), (64, 8192))),
        *(DecodeCase(batch, 8192, ragged="lengths") for batch in (8, 64)),
    ]
