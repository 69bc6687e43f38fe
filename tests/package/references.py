"""Float64 references in numpy for the operations, and what the contract tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.float64]"

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Error in relative norm: a few roundings of the dtype; a GPU rounds the inputs of float32 matmuls to TF32.
_TOLERANCE = {mx.float64: 1e-12, mx.float32: 2e-3 if mx.cuda.is_available() else 2e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def random(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, *, seed: int = 0) -> mx.array:
    """Standard normal numbers, rounded to the dtype."""
    return mx.array(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)).astype(dtype)


def host(array: mx.array) -> Array:
    """The array's very values in float64."""
    values: Array = np.array(array.astype(mx.float64, stream=mx.cpu))
    return values


def hosts(arrays: Iterable[mx.array]) -> tuple[Array, Array, Array]:
    """The values of q, k and v, or of x, w and bias."""
    first, second, third = map(host, arrays)
    return first, second, third


def sliced(arrays: Iterable[mx.array], axes: Iterable[int | None], index: int) -> tuple[Array, Array, Array]:
    """What one step of a vmap over these axes sees."""
    first, second, third = (host(a) if axis is None else np.take(host(a), index, axis) for a, axis in zip(arrays, axes, strict=True))
    return first, second, third


def error(actual: mx.array, expected: Array, size: Array | None = None) -> float:
    """The norm of the difference by the norm of the expected values, or of ``size`` where that is larger."""
    assert actual.shape == expected.shape
    values = host(actual)
    assert np.isfinite(values).all()
    norm = max(np.linalg.norm(expected), 0.0 if size is None else np.linalg.norm(size))
    return float(np.linalg.norm(values - expected) / (norm or 1.0))


def assert_close(actual: mx.array, expected: Array, *, slack: float = 1.0, size: Array | None = None) -> None:
    """Equal up to a few roundings of the actual array's dtype."""
    assert error(actual, expected, size) <= slack * _TOLERANCE[actual.dtype]


def gradients(function: Callable[..., mx.array], inputs: list[mx.array], cotangent: mx.array) -> list[Array]:
    """The vjp of a plain composition, computed in float64 on the CPU."""
    with mx.stream(mx.cpu):
        wide = [array.astype(mx.float64) for array in inputs]
        _, result = mx.vjp(function, wide, [cotangent.astype(mx.float64)])
        return [np.array(gradient) for gradient in result]


def linear(x: Array, w: Array, bias: Array | None = None, activation: str | None = None) -> Array:
    y: Array = x @ w.T + (0.0 if bias is None else bias)
    if activation == "relu":
        y = np.maximum(y, 0)
    if activation == "gelu_approx":
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y


def swiglu(gate: Array, up: Array) -> Array:
    result: Array = gate / (1 + np.exp(-gate)) * up
    return result


Mask: TypeAlias = "Literal['causal'] | NDArray[Any] | None"


def attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, mask: Mask = None, softcap: float = 0.0, sinks: Array | None = None
) -> Array:
    # The heads that share keys are multiplied with them together, as further rows.
    shared = (*k.shape[:2], q.shape[1] // k.shape[1] * q.shape[2])
    scores = (q.reshape(*shared, q.shape[3]) @ k.swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2])
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if isinstance(mask, str):
        rows, columns = np.indices(scores.shape[2:])
        mask = columns <= rows + scores.shape[3] - scores.shape[2]
    if not isinstance(mask, str) and mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    peak = scores.max(axis=3, keepdims=True)
    sink = np.full((1, q.shape[1], 1, 1), -np.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)
    peak = np.maximum(peak, sink)
    peak = np.where(np.isfinite(peak), peak, 0)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=3, keepdims=True) + np.exp(sink - peak)
    weights /= np.where(total == 0, 1, total)
    result: Array = (weights.reshape(*shared, k.shape[2]) @ v).reshape(*q.shape[:3], v.shape[3])
    return result


def with_(arrays: list[mx.array], index: int, array: mx.array) -> list[mx.array]:
    """The arrays of a call with another one in a place."""
    return [*arrays[:index], array, *arrays[index + 1 :]]


def seen(
    q_len: int, k_len: int, *, window: tuple[int, int] = (-1, -1), starts: NDArray[np.int64] | None = None,
    ends: NDArray[np.int64] | None = None,
) -> NDArray[np.bool_]:  # fmt: skip
    """Which keys each query sees, ``[B, 1, Tq, Tk]``, written out one by one."""
    ends = np.array([k_len]) if ends is None else ends
    starts = np.zeros(len(ends), int) if starts is None else starts
    ends = np.broadcast_to(ends, len(starts))
    result = np.zeros((len(ends), 1, q_len, k_len), bool)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for query in range(q_len):
            place = end - q_len + query
            first = start if window[0] < 0 else max(start, place - window[0])
            last = end if window[1] < 0 else min(end, place + window[1] + 1)
            result[b, 0, query, max(first, 0) : max(last, 0)] = True
    return result
