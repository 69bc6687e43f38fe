"""How quantised weights lie in memory, and what they mean: numpy in float64, and nothing else, as worker processes need it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
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


def _e4m3() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[(codes & 127) == 127] = np.nan
    result: Array = np.where(codes & 128, -values, values)
    return result


_E4M3 = _e4m3()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: NDArray[np.uint8]) -> Array:
    """The numbers that the codes stand for; NaN for 0x7f and 0xff."""
    return _E4M3[codes]


def spread(scales: Array, shape: tuple[int, ...], axis: int | str | None) -> Array:
    """The scale of each of 8-bit numbers ``[…, K]``, by the axis of ``quantize_fp8``; other names than those of blocks broadcast."""
    if axis == "block128x128":
        scales = scales.repeat(128, axis=0)[: shape[0]]
    if isinstance(axis, str) and axis.startswith("block"):
        scales = scales.repeat(128, axis=-1)[..., : shape[-1]]
    return np.broadcast_to(scales, shape)


def unpacked(w: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """The codes in rows of words: one stream of bits, the lowest first, in which 8 codes are a whole number of bytes."""
    packed = np.ascontiguousarray(w).view(np.uint8).reshape(*w.shape[:-1], -1, bits)
    words = np.zeros((*packed.shape[:-1], 8), np.uint8)
    words[..., :bits] = packed
    codes = words.view("<u8") >> (np.arange(8, dtype=np.uint64) * np.uint64(bits))
    result: NDArray[np.uint8] = (codes & np.uint64(2**bits - 1)).astype(np.uint8).reshape(*w.shape[:-1], -1)
    return result


def dequantised(w: NDArray[np.uint32], scales: NDArray[Any], biases: NDArray[Any] | None, form: Form) -> Array:
    """The weights in float64, ``[…, numbers]``."""
    codes = unpacked(w, form.bits)
    groups: NDArray[Any] = codes.reshape(*codes.shape[:-1], -1, form.group_size)
    each: NDArray[Any] = scales[..., None]
    values: Array
    if biases is not None:
        values = groups * each.astype(np.float64)
        values += biases[..., None]
    else:
        values = (_E4M3 if form.bits == 8 else _E2M1)[groups]
        values *= _E4M3[each] if form.mode == "nvfp4" else 2.0 ** (each.astype(np.float64) - 127)
    return values.reshape(codes.shape)


def random_words(rng: np.random.Generator, shape: tuple[int, ...], form: Form) -> NDArray[np.uint32]:
    """Of weights ``[…, numbers]``: every pattern of bits, but for e4m3's NaN."""
    words = rng.integers(0, 2**32, (*shape[:-1], shape[-1] * form.bits // 32), dtype=np.uint32)
    if form.mode != "mxfp8":
        return words
    numbers = words.view(np.uint8)
    return np.where((numbers & 127) == 127, numbers ^ 1, numbers).view(np.uint32)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], form: Form) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Scales and biases of weights ``[…, numbers]``, neither rounded to a dtype yet."""
    groups = (*shape[:-1], shape[-1] // form.group_size)
    if form.mode != "affine":  # from 2^-12 on; e8m0 up to 2^-2, e4m3 up to 2
        low, high = (115, 126) if form.mode != "nvfp4" else (8, 64)
        return rng.integers(low, high, groups, dtype=np.uint8), None
    scales = rng.uniform(0.001, 0.02, groups)
    return scales, -scales * (2**form.bits - 1) * rng.uniform(0.2, 0.8, groups)
