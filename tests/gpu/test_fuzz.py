"""Random cases of everything at once: shapes, dtypes, layouts, options.

A case is its number: ``pytest tests/gpu/test_fuzz.py -k 'linear and 217'`` repeats one. MLX_CUDA_FUZZ_SEED chooses other cases.
"""

from __future__ import annotations

import os

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from . import matmul_trials, reference, trials
from .reference import Activation
from .support import DTYPES, TOLERANCE, assert_close, device, host

pytestmark = pytest.mark.gpu

SEED = int(os.environ.get("MLX_CUDA_FUZZ_SEED", "0"))
CASES = 100

cases = pytest.mark.parametrize("case", range(CASES), ids=lambda case: f"seed{SEED}-{case}")


def generator(case: int, operation: int) -> np.random.Generator:
    return np.random.default_rng([SEED, operation, case])


def length(rng: np.random.Generator, largest: int) -> int:
    """Small and large alike, and often next to a power of two."""
    if rng.random() < 0.5:
        return int(np.clip(2 ** rng.integers(0, int(np.log2(largest)) + 1) + rng.integers(-1, 2), 1, largest))
    return int(rng.integers(1, largest + 1))


def view(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    """A random array, laid out at random: permuted, cut out of a larger one, strided, reversed, or repeated along an axis."""
    order = rng.permutation(len(shape)) if rng.random() < 0.3 else np.arange(len(shape))
    steps = rng.choice([1, 1, 1, 1, 2, -1], len(shape))
    starts, ends = rng.integers(0, 3, len(shape)) * (rng.random() < 0.3), rng.integers(0, 3, len(shape)) * (rng.random() < 0.3)
    repeated = rng.random(len(shape)) < 0.05
    sizes = np.where(repeated, 1, shape) * np.abs(steps) + starts + ends
    base = device(rng.standard_normal(sizes[order]) * scale, dtype).transpose(*np.argsort(order).tolist())
    cut = base[tuple(slice(int(start), int(size - end)) for start, size, end in zip(starts, sizes, ends, strict=True))]
    stepped = cut[tuple(slice(None, None, int(step)) for step in steps)]
    result = mx.broadcast_to(stepped, shape)
    mx.eval(result)
    assert result.shape == shape
    return result


@cases
def test_linear(case: int) -> None:
    rng = generator(case, 0)
    dtype = list(DTYPES.values())[rng.integers(3)]
    activations: list[Activation] = [None, "relu", "gelu_approx"]
    activation = activations[rng.integers(3)]
    n, k = length(rng, 700), length(rng, 700)
    leading = tuple(length(rng, 20) for _ in range(rng.integers(1, 4))) if rng.random() < 0.5 else (length(rng, 700),)
    x, w = view(rng, (*leading, k), dtype), view(rng, (n, k), dtype, k**-0.5)
    bias = view(rng, (n,), dtype) if rng.random() < 0.5 else None
    arguments = host(x), host(w), None if bias is None else host(bias)
    assert_close(
        mlx_cuda.linear(x, w, bias, activation=activation),
        reference.linear(*arguments, activation),
        size=reference.linear_size(*arguments),
        tolerance=TOLERANCE[dtype],
    )


@given(seed=st.integers(SEED, SEED + 2**31))
@example(seed=SEED)
@settings(max_examples=200)
def test_attention(seed: int) -> None:
    """Every option in every combination (tests/gpu/cases.py); ``python -m tests.gpu.soak`` runs thousands."""
    trials.check(seed)


@given(seed=st.integers(SEED, SEED + 2**31))
@example(seed=SEED)
@settings(max_examples=150)
def test_matmuls(seed: int) -> None:
    """Of quantised weights, experts, groups and 8-bit numbers (tests/gpu/matmul_cases.py)."""
    matmul_trials.check(seed)


# Parts of a sum that cuBLASLt added in 16 bits, with the workspace of an A100.
@pytest.mark.parametrize("seed", [6001678])
def test_matmuls_once_failed(seed: int) -> None:
    matmul_trials.check(seed)


# A gradient that MLX refused (754), and bounds that did not know what a softcap lets through, how far the fit of its tangent is off, or
# that a dtype has a smallest number.
@pytest.mark.parametrize(
    "seed", [74, 368, 722, 754, 2245, 3200, 3371, 4403, 4568, 5842, 6575, 6757, 6900, 7006, 8426, 8516, 8975, 9382, 9745]
)
def test_attention_once_failed(seed: int) -> None:
    trials.check(seed)


@cases
def test_swiglu(case: int) -> None:
    rng = generator(case, 2)
    dtype = list(DTYPES.values())[rng.integers(3)]
    shape = tuple(length(rng, [100_000, 700, 60, 20][rank]) for rank in [int(rng.integers(4))] for _ in range(rank + 1))
    gate, up = view(rng, shape, dtype), view(rng, shape, dtype)
    assert_close(
        mlx_cuda.swiglu(gate, up),
        reference.swiglu(host(gate), host(up)),
        tolerance=1e-6 if dtype == mx.float32 else TOLERANCE[dtype],
    )
