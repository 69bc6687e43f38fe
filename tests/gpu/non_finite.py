"""Which numbers of results and gradients are not finite where one of the inputs is not: a call against MLX's operations in float32.

What a query does not see takes no part in its result, whatever it is. So the number stands where all queries see it: MLX's own fused
kernels read or skip what is hidden as their tiles fall. Nor are there queries whose every score is minus infinity. They give zeros, as
those that see no key do, and NaN by a softmax of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Function: TypeAlias = Callable[..., Sequence[mx.array]]
Flags: TypeAlias = NDArray[np.bool_]

NUMBERS = {"NaN": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
CHUNK = 64  # tokens, of linear attention


class Call(NamedTuple):
    """A function of arrays, and the same of MLX's operations one after another."""

    ours: Function
    unfused: Function
    arrays: dict[str, mx.array]
    places: dict[str, tuple[int, ...]]  # where the number stands in the arrays that get one
    token: int = -1  # of linear attention by chunks: that of the number
    by_token: tuple[str, ...] = ()  # arrays whose second axis is tokens; of results y

    def with_number(self, name: str, value: float) -> list[mx.array]:
        arrays = dict(self.arrays)
        changed = mx.array(arrays[name])
        changed[self.places[name]] = value
        mx.eval(changed)
        arrays[name] = changed
        return list(arrays.values())


def finite(arrays: Sequence[mx.array]) -> list[Flags]:
    return [np.isfinite(np.array(each.astype(mx.float32))) for each in arrays]


def results(call: Call, arrays: list[mx.array]) -> tuple[list[Flags], list[Flags]]:
    """Which are finite: by the call, and by MLX's operations."""
    ours = finite(call.ours(*arrays))
    with mx.stream(mx.cpu):
        return ours, finite(call.unfused(*(each.astype(mx.float32) for each in arrays)))


def gradients(call: Call, arrays: list[mx.array]) -> tuple[list[Flags], list[Flags]]:
    """The same of all arrays' gradients, of the first result where there are several."""

    def first(function: Function) -> Function:
        return lambda *given: [function(*given)[0]]

    shape = call.ours(*arrays)[0].shape
    cotangent = mx.array(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    ours = finite(mx.vjp(first(call.ours), arrays, [cotangent.astype(call.ours(*arrays)[0].dtype)])[1])
    with mx.stream(mx.cpu):
        wide = [each.astype(mx.float32) for each in arrays]
        return ours, finite(mx.vjp(first(call.unfused), wide, [cotangent])[1])


def differences(call: Call, name: str, *, derivative: bool = False) -> list[str]:
    """What a call makes of each of the three numbers in one of its arrays, as far as it is not what it should be."""
    found: list[str] = []
    labels = list(call.arrays) if derivative else ["y", "second"]
    for number, value in NUMBERS.items():
        ours, expected = (gradients if derivative else results)(call, call.with_number(name, value))
        for label, mine, theirs in zip(labels, ours, expected, strict=False):
            assert mine.shape == theirs.shape, (label, mine.shape, theirs.shape)
            lost, more = mine & ~theirs, theirs & ~mine
            if call.token >= 0 and label in (*call.by_token, "y"):  # also earlier tokens of the chunk, or with gradients later ones
                first = call.token // CHUNK * CHUNK
                more[:, first : first + CHUNK] = False
            if lost.any() or more.any():
                what = f"gradient of {label}" if derivative else label
                places = [np.argwhere(each)[0].tolist() if each.any() else "none" for each in (lost, more)]
                found.append(
                    f"{number} in {name}, {what}: {lost.sum()} of {(~theirs).sum()} lost (first {places[0]}), "
                    f"{more.sum()} too many (first {places[1]})"
                )
    return found


# ---------------------------------------------------------------------------------------------------------------- attention
def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *more: mx.array,
    scale: float,
    names: tuple[str, ...] = (),
    seen: mx.array | None = None,
    softcap: float = 0.0,
) -> list[mx.array]:
    """The result and the logarithms of the sums; ``more``: an additive mask, sinks, as named."""
    given = dict(zip(names, more, strict=True))
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = (q * scale) @ k.swapaxes(2, 3)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    shown = mx.ones(scores.shape, mx.bool_) if seen is None else mx.broadcast_to(seen, scores.shape)
    if "mask" in given:
        scores, shown = scores + given["mask"], shown & (given["mask"] != -mx.inf)
    scores = mx.where(shown, scores, -mx.inf)
    if "sinks" in given:
        sinks = mx.broadcast_to(given["sinks"].reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, sinks], axis=3)
    weights = mx.softmax(scores, axis=3)[..., : k.shape[2]]
    return [weights @ v, mx.logsumexp(scores, axis=3)]


