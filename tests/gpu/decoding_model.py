"""A small transformer and caches that follow the protocol of mlx-lm's, under the names by which those are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see


class KVCache:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

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
        if self._idx == self.max_size:
            self._idx = self.keep
        count = keys.shape[2]
        self.keys, self.values = (
            _with_room(own, new, self.offset, self.max_size) for own, new in ((self.keys, keys), (self.values, values))
        )
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


class BatchKVCache:
    """Sequences after left padding, all of which end at row ``_idx``."""

    def __init__(self, left_padding: list[int]) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.left_padding: Any = mx.array(left_padding)
        self.offset: Any = -self.left_padding
        self._idx = 0
        self._right_padding: Any = None

    @classmethod
    def merge(cls, caches: list[KVCache]) -> Any:
        longest = max(each.offset for each in caches)
        batch = cls([longest - each.offset for each in caches])
        batch.keys, batch.values = (
            mx.concatenate([_padded(getattr(each, name)[..., : each.offset, :], longest - each.offset) for each in caches])
            for name in ("keys", "values")
        )
        batch._idx = longest
        batch.offset = batch.offset + longest
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = (
            new if old is None else mx.concatenate([old[..., : self._idx, :], new], axis=2)
            for old, new in ((self.keys, keys), (self.values, values))
        )
        self._idx += keys.shape[2]
        self.offset += keys.shape[2]
        return self.keys, self.values

    def make_mask(self, count: int, window_size: int | None = None) -> Any:
        row, place = mx.arange(self._idx + count), mx.arange(self._idx, self._idx + count)[:, None]
        seen = (row <= place) & (place < row + (window_size or self._idx + count))
        return seen & (self.left_padding[:, None, None, None] <= row)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        self._idx -= count
        self.offset -= count
        return count

    def filter(self, kept: list[int]) -> None:
        self.offset, self.left_padding = self.offset[kept], self.left_padding[kept]
        least = int(self.left_padding.min().item())
        self.keys, self.values = self.keys[kept][..., least:, :], self.values[kept][..., least:, :]
        self.left_padding -= least
        self._idx -= least

    def extend(self, other: BatchKVCache) -> None:
        longest = max(self._idx, other._idx)
        for each in (self, other):
            more = longest - each._idx
            each.keys, each.values = (_padded(rows[..., : each._idx, :], more) for rows in (each.keys, each.values))
            each.left_padding += more
            each._idx = longest
        for name in ("keys", "values", "offset", "left_padding"):
            setattr(self, name, mx.concatenate([getattr(self, name), getattr(other, name)]))

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def extract(self, index: int) -> KVCache:
        one, first = KVCache(), int(self.left_padding[index].item())
        one.keys, one.values = (mx.contiguous(rows[index : index + 1, :, first : self._idx]) for rows in (self.keys, self.values))
        one.offset = one.keys.shape[2]
        return one


class BatchRotatingKVCache:
    """Sequences after left padding, in ``max_size`` rows of which the oldest are written over; one token at a time after ``merge``."""

    def __init__(self, max_size: int) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.left_padding: Any = None
        self.offset: Any = None
        self._idx = self._offset = 0
        self.max_size = max_size
        self._lengths = None
        self.rotated = False

    @classmethod
    def merge(cls, caches: list[RotatingKVCache]) -> Any:
        batch = cls(caches[0].max_size)
        longest = batch._idx = batch._offset = max(each.offset for each in caches)
        batch.offset = mx.array([each.offset for each in caches])
        batch.left_padding = longest - batch.offset
        batch.keys, batch.values = (
            mx.concatenate([_padded(getattr(each, name)[..., : each.offset, :], longest - each.offset) for each in caches])
            for name in ("keys", "values")
        )
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._idx == self.max_size:
            self._idx, self.rotated = 0, True
        self.left_padding -= int(self.rotated)
        self.keys, self.values = (
            _with_room(own, new, self._offset, self.max_size) for own, new in ((self.keys, keys), (self.values, values))
        )
        self.keys[..., self._idx : self._idx + 1, :] = keys
        self.values[..., self._idx : self._idx + 1, :] = values
        self._idx += 1
        self._offset += 1
        self.offset += 1
        there = min(self._offset, self.max_size)
        return self.keys[..., :there, :], self.values[..., :there, :]

    def make_mask(self, count: int, window_size: int | None = None) -> Any:
        assert count == 1
        rows = min(self._offset + 1, self.max_size)
        first = mx.maximum(self.left_padding[:, None, None, None] - (self._offset >= self.max_size), rows - (window_size or rows))
        seen = first <= mx.arange(rows)
        return mx.roll(seen, self._idx % self.max_size + 1, -1) if self._offset >= self.max_size else seen

    def is_trimmable(self) -> bool:
        return False

    def filter(self, kept: list[int]) -> None:
        self.keys, self.values, self.offset, self.left_padding = (a[kept] for a in (self.keys, self.values, self.offset, self.left_padding))


class ArraysCache:
    """Arrays that a step replaces, of one sequence or of several."""

    def __init__(self, size: int) -> None:
        self.cache: list[Any] = [None] * size
        self.left_padding = self.lengths = None

    def __getitem__(self, index: int) -> Any:
        return self.cache[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.cache[index] = value

    @classmethod
    def merge(cls, caches: list[ArraysCache]) -> Any:
        batch = cls(len(caches[0].cache))
        batch.cache = [mx.concatenate(list(each)) for each in zip(*(own.cache for own in caches), strict=True)]
        return batch

    def filter(self, kept: list[int]) -> None:
        self.cache = [array[mx.array(kept)] for array in self.cache]

    def extend(self, other: ArraysCache) -> None:
        self.cache = [mx.concatenate(list(both)) for both in zip(self.cache, other.cache, strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.cache)

    def extract(self, index: int) -> ArraysCache:
        one = ArraysCache(len(self.cache))
        one.cache = [array[index : index + 1] for array in self.cache]
        return one


def _padded(rows: mx.array, before: int, after: int = 0) -> mx.array:
    return mx.pad(rows, [(0, 0), (0, 0), (before, after), (0, 0)])


def _with_room(own: mx.array | None, new: mx.array, rows: int, most: int) -> mx.array:
    """A rotating cache's own rows, and some more for new ones where it has not its full size yet."""
    there = 0 if own is None else own.shape[2]
    if own is not None and (there == most or rows + new.shape[2] <= there):
        return own
    more = mx.zeros((*new.shape[:2], min((new.shape[2] + 31) // 32 * 32, most - there), new.shape[3]), new.dtype)
    return more if own is None else mx.concatenate([own, more], axis=2)


for _cache in (KVCache, RotatingKVCache, BatchKVCache, BatchRotatingKVCache, ArraysCache):
    _cache.__module__ = "mlx_lm.models.cache"


def merged(model: Model, prompts: list[mx.array], make_cache: Callable[[], Any] = KVCache) -> list[Any]:
    """The caches of a batch whose sequences have read these prompts ``[1, length]``."""
    caches = [caches_of(model, make_cache) for _ in prompts]
    for prompt, own in zip(prompts, caches, strict=True):
        model(prompt, cache=own)
    kinds: dict[type, Any] = {KVCache: BatchKVCache, RotatingKVCache: BatchRotatingKVCache, ArraysCache: ArraysCache}
    return [kinds[type(layer[0])].merge(list(layer)) for layer in zip(*caches, strict=True)]


def caches_of(model: Model, make_cache: Callable[[], Any] = KVCache) -> list[Any]:
    """Those of one sequence."""
    return [ArraysCache(1) if isinstance(layer, Memory) else make_cache() for layer in model.layers]


def with_rows(cache: list[Any]) -> Any:
    """The first one that has rows."""
    return next(each for each in cache if not isinstance(each, ArraysCache))


def of_changing_size(model: Model, tokens: mx.array, step: Callable[[mx.array, list[Any]], mx.array]) -> tuple[list[mx.array], list[Any]]:
    """Logits of 32 steps of a batch that sequences leave and join, one to three of them, and its caches. ``tokens`` is ``[3, 64]``."""
    cache = merged(model, [tokens[i : i + 1, :length] for i, length in enumerate((11, 4, 7))])
    at, logits, count = 11, [], 3
    for kept, prompt in ([0, 1, 2], 0), ([1, 2], 0), ([0, 1], 13), ([0], 0), ([0], 5), ([1], 40), ([0, 1], 6), ([2, 0], 9):
        other = merged(model, [tokens[:1, :prompt]]) if prompt else cache
        for each, more in zip(cache, other, strict=True):
            if kept != [*range(count)]:
                each.filter(kept)
            if prompt:
                each.extend(more)
        count = len(kept) + bool(prompt)
        for _ in range(4):
            logits.append(step(tokens[:count, at : at + 1], cache))
            at += 1
    return logits, cache


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


@mx.compile
def clamped(gate: mx.array, up: mx.array) -> mx.array:
    return swiglu(mx.minimum(gate, 7), up)


@partial(mx.compile, shapeless=True)
def residual(x: mx.array, y: mx.array) -> mx.array:
    return x + y


GATES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {  # in the ways of mlx-lm's models
    "swiglu": swiglu,
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu": lambda gate, up: nn.gelu(gate) * up,
    "gelu_approx": lambda gate, up: nn.gelu_approx(gate) * up,
    # No kernel has these.
    "gelu_fast_approx": lambda gate, up: nn.gelu_fast_approx(gate) * up,
    "clamped": clamped,
    "of itself": lambda gate, up: nn.silu(gate) * up + gate,
}


class Experts(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: int, columns: int, count: int = 1) -> None:
        super().__init__()
        self.weight = mx.random.uniform(-1, 1, (count, columns, inner)) / inner**0.5

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=chosen)

    def to_quantized(self, group_size: int, bits: int, mode: str, **_: Any) -> QuantizedExperts:
        return QuantizedExperts(self.weight, group_size, bits, mode)


class QuantizedExperts(nn.Module):  # type: ignore[misc]
    def __init__(self, weight: mx.array, group_size: int, bits: int, mode: str) -> None:
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(weight, group_size, bits, mode)
        self.biases = biases[0] if biases else None

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        form: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.gather_qmm(x, self.weight, self.scales, self.get("biases"), rhs_indices=chosen, **form)


class Mixture(nn.Module):  # type: ignore[misc]
    """``chosen`` of some experts, by the ways of mlx-lm's models: ``routing`` is that of ``qwen3_moe``, ``olmoe`` or ``mixtral``."""

    def __init__(self, size: int, hidden: int, experts: int, chosen: int, routing: str) -> None:
        super().__init__()
        self.router = nn.Linear(size, experts, bias=False)
        self.gate, self.up, self.down = Experts(size, hidden, experts), Experts(size, hidden, experts), Experts(hidden, size, experts)
        self.chosen, self.routing = chosen, routing

    def __call__(self, x: mx.array) -> mx.array:
        scores, k = self.router(x), self.chosen
        if self.routing != "mixtral":
            scores = mx.softmax(scores, axis=-1, precise=True)
        if self.routing == "qwen3_moe":
            best = mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]
        else:
            best = mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])
        scores = mx.take_along_axis(scores, best, axis=-1)
        if self.routing == "qwen3_moe":
            scores /= mx.sum(scores, axis=-1, keepdims=True)
        elif self.routing == "mixtral":
            scores = mx.softmax(scores, axis=-1, precise=True)
        x = mx.expand_dims(x, (-2, -3))
        y = self.down(swiglu(self.gate(x, best), self.up(x, best)), best).squeeze(-2)
        return (y * scores[..., None]).sum(axis=-2)


