"""Attention of many queries: masks, windows, soft caps, sinks and log-sum-exps, against MLX's own and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import mlx.core as mx
import numpy as np

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Side, TorchEngine
from .base import (
    DTYPES,
    AttentionHeads,
    Prepared,
    Unit,
    both_sides,
    explanation,
    first,
    input_sets,
    operation,
    tolerance,
    torch_flex,
    torch_input_sets,
    torch_sdpa,
)

Mask = Literal["causal", "bool causal", "documents", "random", "additive"] | None
CUDNN = {"torch cuDNN": "CUDNN_ATTENTION"}
FLASH = {"torch flash": "FLASH_ATTENTION"}
EFFICIENT = {"torch efficient": "EFFICIENT_ATTENTION"}
DOCUMENTS = 8


@dataclass(frozen=True)
class AttentionCase(AttentionHeads):
    """``mask``: None and "causal" as the functions take them; the others are arrays ``[L, L]``: the causal mask, several documents one
    after another, each causal in itself, half of the places at random, and normally distributed numbers that are added.
    """

    unit: ClassVar[Unit] = "TFLOP/s"
    head_dim: int
    mask: Mask
    length: int
    batch: int = 2
    window: int | None = None  # keys that a query sees, its own among them; MLX and torch are given a bool mask
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    v_head_dim: int | None = None
    flex: bool = False  # FlexAttention takes seconds to compile

    @property
    def name(self) -> str:
        size = f"D={self.head_dim}/{self.v_head_dim}" if self.v_head_dim else f"D={self.head_dim}"
        notes = {
            f"B={self.batch}": self.batch != 2,
            f"{self.heads}/{self.kv_heads} heads": self.heads != self.kv_heads,
            f"{self.heads} heads": self.heads == self.kv_heads != 16,
            f"window {self.window}": self.window,
            f"softcap {self.softcap}": self.softcap,
            "sinks": self.sinks,
            "lse": self.lse,
            self.dtype: self.dtype != "bfloat16",
        }
        return ", ".join([f"{size} {self.mask or 'full'}", f"L={self.length}", *(note for note, given in notes.items() if given)])

    @property
    def work(self) -> float:
        """2 B H (D + Dv) for each query and key that it sees; what is hidden at random counts, because it has to be looked at."""
        seen = float(self.length**2)
        if self.window:
            seen = self.window * (self.length - (self.window - 1) / 2)
        elif self.mask == "documents":
            seen = float((np.diff(self.bounds) ** 2).sum()) / 2
        elif self.mask in ("causal", "bool causal"):
            seen /= 2
        return 2.0 * self.batch * self.heads * seen * (self.head_dim + (self.v_head_dim or self.head_dim))

    @cached_property
    def bounds(self) -> np.ndarray[Any, Any]:
        """Where the documents begin, and the end of the last one."""
        inner = np.random.default_rng(0).choice(np.arange(1, self.length), min(DOCUMENTS, self.length) - 1, replace=False)
        return np.array([0, *sorted(inner.tolist()), self.length])

    def seen(self, places: Any, documents: Any) -> Any:
        """The keys that the queries see, as a bool array of whichever library the arguments are of."""
        result = places[None, :] <= places[:, None]
        if self.window:
            result = result & (places[None, :] > places[:, None] - self.window)
        if self.mask == "documents":
            result = result & (documents[None, :] == documents[:, None])
        return result

    def array_mask(self) -> mx.array | None:
        """What MLX's function is given in place of our options; its own kinds of mask are none."""
        if self.mask == "random":
            return mx.random.bernoulli(0.5, (self.length, self.length))
        if self.mask == "additive":
            return mx.random.normal((self.length, self.length), dtype=DTYPES[self.dtype])
        if not self.window and self.mask in (None, "causal"):
            return None
        return self.seen(mx.arange(self.length), mx.array(self.documents))  # type: ignore[no-any-return]

    @property
    def documents(self) -> np.ndarray[Any, Any]:
        """The document of each place."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def torch_mask(self, torch: Any) -> Any:
        size = (self.length, self.length)
        if self.mask == "random":
            return torch.rand(size, device="cuda") < 0.5
        if self.mask == "additive":
            return torch.randn(size, device="cuda", dtype=getattr(torch, self.dtype))
        if not self.window and self.mask in (None, "causal"):
            return None
        return self.seen(torch.arange(self.length, device="cuda"), torch.tensor(self.documents, device="cuda"))

    def prepare(self, torch: TorchEngine | None) -> Prepared:
        query = (self.batch, self.heads, self.length, self.head_dim)
        key = (self.batch, self.kv_heads, self.length, self.head_dim)
        shapes, scales = [query, key, (*key[:3], self.v_head_dim or self.head_dim)], [1.0, 1.0, 1.0]
        inputs = input_sets(shapes, scales, self.dtype)
        scale = self.head_dim**-0.5
        mask = self.array_mask()
        sinks = mx.random.normal((self.heads,), dtype=DTYPES[self.dtype]) if self.sinks else None
        mx.eval([array for array in (mask, sinks) if array is not None])
        own = {"scale": scale, "mask": self.mask if self.mask in (None, "causal") else mask, "window_size": self.window and self.window - 1}
        options = {**own, "softcap": self.softcap, "sinks": sinks, "return_lse": self.lse or None}
        ours, theirs = operation("attention", **options), self.upstream(scale, "causal" if mask is None and self.mask else mask, sinks)
        sides = both_sides(ours, theirs, inputs, explanation(ours))
        if self.sinks or self.lse:
            sides.append(Side("ours, without", MlxEngine(), operation("attention", **own), inputs))
        if torch:
            sides += self.torch_sides(torch, torch_input_sets(torch, shapes, scales, self.dtype), scale)

        def error(result: Any) -> float:
            """Of some rows of some heads, the first and the last row among them."""
            rng = np.random.default_rng(0)
            rows = np.unique([0, self.length - 1, *rng.integers(0, self.length, 22)])
            heads = [(int(rng.integers(self.batch)), int(rng.integers(self.heads))) for _ in range(3)]
            seen = self.rows(rows, mask)
            q, k, v = inputs[0]
            exact, values = [], []  # type: tuple[list[references.Array], list[references.Array]]
            for b, h in heads:
                kv = h * self.kv_heads // self.heads
                parts = (host(each)[None, None] for each in (q[b, h][mx.array(rows)], k[b, kv], v[b, kv]))
                sink = host(sinks[h : h + 1]) if sinks is not None else None
                exact.append(references.attention(*parts, scale=scale, mask=seen, softcap=self.softcap or 0.0, sinks=sink)[0, 0])
                values.append(host(first(result)[b, h][mx.array(rows)]))
            return relative_error(np.stack(values), np.stack(exact))

        unchecked = ("ours, without",) if self.sinks else ()
        return Prepared(sides, error, tolerance(self.dtype), unchecked=unchecked)

    def rows(self, rows: np.ndarray[Any, Any], mask: mx.array | None) -> np.ndarray[Any, Any]:
        """The rows of the mask, for the reference."""
        if mask is not None:
            some = mask[mx.array(rows)]
            return np.array(some) if some.dtype == mx.bool_ else host(some)
        return np.arange(self.length) <= np.broadcast_to(rows if self.mask else self.length, rows.shape)[:, None]

    def upstream(self, scale: float, mask: Any, sinks: mx.array | None) -> Callable[..., Any]:
        """MLX's function, and for what it does not say its operations, compiled."""
        fused = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask, sinks=sinks)
        if not self.softcap and not self.lse:
            return fused

        def scores(q: mx.array, k: mx.array) -> mx.array:
            q = (q * scale).reshape(self.batch, self.kv_heads, self.heads // self.kv_heads, self.length, self.head_dim)
            result = q @ k[:, :, None].swapaxes(-1, -2)
            if self.softcap:
                result = mx.tanh(result / self.softcap) * self.softcap
            if self.mask:
                seen = mask if isinstance(mask, mx.array) else self.seen(mx.arange(self.length), None)
                result = mx.where(seen, result, mx.finfo(result.dtype).min)
            return result

        def capped(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            weights = mx.softmax(scores(q, k), axis=-1, precise=True)
            return (weights @ v[:, :, None]).reshape(self.batch, self.heads, self.length, -1)

        def with_lse(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
            return fused(q, k, v), mx.logsumexp(scores(q, k), axis=-1).reshape(self.batch, self.heads, self.length)

        return mx.compile(with_lse if self.lse else capped)

    @property
    def second_backend(self) -> dict[str, str]:
        """Flash, which takes no array masks, at one length only: it is not what there is to beat, and as slow as the time is short."""
        if self.mask in (None, "causal"):
            return FLASH if self.length == 8192 and not self.window else {}
        return EFFICIENT

    def torch_sides(self, torch: TorchEngine, inputs: list[tuple[Any, ...]], scale: float) -> list[Side]:
        sides = []
        if not self.softcap and not self.sinks:
            mask = self.torch_mask(torch.torch)
            causal, grouped = self.mask == "causal" and mask is None, self.heads != self.kv_heads
            backends = EFFICIENT if self.dtype == "float32" else CUDNN | self.second_backend
            sides += torch_sdpa(torch, backends, inputs, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        if self.flex:
            grouped = self.heads != self.kv_heads
            call = torch_flex(torch, self.length, window=self.window, softcap=self.softcap, scale=scale, grouped=grouped)
            sides.append(Side("torch flex", torch, call, inputs))
        return sides


TINY = partial(AttentionCase, batch=1, heads=4, kv_heads=2)


def cases(*, quick: bool) -> list[AttentionCase]:
    if quick:
        return [TINY(64, "causal", 96), TINY(256, None, 96)]
    lengths = (2048, 4096, 8192, 16384, 32768)
    masks: tuple[Mask, ...] = (None, "causal")
    return [
        *(AttentionCase(head_dim, mask, length) for head_dim in (64, 128) for mask in masks for length in lengths),
        # With two of them MLX's scores of the wide heads would fill the memory at 32768.
        *(AttentionCase(head_dim, "causal", length) for head_dim in (80, 96, 192, 256) for length in (4096, 8192)),
        *(AttentionCase(head_dim, "causal", 32768, batch=2 if head_dim <= 128 else 1) for head_dim in (80, 96, 192, 256)),
        *(AttentionCase(256, None, length) for length in (2048, 8192)),
        AttentionCase(256, "causal", 2048),
        AttentionCase(128, "causal", 8192, kv_heads=4),
    ]


def mask_cases(*, quick: bool) -> list[AttentionCase]:
    masks: tuple[Mask, ...] = ("bool causal", "documents", "random", "additive")
    if quick:
        return [TINY(64, mask, 40) for mask in masks]
    return [
        *(AttentionCase(128, mask, 8192) for mask in masks),
        *(AttentionCase(head_dim, mask, 8192) for head_dim in (64, 256) for mask in masks[1:3]),
    ]


def window_cases(*, quick: bool) -> list[AttentionCase]:
    if quick:
        return [TINY(64, "causal", 96, window=20)]
    return [
        AttentionCase(128, "causal", 8192, window=1024, flex=True),
        AttentionCase(128, "causal", 32768, window=1024, batch=1),
        AttentionCase(256, "causal", 8192, window=1024),
        AttentionCase(256, "causal", 32768, window=1024, batch=1),
    ]


def softcap_cases(*, quick: bool) -> list[AttentionCase]:
    if quick:
        return [TINY(64, "causal", 96, softcap=50.0)]
    return [
        AttentionCase(128, "causal", 8192, softcap=50.0, flex=True),
        AttentionCase(256, "causal", 4096, batch=1, kv_heads=8, softcap=50.0, flex=True),
    ]


def float32_cases(*, quick: bool) -> list[AttentionCase]:
    if quick:
        return [TINY(64, "causal", 96, dtype="float32")]
    return [AttentionCase(head_dim, "causal", 4096, dtype="float32") for head_dim in (64, 128)]
