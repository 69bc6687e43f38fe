"""Decoding with quantised keys and values, as mlx-lm does it: two of MLX's products and a softmax, with and without ``patch()``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Side
from .base import Prepared, Unit, input_sets, rotation, tolerance
from .quantized import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..timing import TorchEngine


@dataclass(frozen=True)
class QuantizedCacheCase:
    """One query for each sequence."""

    batch: int
    length: int
    bits: int
    group_size: int = 64
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"

    @property
    def stored(self) -> Quantization:
        return Quantization("affine", self.bits, self.group_size)

    @property
    def name(self) -> str:
        size = f"B={self.batch}, 1 of {self.length}, D={self.head_dim}, {self.heads}/{self.kv_heads} heads"
        return f"{size}, cache of {self.bits} bit"

    @property
    def unit(self) -> Unit:
        return "TB/s"

    @property
    def work(self) -> float:
        """Bytes of the keys and values, with their scales and biases."""
        return 2 * self.stored.bytes_of(self.batch * self.kv_heads * self.length * self.head_dim)

    @property
    def primitive(self) -> str | None:
        return None

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def attend(self, product: Callable[..., Any], q: mx.array, *cache: mx.array) -> mx.array:
        """``quantized_scaled_dot_product_attention`` of mlx-lm's ``models/base.py``, without a mask."""
        keys, values = ([part[:, :, None] for part in parts] for parts in (cache[:3], cache[3:]))
        options = {"group_size": self.group_size, "bits": self.bits}
        grouped = (q * self.head_dim**-0.5).reshape(self.batch, self.kv_heads, -1, 1, self.head_dim)
        weights = mx.softmax(product(grouped, *keys, transpose=True, **options), axis=-1, precise=True)
        result: mx.array = product(weights, *values, transpose=False, **options).reshape(q.shape)
        return result

    def explain(self, *arrays: mx.array) -> SimpleNamespace:
        """The engines of both products."""
        choices: list[Any] = []

        def product(*arguments: Any, **options: Any) -> mx.array:
            choices.append(mlx_cuda.explain(mlx_cuda.quantized_matmul, *arguments, **options))
            return mx.quantized_matmul(*arguments, **options)

        self.attend(product, *arrays)
        engine, reason = (", ".join(dict.fromkeys(getattr(each, what) for each in choices)) for what in ("engine", "reason"))
        return SimpleNamespace(engine=engine, reason=reason)

    def prepare(self, torch: TorchEngine | None) -> Prepared:  # noqa: ARG002  (it has no such products)
        query, key = ((self.batch, heads, length, self.head_dim) for heads, length in ((self.heads, 1), (self.kv_heads, self.length)))
        plain = input_sets([query, key, key], [1.0] * 3, self.dtype)
        sets = []
        for index in range(rotation(self.work)):
            q, k, v = plain[index % len(plain)]
            sets.append((q, *self.stored.quantize(k), *self.stored.quantize(v)))
        mx.eval(sets)

        def call(*arrays: mx.array) -> mx.array:
            return self.attend(mx.quantized_matmul, *arrays)

        sides = [
            Side("ours", MlxEngine(), call, sets, mlx_cuda.patch, self.explain),
            Side("upstream", MlxEngine(), call, sets),
        ]

        def error(result: mx.array) -> float:
            """Of the last batch entry, and there of the heads that share the last kv head."""
            group = self.heads // self.kv_heads
            q, *cache = (part[-1:, -count:] for part, count in zip(sets[0], (group, *[1] * 6), strict=True))
            k, v = (host(self.stored.dequantize(parts, mx.float32)) for parts in (tuple(cache[:3]), tuple(cache[3:])))
            return relative_error(result[-1:, -group:], references.attention(host(q), k, v, scale=self.head_dim**-0.5))

        return Prepared(sides, error, 2 * tolerance(self.dtype))  # scores and weights are rounded on the way


TINY = partial(QuantizedCacheCase, 2, 128, head_dim=64, heads=4, kv_heads=2, dtype="float32")


def cases(*, quick: bool) -> list[QuantizedCacheCase]:
    if quick:
        return [TINY(8)]
    return [QuantizedCacheCase(batch, length, bits) for bits in (8, 4) for batch, length in ((1, 32768), (8, 8192))]