class Memory(nn.Module):  # type: ignore[misc]
    """A state that decays, in the place of rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.given, self.read = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def __call__(self, x: mx.array, _: Any, cache: Any) -> mx.array:
        state, found = cache[0], []
        for token in mx.split(self.given(x), x.shape[1], axis=1):
            state = token if state is None else 0.8 * state + token
            found.append(state)
        cache[0] = state
        return x + self.read(mx.concatenate(found, axis=1))  # type: ignore[no-any-return]


class Block(nn.Module):  # type: ignore[misc]
    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        dim: int,
        hidden: int,
        *,
        head_norms: bool,
        mixture: tuple[int, int, str] | None,
        sinks: bool,
        gate: str,
        norms_after: bool,
    ) -> None:
        super().__init__()
        self.gated, self.after = gate, [nn.RMSNorm(size), nn.RMSNorm(size)] if norms_after else []
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q, self.k, self.v = (nn.Linear(size, count * dim, bias=False) for count in (heads, kv_heads, kv_heads))
        self.o = nn.Linear(heads * dim, size, bias=False)
        if mixture:
            self.mixture = Mixture(size, hidden, *mixture)
        else:
            self.gate, self.up = nn.Linear(size, hidden, bias=False), nn.Linear(size, hidden, bias=False)
            self.down = nn.Linear(hidden, size, bias=False)
        self.norms = [nn.RMSNorm(size), nn.RMSNorm(size)]
        self.head_norms = [nn.RMSNorm(dim), nn.RMSNorm(dim)] if head_norms else []
        if sinks:
            self.sinks = mx.random.normal((heads,))
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
        a = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.dim**-0.5, mask=mask, sinks=self.get("sinks"))
        x = self.added(x, self.o(a.transpose(0, 2, 1, 3).reshape(batch, length, -1)), 0)
        h = self.norms[1](x)
        return self.added(x, self.mixture(h) if "mixture" in self else self.down(GATES[self.gated](self.gate(h), self.up(h))), 1)

    def added(self, x: mx.array, y: mx.array, index: int) -> mx.array:
        return residual(x, self.after[index](y)) if self.after else x + y


class Model(nn.Module):  # type: ignore[misc]
    def __init__(
        self, *, size: int = 256, heads: int = 4, kv_heads: int = 2, dim: int = 64, hidden: int = 384, words: int = 500, layers: int = 2,
        head_norms: bool = True, window: int | None = None, mixture: tuple[int, int, str] | None = None,
        sinks: bool = False, gate: str = "swiglu", norms_after: bool = False, memory: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.layers = [
            Block(
                size, heads, kv_heads, dim, hidden,
                head_norms=head_norms, mixture=mixture, sinks=sinks, gate=gate, norms_after=norms_after,
            )
            for _ in range(layers)
        ]  # fmt: skip
        if memory:
            self.layers = [part for layer in self.layers for part in (Memory(size), layer)]
        self.norm = nn.RMSNorm(size)
        self.head = nn.Linear(size, words, bias=False)
        self.window = window
        self.before: Any = lambda offset: None  # noqa: ARG005  (what a model may do with the place of a token)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        rows = with_rows(cache)
        self.before(rows.offset)
        x = self.embed(inputs)
        mask = rows.make_mask(x.shape[1], window_size=self.window)
        for layer, each in zip(self.layers, cache, strict=True):
            x = layer(x, mask, each)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


Model.__module__ = "mlx_lm.models.small"
