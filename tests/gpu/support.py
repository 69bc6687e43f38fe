"""What the GPU tests share: random inputs, error norms, tolerances, and the proof that an operation took the fused path."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_cuda._common.choice import SMALL_SHARED_MEMORY
from mlx_cuda._loader import native
from numpy.typing import NDArray

from .reference import Array

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

# Half a unit in the last place, relative: how far rounding one number moves it at most.
ROUNDOFF = {mx.float16: 2**-11, mx.bfloat16: 2**-8, mx.float32: 2**-24}

# Largest error of a result in relative norm. Results of 16 bits are rounded once, after sums in float32 (attention also rounds its
# probabilities): at most one roundoff each, so twice that. A float32 matmul runs in TF32, as MLX's own does: inputs rounded or
# truncated to 11 significant bits, at most 2^-11 or 2^-10 for each of the two.
TOLERANCE = {mx.float16: 1e-3, mx.bfloat16: 8e-3, mx.float32: 2e-3}
TF32_ROUNDOFF = 2**-11

# Gradients are composed of MLX operations, which round every intermediate result to the dtype.
GRADIENT_TOLERANCE = {mx.float16: 5e-3, mx.bfloat16: 3e-2, mx.float32: 5e-3}

# Primitives that only arrange or convert data.
LAYOUT = {
    "AsStrided", "AsType", "Broadcast", "Contiguous", "Copy", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unflatten",
}  # fmt: skip


def has_small_memory() -> bool:
    """Whether blocks have too little shared memory for the widest heads and states, as an Ada's."""
    return native.capability(mx.Device(mx.gpu, 0)) in SMALL_SHARED_MEMORY


def on_hopper() -> bool:
    return native.capability(mx.Device(mx.gpu, 0)) == (9, 0)


def host(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def device(a: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    """An evaluated array of the dtype, so that graphs of what is computed from it start here."""
    result = mx.array(a.astype(np.float32, copy=False)).astype(dtype)
    mx.eval(result)
    return result


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    return device(rng.standard_normal(shape, np.float32) * np.float32(scale), dtype)


def relative_error(actual: mx.array | Array, expected: Array, size: Array | None = None) -> float:
    """Norm of the difference relative to the norm of the expected values, or of ``size`` where that is larger."""
    values = host(actual) if isinstance(actual, mx.array) else actual
    assert values.shape == expected.shape
    if not expected.size:
        return 0.0
    norm = max(float(np.linalg.norm(expected)), 0.0 if size is None else float(np.linalg.norm(size)))
    difference = float(np.linalg.norm(values - expected))
    return difference if norm == 0 else difference / norm


def assert_close(
    actual: mx.array,
    expected: Array,
    *,
    tolerance: float,
    size: Array | None = None,
    upstream: mx.array | None = None,
    floor: float = 0.0,
    about: object = None,
) -> None:
    """Hold a result to the tolerance and, given upstream's result for the same inputs, to 1.5 times its error.

    Errors below ``floor`` (the roundoff of the arithmetic) and those of a few elements are luck, and are not compared.
    """
    error = relative_error(actual, expected, size)
    assert error <= tolerance, about  # also fails for NaN
    if upstream is not None and expected.size >= 256:
        theirs = relative_error(upstream, expected, size)
        assert np.isnan(theirs) or error <= 1.5 * max(theirs, floor), about


def primitives(*arrays: mx.array) -> set[str]:
    """Names of the primitives that MLX will evaluate for these arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return set(re.findall(r'label ="([^"]+)", shape=rectangle', dot.getvalue()))


def assert_fused(result: mx.array, name: str) -> None:
    """The result, not evaluated yet, is one fused primitive of ours between at most changes of layout."""
    assert primitives(result) - LAYOUT == {name}


def poison(call: Callable[[], mx.array], shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Leave NaN in the memory that the next result of this shape is likely to get.

    ``call`` gives a result of that shape full of NaN, from the operation's own allocation; the rest comes from MLX's.
    """
    junk = [call() for _ in range(4)] + [mx.full(shape, float("nan"), dtype) for _ in range(4)]
    mx.eval(junk)
    mx.synchronize()
