"""Quantised weights of every form, and what they mean: numpy in float64, unpacked bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reference import Array


class Form(NamedTuple):
    """How weights are quantised."""

    mode: str
    bits: int
    group_size: int

    @property
    def options(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        return f"{self.mode}-{self.bits}-g{self.group_size}"


AFFINE = [Form("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMS = [*AFFINE, Form("mxfp4", 4, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)]
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65, 512, 1000)

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Weights(NamedTuple):
    """What ``mx.quantize`` gives, and what it means."""

    arrays: tuple[Any, ...]  # w, scales and, for affine ones, biases
    exact: Array
    form: Form

    @property
    def options(self) -> dict[str, Any]:
        return self.form.options


def e4m3(codes: NDArray[np.uint8]) -> Array:
    """The numbers that the codes stand for; NaN for 0x7f and 0xff."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[(codes & 127) == 127] = np.nan
    result: Array = np.where(codes & 128, -values, values)
    return result


def unpacked(w: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """The codes in rows of words: one stream of bits, the lowest first."""
    stream = np.unpackbits(np.ascontiguousarray(w).view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*w.shape[:-1], -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def dequantised(arrays: tuple[mx.array, ...], form: Form) -> Array:
    """The weights in float64, ``[…, numbers]``."""
    codes = unpacked(np.array(arrays[0]), form.bits)
    if form.mode == "affine":
        scales, biases = (np.array(a.astype(mx.float32)).astype(np.float64) for a in arrays[1:])
        affine: Array = codes.astype(np.float64) * np.repeat(scales, form.group_size, axis=-1) + np.repeat(biases, form.group_size, axis=-1)
        return affine
    raw = np.array(arrays[1])
    scales = e4m3(raw) if form.mode == "nvfp4" else 2.0 ** (raw.astype(np.float64) - 127)
    values = e4m3(codes.astype(np.uint8)) if form.bits == 8 else np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    result: Array = values * np.repeat(scales, form.group_size, axis=-1)
    return result


def draw(rng: np.random.Generator, shape: tuple[int, ...], form: Form, dtype: mx.Dtype) -> Weights:
    """Random weights ``[…, numbers]`` in this form; affine scales and biases are of the dtype."""
    dense = mx.array((rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)).astype(dtype)
    # Twice, because on the CPU MLX quantises to nvfp4 only what fills 32 numbers.
    arrays = tuple(mx.contiguous(array[0]) for array in mx.quantize(mx.stack([dense, dense]), **form.options))
    mx.eval(arrays)
    return Weights(arrays, dequantised(arrays, form), form)


def sizes(form: Form, *, transpose: bool) -> list[tuple[int, int]]:
    """N and K that neither tiles nor warps divide, as far as groups let them."""
    group = form.group_size
    return [(203, 5 * group), (1, 64 * group)] if transpose else [(5 * group, 203), (3 * group, 1)]


def product(x: Array, weights: Weights, *, transpose: bool) -> Array:
    exact = weights.exact
    result: Array = x @ (np.swapaxes(exact, -1, -2) if transpose else exact)
    return result


def size_of(x: Array, weights: Weights, *, transpose: bool) -> Array:
    """How large a sum of such products is when their signs are random: what rounding errors are relative to."""
    return np.sqrt(product(x * x, weights._replace(exact=weights.exact**2), transpose=transpose))