class Attention(NamedTuple):
    """A form of attention; the mask hides a few keys at most."""

    sizes: tuple[int, int, int, int, int, int, int]  # batch, heads, kv heads, queries, keys, head_dim, of the values
    mask: str = "none"  # "bool", "row": of one row for all; "additive"
    softcap: float = 0.0
    sinks: bool = False
    window: tuple[int, int] = (-1, -1)
    lse: bool = False
    shared: bool = False  # the values are the first columns of the keys

    def draw(self, dtype: mx.Dtype, seed: int = 0) -> tuple[dict[str, mx.array], dict[str, Any], dict[str, tuple[int, ...]]]:
        """Arrays, what else they are called with, and where a number comes."""
        batch, heads, kv_heads, queries, keys, dim, value_dim = self.sizes
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

        arrays = {"q": normal(batch, heads, queries, dim), "k": normal(batch, kv_heads, keys, dim)}
        arrays["v"] = arrays["k"][..., :value_dim] if self.shared else normal(batch, kv_heads, keys, value_dim)
        key = keys - queries - 2 if self.window != (-1, -1) else min(5, keys - 1)  # which all queries see
        places: dict[str, tuple[int, ...]] = {"q": (-1, heads - 1, queries - 1, 3), "k": (0, 0, key, 3), "v": (0, 0, key, value_dim - 1)}
        options: dict[str, Any] = {}
        if self.mask in {"bool", "row"}:
            shape = (batch, 1, 1, keys) if self.mask == "row" else (1, 1, queries, keys)
            shown = rng.random(shape) < 0.9
            shown[..., key] = True
            options["seen"] = mx.array(shown)
        if self.mask == "additive":
            bias = rng.standard_normal((1, 1, queries, keys))
            bias[rng.random(bias.shape) < 0.1] = -np.inf
            bias[..., key] = 0.5
            arrays["mask"] = mx.array(bias.astype(np.float32)).astype(dtype)
            places["mask"] = (0, 0, queries // 2, key)
        if self.sinks:
            arrays["sinks"], places["sinks"] = normal(heads), (heads - 1,)
        if self.window != (-1, -1):
            place, column = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
            left, right = self.window
            options["seen"] = mx.array(((left < 0) | (column >= place - left)) & ((right < 0) | (column <= place + right)))
        return arrays, options, places

    def call(self, ours: Callable[..., Sequence[mx.array]], dtype: mx.Dtype) -> Call:
        """``ours`` of the arrays by their names and, as ``seen``, of a bool mask that is no window's."""
        arrays, options, places = self.draw(dtype)
        names = tuple(arrays)
        mask = {} if self.window != (-1, -1) else options

        def mine(*given: mx.array) -> Sequence[mx.array]:
            named = dict(zip(names, given, strict=True))
            return ours(**({**named, "v": named["k"][..., : self.sizes[6]]} if self.shared else named), **mask)

        def theirs(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> list[mx.array]:
            v = k[..., : self.sizes[6]] if self.shared else v
            return attention(q, k, v, *more, scale=self.scale, names=names[3:], softcap=self.softcap, **options)[: 1 + self.lse]

        return Call(mine, theirs, arrays, {name: place for name, place in places.items() if not (self.shared and name == "v")})

    @property
    def scale(self) -> float:
        return float(self.sizes[5] ** -0.5)

    @property
    def inputs(self) -> list[str]:
        """The names of the arrays that get a number."""
        there = {"q": True, "k": True, "v": not self.shared, "mask": self.mask == "additive", "sinks": self.sinks}
        return [name for name, given in there.items() if given]


# --------------------------------------------------------------------------------------------------------- linear attention
def linear_attention(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, *, delta: bool = True
) -> list[mx.array]:
    """y and the state after the last token, token after token."""
    shared = v.shape[2] // q.shape[2]
    q, k = mx.repeat(q, shared, axis=2), mx.repeat(k, shared, axis=2)
    parts = []
    for t in range(v.shape[1]):
        decay = g[:, t, :, None, :] if g.ndim == 4 else g[:, t, :, None, None]
        state = state * decay
        change = v[:, t] - (state * k[:, t, :, None, :]).sum(axis=-1) if delta else v[:, t]
        state = state + (change * beta[:, t, :, None])[..., None] * k[:, t, :, None, :]
        parts.append((state * q[:, t, :, None, :]).sum(axis=-1))
    return [mx.stack(parts, axis=1), state]


def linear_call(
    ours: Function, tokens: int, dtype: mx.Dtype, *, delta: bool = True, channels: bool = False, token: int = 70, loose: bool = False
) -> Call:
    """Of q, k, v, g, beta and a state, in which the number is a token's; ``loose``: by chunks of matmuls (see ``differences``)."""
    rng = np.random.default_rng(tokens)
    batch, key_heads, heads, key, value = 1, 1, 2, 32, 40
    q, k = (rng.standard_normal((batch, tokens, key_heads, key)) for _ in range(2))
    g = rng.uniform(0.8, 1, (batch, tokens, heads, key) if channels else (batch, tokens, heads))
    drawn = {
        "q": q * key**-0.5,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((batch, tokens, heads, value)),
        "g": g,
        "beta": rng.uniform(0.1, 1, (batch, tokens, heads)),
        "state": rng.standard_normal((batch, heads, value, key)),
    }
    wide = {"g", "beta", "state"}
    arrays = {name: mx.array(each.astype(np.float32)).astype(mx.float32 if name in wide else dtype) for name, each in drawn.items()}
    places: dict[str, tuple[int, ...]] = {"q": (0, token, 0, 3), "k": (0, token, 0, 5), "v": (0, token, 1, 7), "beta": (0, token, 1)}
    places |= {"g": (0, token, 1, 2) if channels else (0, token, 1), "state": (0, 1, 9, 4)}
    unfused = partial(linear_attention, delta=delta)
    return Call(ours, unfused, arrays, places, token if loose else -1, ("q", "k", "v", "g", "beta"))
