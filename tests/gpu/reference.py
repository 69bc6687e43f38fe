"""What the operations mean: numpy in float64, forward and backward.

Nothing but numpy is imported, so that the benchmark program checks itself against the same code.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

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


# ------------------------------------------------------------------------------------------------------------------- swiglu
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``."""
    return gate * sigmoid(gate) * up


def swiglu_vjp(gate: Array, up: Array, cotangent: Array) -> tuple[Array, Array]:
    """Cotangents of gate and up, which have the shape of the result."""
    s = sigmoid(gate)
    return cotangent * up * s * (1 + gate * (1 - s)), cotangent * gate * s
