"""Decoding with a quantized KV cache: beside mlx-lm's two matmuls and a softmax, and beside the same cache in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx_cuda

from tests.package import references

from ..timing import MlxEngine, Side, TorchEngine
from .base import DecodingHeads, Prepared, Unit, input_sets, rotation, tolerance
from .quantized import Quantization

PLAIN = "ours, 16 bit"


@dataclass(frozen=True)
class QuantizedCacheCase(DecodingHeads):
    """The last ``queries`` tokens of each sequence."""

    unit: ClassVar[Unit] = "TB/s"
    batch: int
    length: int
    bits: int
    mode: str = "affine"
    group_size: int = 64
    queries: int = 1

    @property
    def stored(self) -> Quantization:
        return Quantization(self.mode, self.bits, self.group_size)

    @property
    def name(self) -> str:
        size = f"B={self.batch}, {self.queries} of {self.length}, D={self.head_dim}, {self.heads}/{self.kv_heads} heads"
        kind = f"{self.mode}, {self.bits} bit, groups of {self.group_size}" if self.mode == "affine" else self.mode
        return f"{size}, {kind}"

    @property
    def work(self) -> float:
        """Bytes of the keys and values, with their scales and biases."""
        return 2 * self.stored.bytes_of(self.batch * self.kv_heads * self.length * self.head_dim)

    @property
    def primitive(self) -> str | None:
        return None if self.dtype == "float32" else "QuantizedAttention"

    def upstream(self, q: mx.array, *cache: mx.array) -> mx.array:
        """``quantized_scaled_dot_product_attention`` of mlx-lm's ``models/base.py``, without a mask."""
        keys, values = ([part[:, :, None] for part in parts] for parts in (cache[:3], cache[3:]))
        options: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        grouped = (q * self.scale).reshape(self.batch, self.kv_heads, -1, self.queries, self.head_dim)
        matmul: Any = mx.quantized_matmul  # whose types do not let parts through
        weights = mx.softmax(matmul(grouped, *keys, transpose=True, **options), axis=-1, precise=True)
        result: mx.array = matmul(weights, *values, transpose=False, **options).reshape(q.shape)
        return result

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002  (it has no such matmuls)
        query = (self.batch, self.heads, self.queries, self.head_dim)
        key = (self.batch, self.kv_heads, self.length, self.head_dim)
        plain = input_sets([query, key, key], [1.0] * 3, self.dtype)
        sets = []
        for index in range(rotation(self.work)):
            q, k, v = plain[index % len(plain)]
            sets.append((q, *self.stored.quantize(k), *self.stored.quantize(v)))
        mx.eval(sets)
        parts = (len(sets[0]) - 1) // 2
        attend, explain = mlx_cuda.quantized_attention, partial(mlx_cuda.explain, mlx_cuda.quantized_attention)
        asked: dict[str, Any] = {"mode": self.mode, "group_size": self.group_size, "bits": self.bits}
        asked["mask"] = "causal" if self.queries > 1 else None

        def ours(function: Any) -> Any:
            return lambda q, *cache: function(q, cache[:parts], cache[parts:], **asked)

        sides = [
            Side("ours", MlxEngine(), ours(attend), sets, explain=ours(explain)),
            Side(PLAIN, MlxEngine(), lambda *arrays: mlx_cuda.attention(*arrays, mask=asked["mask"]), plain),
        ]
        if self.mode == "affine" and self.queries == 1 and self.group_size == 64:
            sides.append(Side("upstream", MlxEngine(), self.upstream, sets))

        def error(result: mx.array) -> float:
            q, *cache = sets[0]
            last = [part[-1:, -1:] for part in cache]
            k, v = (self.stored.dequantize(tuple(each), mx.float32) for each in (last[:parts], last[parts:]))
            return self.last_error(result, q, k, v, mask=references.seen(self.queries, self.length, window=(-1, 0), starts=None, ends=None))

        return Prepared(sides, error, 2 * tolerance(self.dtype), unchecked=(PLAIN,))  # upstream rounds scores and weights on the way


TINY = partial(QuantizedCacheCase, 2, 128, head_dim=64, heads=4, kv_heads=2, dtype="float32")


def cases(*, quick: bool) -> list[QuantizedCacheCase]:
    if quick:
        return [TINY(8)]
    sizes = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024))
    floats = ((8, "mxfp8", 32), (4, "mxfp4", 32), (4, "nvfp4", 16))
    return [
        *(QuantizedCacheCase(batch, length, bits) for bits in (8, 4) for batch, length in sizes),
        *(QuantizedCacheCase(8, 8192, bits, group_size=32) for bits in (8, 4)),
        *(QuantizedCacheCase(8, 8192, bits, mode, group) for bits, mode, group in floats),
        *(QuantizedCacheCase(8, 8192, bits, head_dim=64) for bits in (8, 4)),
        *(QuantizedCacheCase(8, 8192, bits, head_dim=256, heads=16) for bits in (8, 4)),
        *(QuantizedCacheCase(8, 8192, bits, queries=queries) for bits in (8, 4) for queries in (4, 16)),
    ]
