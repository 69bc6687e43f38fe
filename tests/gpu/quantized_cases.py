"""Quantised weights of every form on the device, beside what they mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .formats import Form, dequantised, random_scales, random_words
from .reference import Array
from .support import device, host

ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65, 512, 1000)


class Weights(NamedTuple):
    """What ``mx.quantize`` gives, and what it means."""

    arrays: tuple[Any, ...]  # w, scales and, for affine ones, biases
    exact: Array
    form: Form

    @property
    def options(self) -> dict[str, Any]:
        return self.form.options


def ways_to_name(experts: int) -> list[tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Batch of x, shapes of the indices (None: not given): as mlx-lm's layers call it, and every other way."""
    return [
        ((10,), None, (10,)),
        ((2, 3, 1), None, (2, 3, 5)),
        ((2, 20, 1), None, (2, 20, 2)),
        ((), None, (7,)),
        ((3, 1), None, (5,)),
        ((6,), (8,), (8,)),
        ((6,), (80,), (80,)),
        ((6,), (30, 1), (4,)),
        ((6,), (experts,), None),
        ((6,), (20, 1), None),
    ]


def draw(rng: np.random.Generator, shape: tuple[int, ...], form: Form, dtype: mx.Dtype) -> Weights:
    """Random weights ``[…, numbers]`` in this form; affine scales and biases are of the dtype."""
    dense = mx.array((rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)).astype(dtype)
    # Twice, because on the CPU MLX quantises to nvfp4 only what fills 32 numbers.
    arrays = tuple(mx.contiguous(array[0]) for array in mx.quantize(mx.stack([dense, dense]), **form.options))
    mx.eval(arrays)
    return weights_of(arrays, form)


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], form: Form, dtype: mx.Dtype) -> Weights:
    """Weights of which every pattern of bits is one."""
    scales, biases = random_scales(rng, shape, form)
    words = mx.array(random_words(rng, shape, form))
    arrays = (words, mx.array(scales)) if biases is None else (words, device(scales, dtype), device(biases, dtype))
    return weights_of(arrays, form)


def weights_of(arrays: tuple[mx.array, ...], form: Form) -> Weights:
    w, *scales = arrays
    if form.mode == "affine":
        exact = dequantised(np.array(w), host(scales[0]), host(scales[1]), form)
    else:
        exact = dequantised(np.array(w), np.array(scales[0]), None, form)
    return Weights(arrays, exact, form)


def sizes(form: Form, *, transpose: bool) -> list[tuple[int, int]]:
    """N and K that neither tiles nor warps divide, as far as groups let them."""
    group = form.group_size
    return [(203, 5 * group), (1, 17 * group)] if transpose else [(5 * group, 203), (3 * group, 1)]


def matmul(x: Array, weights: Weights, *, transpose: bool) -> Array:
    exact = weights.exact
    result: Array = x @ (np.swapaxes(exact, -1, -2) if transpose else exact)
    return result


def size_of(x: Array, weights: Weights, *, transpose: bool) -> Array:
    """How large a sum of such products is when their signs are random: what rounding errors are relative to."""
    return np.sqrt(matmul(x * x, weights._replace(exact=weights.exact**2), transpose=transpose))
