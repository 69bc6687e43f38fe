"""What the operations mean: numpy in float64, forward and backward.

Nothing but numpy is imported, so that the benchmark program checks itself against the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Activation: TypeAlias = Literal["relu", "gelu_approx"] | None

_GELU_SCALE = np.sqrt(2 / np.pi)
_GELU_CUBIC = 0.044715


def sigmoid(x: Array) -> Array:
    """Overflow-free logistic function."""
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1, small) / (1 + small)
    return result


# ------------------------------------------------------------------------------------------------------------------- linear
def activate(z: Array, activation: Activation) -> Array:
    result: Array = z
    if activation == "relu":
        result = np.maximum(z, 0)
    elif activation == "gelu_approx":
        result = 0.5 * z * (1 + np.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z**3)))
    return result


def activation_gradient(z: Array, activation: Activation) -> Array:
    result: Array = np.ones_like(z)
    if activation == "relu":
        result = np.where(z > 0, 1.0, 0.0)
    elif activation == "gelu_approx":
        t = np.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z**3))
        result = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _GELU_SCALE * (1 + 3 * _GELU_CUBIC * z * z)
    return result


def linear(x: Array, w: Array, bias: Array | None = None, activation: Activation = None) -> Array:
    """``activation(x @ w.T + bias)`` with x [..., K] and w [N, K]."""
    return activate(x @ w.T + (0.0 if bias is None else bias), activation)


def linear_size(x: Array, w: Array, bias: Array | None = None) -> Array:
    """How large a sum of such products is when their signs are random: the size that rounding errors are relative to.

    It matters for results of a few elements, where the sum itself may cancel to nearly nothing.
    """
    result: Array = np.sqrt((x * x) @ (w * w).T + (0.0 if bias is None else bias * bias))
    return result


def linear_vjp(x: Array, w: Array, bias: Array | None, activation: Activation, cotangent: Array) -> tuple[Array, Array, Array]:
    """Cotangents of x [M, K], w and bias."""
    dz = cotangent * activation_gradient(linear(x, w, bias), activation)
    return dz @ w, dz.T @ x, dz.sum(axis=0)


# ---------------------------------------------------------------------------------------------------------------- attention
def _per_query_head(q: Array, kv: Array) -> Array:
    return np.repeat(kv, q.shape[-3] // kv.shape[-3], axis=-3)


class Attended(NamedTuple):
    """What a query gets, and how."""

    out: Array
    lse: Array  # [B, H, Tq]
    weights: Array  # [B, H, Tq, Tk]
    sunk: Array  # [B, H, Tq, 1]: the sink's share
    size: Array  # of out: what rounding errors are relative to
    scores: Array  # before the bias, after the softcap
    steep: Array | None  # with a softcap: by how much a relative error of q's and k's numbers moves these scores


def bias_of(
    q_len: int, k_len: int, *, window: tuple[int, int] = (-1, -1), starts: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> Array:  # fmt: skip
    """0 for the keys that a query sees by its place and minus infinity for the others, ``[1 or B, 1, Tq, Tk]``."""
    end = np.array(k_len) if ends is None else ends[:, None, None, None]
    start = np.array(0) if starts is None else starts[:, None, None, None]
    key, place = np.arange(k_len)[None, None, None], np.arange(q_len)[None, None, :, None] + end - q_len
    seen = (key < end) & (key >= start)
    if window[0] >= 0:
        seen = seen & (key >= place - window[0])
    if window[1] >= 0:
        seen = seen & (key <= place + window[1])
    result: Array = np.where(np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (1, 1, q_len, k_len))), 0.0, -np.inf)
    return result


def attend(
    q: Array, k: Array, v: Array, *, scale: float, bias: Array | None = None, softcap: float = 0.0, sinks: Array | None = None
) -> Attended:
    """Attention of q [B, H, Tq, D] to k and v [B, H_kv, Tk, D]; a bias broadcasts to [B, H, Tq, Tk]."""
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    scores, steep = scale * (q @ np.swapaxes(k, -1, -2)), None
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        steep = (1 - (scores / softcap) ** 2) * abs(scale) * np.sqrt(q**2 @ np.swapaxes(k, -1, -2) ** 2)
    hidden = scores if bias is None else scores + bias
    sink = np.full((1, q.shape[1], 1, 1), -np.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)
    peak = np.maximum(hidden.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    peak = np.where(np.isfinite(peak), peak, 0)
    weights, sunk = np.exp(hidden - peak), np.exp(sink - peak)
    total = weights.sum(axis=-1, keepdims=True) + sunk
    some = np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, peak + np.log(some))[..., 0]
    weights, sunk = weights / some, sunk / some
    return Attended(weights @ v, lse, weights, np.broadcast_to(sunk, total.shape), np.sqrt((weights**2) @ (v**2)), scores, steep)


def attend_vjp(
    q: Array,
    k: Array,
    v: Array,
    done: Attended,
    cotangent: Array,
    *,
    scale: float,
    softcap: float = 0.0,
    lse_cotangent: Array | None = None,
) -> dict[str, tuple[Array, Array]]:
    """Cotangents of q, k, v, bias ``[B, H, Tq, Tk]`` and sinks, each with the size that its rounding errors are relative to.

    Sums of terms that cancel, as where there is one key alone, have errors as large as the terms.
    """
    heads = k.shape[-3]
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    dp = cotangent @ np.swapaxes(v, -1, -2)
    delta = (dp * done.weights).sum(axis=-1, keepdims=True)
    more = np.zeros_like(delta) if lse_cotangent is None else lse_cotangent[..., None]
    ds, ds_size = done.weights * (dp - delta + more), done.weights * (np.abs(dp) + np.abs(delta) + np.abs(more))
    gradient = 1 - (done.scores / softcap) ** 2 if softcap else 1.0
    dx, dx_size = scale * ds * gradient, scale * ds_size * (gradient + (1 / 8 if softcap else 0))  # the slope is a difference as well

    def groups(a: Array) -> Array:
        summed: Array = a.reshape(a.shape[0], heads, a.shape[1] // heads, *a.shape[-2:]).sum(axis=2)
        return summed

    def turned(a: Array) -> Array:
        return np.swapaxes(a, -1, -2)

    sinks, sinks_size = done.sunk * (more - delta), done.sunk * (np.abs(more) + np.abs(delta))
    return {
        "q": (dx @ k, np.sqrt(dx_size**2 @ k**2)),
        "k": (groups(turned(dx) @ q), np.sqrt(groups(turned(dx_size**2) @ q**2))),
        "v": (groups(turned(done.weights) @ cotangent), np.sqrt(groups(turned(done.weights**2) @ cotangent**2))),
        "bias": (ds, ds_size),
        "sinks": (sinks.sum(axis=(0, 2, 3)), np.sqrt((sinks_size**2).sum(axis=(0, 2, 3)))),
    }


def attention(q: Array, k: Array, v: Array, *, scale: float, causal: bool = False) -> Array:
    """The result alone; the causal mask is aligned to the lower right."""
    return attend(q, k, v, scale=scale, bias=bias_of(q.shape[2], k.shape[2], window=(-1, 0 if causal else -1))).out


def attention_vjp(q: Array, k: Array, v: Array, cotangent: Array, *, scale: float, causal: bool = False) -> tuple[Array, Array, Array]:
    """Cotangents of q, k and v."""
    done = attend(q, k, v, scale=scale, bias=bias_of(q.shape[2], k.shape[2], window=(-1, 0 if causal else -1)))
    found = attend_vjp(q, k, v, done, cotangent, scale=scale)
    return found["q"][0], found["k"][0], found["v"][0]


# ------------------------------------------------------------------------------------------------------- short convolutions
def short_conv(
    x: Array, weight: Array, *, bias: Array | None = None, state: Array | None = None, activation: str | None = None
) -> tuple[Array, Array]:
    """y and the rows that are kept, of x ``[B, T, C]`` and weights ``[C, K]``."""
    kept, tokens = weight.shape[1] - 1, x.shape[1]
    rows = np.concatenate([np.zeros((x.shape[0], kept, x.shape[2])) if state is None else state, x], axis=1)
    y: Array = sum((rows[:, k : k + tokens] * weight[:, k] for k in range(kept + 1)), np.zeros(x.shape))
    if bias is not None:
        y = y + bias
    return (y * sigmoid(y) if activation else y), rows[:, tokens:]


# ------------------------------------------------------------------------------------------------------------------- swiglu
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``."""
    return gate * sigmoid(gate) * up


