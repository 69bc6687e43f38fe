"""Decoding from pages, against the same cache in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ..timing import MlxEngine, Side, TorchEngine
from .base import DTYPES, DecodingHeads, Prepared, Unit, both_sides, input_sets, operation, tolerance


@dataclass(frozen=True)
class PagedCase(DecodingHeads):
    """The pages lie in memory in a random order. MLX's side gathers them first; "ours, contiguous" has them in one piece already."""

    unit: ClassVar[Unit] = "TB/s"
    batch: int
    length: int
    page_size: int

    @property
    def name(self) -> str:
        return f"pages of {self.page_size}, B={self.batch}, 1 of {self.length}, D={self.head_dim}, {self.heads}/{self.kv_heads} heads"

    @property
    def work(self) -> float:
        return 2.0 * self.batch * self.length * self.kv_heads * self.head_dim * DTYPES[self.dtype].size

    def gathered(self, pages: mx.array, table: mx.array) -> mx.array:
        """The pages in one piece, ``[B, Hkv, S, D]``."""
        return pages[table].swapaxes(1, 2).reshape(self.batch, self.kv_heads, -1, self.head_dim)

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002
        count = -(-self.length // self.page_size)
        pages = (self.batch * count, self.kv_heads, self.page_size, self.head_dim)
        inputs = input_sets([(self.batch, self.heads, 1, self.head_dim), pages, pages], [1.0] * 3, self.dtype)
        order = np.random.default_rng(0).permutation(self.batch * count).astype(np.int32)
        table, lengths = mx.array(order.reshape(self.batch, count)), mx.full((self.batch,), self.length, mx.int32)
        whole = [(q, *(mx.contiguous(self.gathered(each, table)) for each in (k, v))) for q, k, v in inputs]
        mx.eval(table, lengths, whole)
        scale = self.scale
        paged = operation("paged_attention", scale=scale)

        def ours(q: mx.array, k_pages: mx.array, v_pages: mx.array) -> Any:
            return paged(q, k_pages, v_pages, table, lengths)

        def upstream(q: mx.array, k_pages: mx.array, v_pages: mx.array) -> mx.array:
            k, v = (self.gathered(each, table)[:, :, : self.length] for each in (k_pages, v_pages))
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)

        sides = both_sides(ours, upstream, inputs)
        sides.append(Side("ours, contiguous", MlxEngine(), operation("attention", scale=scale), whole))

        def error(result: Any) -> float:
            q, k, v = whole[0]
            return self.last_error(result, q, k[:, :, : self.length], v[:, :, : self.length])

        return Prepared(sides, error, tolerance(self.dtype))


TINY = partial(PagedCase, 2, 64, heads=4, kv_heads=2)


def cases(*, quick: bool) -> list[PagedCase]:
    if quick:
        return [TINY(16)]
    return [PagedCase(batch, length, size) for batch, length in ((8, 8192), (64, 8192)) for size in (16, 64)]
