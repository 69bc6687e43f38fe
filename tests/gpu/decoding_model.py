"""A small transformer and caches that follow the protocol of mlx-lm's, under the names by which those are known."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import mlx.core as mx

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see


class KVCache:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.offset + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            more = [mx.zeros((*a.shape[:2], (keys.shape[2] + 31) // 32 * 32, a.shape[3]), a.dtype) for a in (keys, values)]
            if self.keys is not None:
                more = [mx.concatenate([a[..., : self.offset, :], b], axis=2) for a, b in zip((self.keys, self.values), more, strict=True)]
            self.keys, self.values = more
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def make_mask(self, count: int, window_size: int | None = None) -> Any:
        if window_size is None:
            return None if count == 1 else "causal"
        row, place = mx.arange(self.offset + count), mx.arange(self.offset, self.offset + count)[:, None]
        return (row <= place) & (place < row + window_size)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        self.offset -= count
        return count


class RotatingKVCache:
    """With prompts shorter than ``max_size``, which are not cut."""

    def __init__(self, max_size: int, keep: int = 0) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = self._idx = 0
        self.max_size, self.keep = max_size, keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is None:
            self.keys, self.values = (mx.zeros((*a.shape[:2], self.max_size, a.shape[3]), a.dtype) for a in (keys, values))
        if self._idx == self.max_size:
            self._idx = self.keep
        count = keys.shape[2]
        self.keys[..., self._idx : self._idx + count, :] = keys
        self.values[..., self._idx : self._idx + count, :] = values
        self.offset += count
        self._idx += count
        there = min(self.offset, self.max_size)
        return self.keys[..., :there, :], self.values[..., :there, :]

    def make_mask(self, count: int, window_size: int | None = None) -> Any:  # noqa: ARG002
        return None if count == 1 else "causal"

    def is_trimmable(self) -> bool:
        return self.offset < self.max_size

    def trim(self, count: int) -> int:
        self.offset -= count
        self._idx -= count
        return count


for _cache in (KVCache, RotatingKVCache):
    _cache.__module__ = "mlx_lm.models.cache"


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, heads: int, kv_heads: int, dim: int, hidden: int, *, head_norms: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q, self.k, self.v = (nn.Linear(size, count * dim, bias=False) for count in (heads, kv_heads, kv_heads))
        self.o = nn.Linear(heads * dim, size, bias=False)
        self.gate, self.up = nn.Linear(size, hidden, bias=False), nn.Linear(size, hidden, bias=False)
        self.down = nn.Linear(hidden, size, bias=False)
        self.norms = [nn.RMSNorm(size), nn.RMSNorm(size)]
        self.head_norms = [nn.RMSNorm(dim), nn.RMSNorm(dim)] if head_norms else []
        self.rope = nn.RoPE(dim, traditional=not head_norms, base=1e4)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        h = self.norms[0](x)
        q, k, v = (
            a.reshape(batch, length, count, self.dim)
            for a, count in ((self.q(h), self.heads), (self.k(h), self.kv_heads), (self.v(h), self.kv_heads))
        )
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        a = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.dim**-0.5, mask=mask)
        x = x + self.o(a.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        h = self.norms[1](x)
        return x + self.down(swiglu(self.gate(h), self.up(h)))  # type: ignore[no-any-return]


class Model(nn.Module):  # type: ignore[misc]
    def __init__(
        self, *, size: int = 256, heads: int = 4, kv_heads: int = 2, dim: int = 64, hidden: int = 384, words: int = 500, layers: int = 2,
        head_norms: bool = True, window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.layers = [Block(size, heads, kv_heads, dim, hidden, head_norms=head_norms) for _ in range(layers)]
        self.norm = nn.RMSNorm(size)
        self.head = nn.Linear(size, words, bias=False)
        self.window = window
        self.before: Any = lambda offset: None  # noqa: ARG005  (what a model may do with the place of a token)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.before(cache[0].offset)
        x = self.embed(inputs)
        mask = cache[0].make_mask(x.shape[1], window_size=self.window)
        for layer, each in zip(self.layers, cache, strict=True):
            x = layer(x, mask, each)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


Model.__module__ = "mlx_lm.models.small"