def swiglu_vjp(gate: Array, up: Array, cotangent: Array) -> tuple[Array, Array]:
    """Cotangents of gate and up, which have the shape of the result."""
    s = sigmoid(gate)
    return cotangent * up * s * (1 + gate * (1 - s)), cotangent * gate * s


# --------------------------------------------------------------------------------------------------------- linear attention
def linear_attention(
    arrays: Sequence[Array], state: Array | None = None, mask: NDArray[np.bool_] | None = None, *, delta: bool = True
) -> tuple[Array, Array]:
    """Token after token: q and k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv]; mask [B, T]."""
    q, k, v, g, beta = arrays
    (batch, tokens, heads, value), key = v.shape, k.shape[3]
    q, k = (np.repeat(each, heads // each.shape[2], axis=2) for each in (q, k))
    decay = g[..., None, :] if g.ndim == 4 else g[..., None, None]
    s = np.zeros((batch, heads, value, key)) if state is None else state.astype(np.float64)
    y = np.zeros(v.shape)
    for t in range(tokens):
        new = s * decay[:, t]
        found = np.einsum("bhvk,bhk->bhv", new, k[:, t]) if delta else 0
        new += ((v[:, t] - found) * beta[:, t, :, None])[..., None] * k[:, t, :, None, :]
        y[:, t] = np.einsum("bhvk,bhk->bhv", new, q[:, t])
        if mask is not None:
            new = np.where(mask[:, t, None, None, None], new, s)
            y[:, t] = np.where(mask[:, t, None, None], y[:, t], 0)
        s = new
    return y, s
