"""Quantization of a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx

Form: TypeAlias = list[tuple[int, int, mx.Dtype]]  # heads, head dimension and dtype of keys and of values

WIDEST_QUANTIZED = 256  # head_dim of caches that are quantized when appended


class Packing(NamedTuple):
    """The quantization of pages, with mode "affine"."""

    group_size: int
    bits: int

    def takes(self, dim: int, dtype: mx.Dtype) -> bool:
        return dtype in {mx.float16, mx.bfloat16} and dim % 32 == 0 and dim % self.group_size == 0 and dim <= WIDEST_QUANTIZED

    def packed(self, array: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array, self.group_size, self.bits))

    def unpacked(self, parts: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(parts[0], parts[1], parts[2], self.group_size, self.bits)


class Settings:
    """The settings of :func:`mlx_cuda.patch`."""

    packing: Packing | None = None

    def packing_of(self, forms: Iterable[Form]) -> Packing | None:
        """Return how pages of keys and values of these forms are quantized."""
        takes = self.packing is not None and all(self.packing.takes(dim, dtype) for form in forms for _, dim, dtype in form)
        return self.packing if takes else None


settings = Settings()
