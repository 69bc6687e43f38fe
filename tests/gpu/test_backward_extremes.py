"""Gradients of attention whose scores are all very large or very small, at lengths about every multiple of cuDNN's tiles.

cuDNN's backward for Hopper takes what comes after an odd number of tiles of 64 keys for keys with scores of 0: infinite weights where the
logarithms of the sums are below -88, or -11 in float16 (docs/upstream-issues.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native

from . import reference
from .support import device, host, primitives

pytestmark = pytest.mark.gpu
MENDED = (9, 28)  # the first cuDNN after 9.19 that it was asked with

SCORES = (-1000, -120, -88, -20, 0, 88, 1000)  # of each batch entry
TILES = range(64, 321, 64)
LENGTHS = [tile + more for tile in TILES for more in (-1, 0, 1, 8)]
CLOSE = 0.05  # of a gradient in relative norm: scores of 1000 are off by 2^-21 of that in float32, and weights are rounded to 16 bits

dtypes = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)


def inputs(rng: np.random.Generator, q_len: int, k_len: int, dim: int, dtype: mx.Dtype, *, groups: int = 1) -> list[mx.array]:
    """q, k, v and the gradient of the result: the scores of a batch entry are all within a few of its number."""
    batch, scale = len(SCORES), dim**-0.5
    shapes = (batch, 2 * groups, q_len, dim), (batch, 2, k_len, dim), (batch, 2, k_len, dim), (batch, 2 * groups, q_len, dim)
    q, k, v, cotangent = (rng.standard_normal(shape) for shape in shapes)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, np.array(SCORES)[:, None, None] / scale
    return [device(array, dtype) for array in (q, k, v, cotangent)]


def gradients(function: Callable[..., mx.array], arrays: list[mx.array]) -> list[mx.array]:
    return mx.vjp(function, arrays[:3], arrays[3:])[1]


def check(found: list[mx.array], arrays: list[mx.array], bias: reference.Array | None = None, about: object = None) -> None:
    """Finite, and with a bias close to those of float64: but for the part of q's that is a difference of the largest numbers."""
    for name, gradient in zip("qkv", found, strict=True):
        values = host(gradient)
        bad = [score for score, of in zip(SCORES, values, strict=True) if not np.isfinite(of).all()]
        assert not bad, f"the gradient of {name} is not finite at {about} for scores of {bad}"
    if bias is None:
        return
    q, k, v, cotangent = map(host, arrays)
    done = reference.attend(q, k, v, scale=q.shape[-1] ** -0.5, bias=bias, sinks=None)
    exact = reference.attend_vjp(q, k, v, done, cotangent, scale=q.shape[-1] ** -0.5)
    for name, gradient in zip("qkv", found, strict=True):
        actual, right = host(gradient)[..., name == "q" :], exact[name][0][..., name == "q" :]
        for score, a, b in zip(SCORES, actual, right, strict=True):
            assert np.linalg.norm(a - b) <= CLOSE * np.linalg.norm(b), f"the gradient of {name} at {about} for scores of {score}"


def patched(scale: float, mask: Any = None) -> Callable[..., mx.array]:
    return partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask)


# Each shape costs cuDNN two plans.
@pytest.mark.parametrize(
    ("dim", "dtype"), [*((dim, mx.bfloat16) for dim in (8, 64, 96, 128, 192, 256)), (64, mx.float16), (256, mx.float16)], ids=str
)
def test_square(rng: np.random.Generator, dim: int, dtype: mx.Dtype) -> None:
    for length in LENGTHS:
        arrays = inputs(rng, length, length, dim, dtype)
        found = gradients(mlx_cuda.attention, arrays)
        assert mlx_cuda.explain(*arrays[:3]).engine == "cudnn"
        assert "AttentionBackward" in primitives(*found)
        check(found, arrays, np.zeros((length, length)) if length % 64 == 0 and dim <= 128 else None, length)


@pytest.mark.parametrize("dim", [64, 128, 256])
@dtypes
def test_masks_and_windows(rng: np.random.Generator, dim: int, dtype: mx.Dtype) -> None:
    for q_len, k_len in (64, 64), (65, 65), (72, 72), (127, 127), (128, 128), (192, 192), (193, 193), (128, 192), (256, 320):
        arrays = inputs(rng, q_len, k_len, dim, dtype)
        for window in None, 50:
            found = gradients(partial(mlx_cuda.attention, mask="causal", window_size=window), arrays)
            bias = reference.bias_of(q_len, k_len, window=(-1 if window is None else window, 0))
            check(found, arrays, bias if dim == 64 else None, (q_len, k_len, window))
        seen = rng.random((q_len, k_len)) < 0.8
        seen[:, 0] = True
        additive = np.where(seen, rng.standard_normal((q_len, k_len)), -np.inf)
        for mask in mx.array(seen), device(additive, dtype):
            check(gradients(partial(mlx_cuda.attention, mask=mask), arrays), arrays, None, (q_len, k_len, mask.dtype))
            with mlx_cuda.patch():
                check(gradients(patched(dim**-0.5, mask), arrays), arrays, None, (q_len, k_len, mask.dtype, "patched"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cross(rng: np.random.Generator, dim: int, deterministic: bool) -> None:
    """Deterministic ones go to cuDNN, as do all on newer GPUs; the queries need not fill a tile either."""
    for q_len, k_len in (4, 128), (16, 192), (33, 64), (64, 192), (100, 128), (100, 320), (128, 192), (130, 64), (192, 128), (256, 320):
        arrays = inputs(rng, q_len, k_len, dim, mx.bfloat16, groups=2)
        found = gradients(partial(mlx_cuda.attention, deterministic=deterministic), arrays)
        check(found, arrays, np.zeros((q_len, k_len)) if dim == 64 else None, (q_len, k_len))
        with mlx_cuda.patch():
            check(gradients(patched(dim**-0.5), arrays), arrays, None, (q_len, k_len, "patched"))


@dtypes
def test_the_logarithms_and_sinks(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Sinks so low that they keep no sum from being small."""
    for length in (64, 128, 192, 200):
        arrays = inputs(rng, length, length, 64, dtype)
        sinks = mx.full((2,), -1000.0, dtype)
        check(gradients(partial(mlx_cuda.attention, sinks=sinks), arrays), arrays, None, length)
        both = mx.vjp(lambda q, k, v: mlx_cuda.attention(q, k, v, return_lse=True), arrays[:3], [arrays[3], mx.ones(arrays[0].shape[:3])])
        check(both[1], arrays, None, (length, "lse"))


def test_mlx_alone_is_not_finite(rng: np.random.Generator) -> None:
    """So that what keeps us from it goes once it is: queries in multiples of 128, keys 64 more than that, on Hopper."""
    if mx.device_info()["compute_capability_major"] != 9:
        pytest.skip("cuDNN's backward for Hopper alone has the fault")
    if native.engine(mx.default_stream(mx.gpu)).cudnn >= MENDED:  # type: ignore[union-attr]
        pytest.skip("this cuDNN has it no more")
    arrays = inputs(rng, 128, 192, 64, mx.bfloat16)
    found = gradients(patched(64**-0.5), arrays)
    assert not np.isfinite(host(found[0])).all()
