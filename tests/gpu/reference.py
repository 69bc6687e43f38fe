"""What the operations mean: numpy in float64, forward and backward.

Nothing but numpy is imported, so that the benchmark program checks itself against the same code.
"""

from __future__ import annotations

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


def activation_slope(z: Array, activation: Activation) -> Array:
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
    dz = cotangent * activation_slope(linear(x, w, bias), activation)
    return dz @ w, dz.T @ x, dz.sum(axis=0)


# ---------------------------------------------------------------------------------------------------------------- attention
def _probabilities(
    q: Array, k: Array, *, scale: float, causal: bool, rows: NDArray[np.int64] | None = None, length: int | None = None
) -> Array:
    scores = scale * (q @ np.swapaxes(k, -1, -2))
    visible = np.ones(scores.shape[-2:], dtype=bool)
    if causal:  # aligned to the lower right corner: the last query sees every key
        queries = np.arange(q.shape[-2]) if rows is None else rows
        offset = k.shape[-2] - (q.shape[-2] if length is None else length)
        visible = np.arange(k.shape[-2]) <= queries[:, None] + offset
    top = np.max(scores, axis=-1, keepdims=True, where=visible, initial=-np.inf)
    weights = np.where(visible, np.exp(np.where(visible, scores - np.where(np.isfinite(top), top, 0), -np.inf)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)  # a query that sees no key gives zeros


def _per_query_head(q: Array, kv: Array) -> Array:
    return np.repeat(kv, q.shape[-3] // kv.shape[-3], axis=-3)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    causal: bool = False,
    rows: NDArray[np.int64] | None = None,
    length: int | None = None,
) -> Array:
    """Attention of q [..., H, T, D] to k and v [..., H_kv, S, D].

    With ``rows`` (and ``length``, the full number of queries) q holds only those of the queries.
    """
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    return _probabilities(q, k, scale=scale, causal=causal, rows=rows, length=length) @ v


def attention_vjp(q: Array, k: Array, v: Array, cotangent: Array, *, scale: float, causal: bool = False) -> tuple[Array, Array, Array]:
    """Cotangents of q, k and v [B, H or H_kv, T or S, D]."""
    heads = k.shape[-3]
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    p = _probabilities(q, k, scale=scale, causal=causal)
    dp = cotangent @ np.swapaxes(v, -1, -2)
    ds = scale * p * (dp - (dp * p).sum(axis=-1, keepdims=True))

    def sum_groups(a: Array) -> Array:
        groups: Array = a.reshape(a.shape[0], heads, -1, *a.shape[-2:]).sum(axis=2)
        return groups

    return ds @ k, sum_groups(np.swapaxes(ds, -1, -2) @ q), sum_groups(np.swapaxes(p, -1, -2) @ cotangent)


def band(q_len: int, k_len: int, *, causal: bool, window: int = -1) -> NDArray[np.bool_]:
    """Which keys a query sees, ``[Tq, Tk]``: with ``causal`` up to its own place, and only the last ``window`` before that."""
    place = np.arange(q_len)[:, None] + k_len - q_len
    key = np.arange(k_len)
    seen: NDArray[np.bool_] = (key <= place) if causal else np.ones((q_len, k_len), bool)
    return seen & (key >= place - window) if window >= 0 else seen


def _weights(q: Array, k: Array, *, scale: float, seen: NDArray[np.bool_], sinks: Array | None) -> tuple[Array, Array]:
    """Probabilities, which miss the sink's share of 1, and the logarithm of the sum that they were divided by."""
    scores = np.where(seen, scale * (q @ np.swapaxes(k, -1, -2)), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    total = np.exp(scores - top).sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    lse = np.log(total) + top
    return np.exp(scores - lse), lse[..., 0]


def sink_attention(
    q: Array, k: Array, v: Array, *, scale: float, seen: NDArray[np.bool_], sinks: Array | None = None
) -> tuple[Array, Array]:
    """Attention where every query sees a key, and the logarithm of the sum of its exponentials, with the sinks [H] in it."""
    p, lse = _weights(q, _per_query_head(q, k), scale=scale, seen=seen, sinks=sinks)
    return p @ _per_query_head(q, v), lse


def sink_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    cotangent: Array,
    *,
    scale: float,
    seen: NDArray[np.bool_],
    sinks: Array | None = None,
    d_lse: Array | float = 0.0,
) -> tuple[Array, Array, Array, Array]:
    """Cotangents of q, k, v and the sinks, given those of the two results."""
    heads = k.shape[-3]
    k, v = _per_query_head(q, k), _per_query_head(q, v)
    p, lse = _weights(q, k, scale=scale, seen=seen, sinks=sinks)
    dp = cotangent @ np.swapaxes(v, -1, -2)
    mean = (dp * p).sum(axis=-1) - d_lse  # what every score's gradient is shifted by
    ds = scale * p * (dp - mean[..., None])
    share = np.exp(sinks[:, None] - lse) if sinks is not None else np.zeros_like(lse)

    def sum_groups(a: Array) -> Array:
        groups: Array = a.reshape(a.shape[0], heads, -1, *a.shape[-2:]).sum(axis=2)
        return groups

    dq, dk, dv = ds @ k, sum_groups(np.swapaxes(ds, -1, -2) @ q), sum_groups(np.swapaxes(p, -1, -2) @ cotangent)
    return dq, dk, dv, -(share * mean).sum(axis=(0, 2))


class Attended(NamedTuple):
    """What a query gets, and how."""

    out: Array
    lse: Array  # [B, H, Tq]
    weights: Array  # [B, H, Tq, Tk]
    sunk: Array  # [B, H, Tq, 1]: the sink's share
    size: Array  # of out: what rounding errors are relative to
    scores: Array  # before the bias, after the softcap


def bias_of(
    q_len: int,
    k_len: int,
    *,
    window: tuple[int, int] = (-1, -1),
    starts: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> Array:
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
    scores = scale * (q @ np.swapaxes(k, -1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    hidden = scores if bias is None else scores + bias
    sink = np.full((1, q.shape[1], 1, 1), -np.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)
    peak = np.maximum(hidden.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    peak = np.where(np.isfinite(peak), peak, 0)
    weights, sunk = np.exp(hidden - peak), np.exp(sink - peak)
    total = weights.sum(axis=-1, keepdims=True) + sunk
    some = np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, peak + np.log(some))[..., 0]
    weights, sunk = weights / some, sunk / some
    return Attended(weights @ v, lse, weights, np.broadcast_to(sunk, total.shape), np.sqrt((weights**2) @ (v**2)), scores)


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
    slope = 1 - (done.scores / softcap) ** 2 if softcap else 1.0
    dx, dx_size = scale * ds * slope, scale * ds_size * (slope + (1 / 8 if softcap else 0))  # the slope is a difference as well

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


# ------------------------------------------------------------------------------------------------------------------- swiglu
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``."""
    return gate * sigmoid(gate) * up


def swiglu_vjp(gate: Array, up: Array, cotangent: Array) -> tuple[Array, Array]:
    """Cotangents of gate and up, which have the shape of the result."""
    s = sigmoid(gate)
    return cotangent * up * s * (1 + gate * (1 - s)), cotangent * gate * s
