"""Formats of quantized weights, and checks of their parts."""

from __future__ import annotations

from operator import index
from typing import NamedTuple, SupportsIndex, TypeAlias

import mlx.core as mx

from .._common.arrays import Shape, dense_dtype, dtype_text, require_flags, shape_text, value_text
from .._common.choice import dtype_name
from .._common.errors import WrongType, WrongValue

Spec: TypeAlias = tuple[Shape, mx.Dtype]
Parts: TypeAlias = tuple[Spec, Spec, Spec | None]  # of weights: numbers, scales and biases

FORMATS = {  # mode: group sizes and bits, the defaults first
    "affine": ((64, 32, 128), (4, 1, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


class Format(NamedTuple):
    """The format of quantized weights, in the order of the functions' arguments."""

    group_size: int
    bits: int
    mode: str


def spec(array: mx.array | None) -> Spec | None:
    """Return the properties of an array that a plan needs."""
    return None if array is None else (array.shape, array.dtype)


def require_options(operation: str, transpose: object, group_size: object, bits: object, mode: object) -> None:
    """Raise a TypeError that names the first option with a type that MLX's function does not accept."""
    require_flags(operation, transpose=transpose)
    for name, value in (("group_size", group_size), ("bits", bits)):
        if value is not None and (not isinstance(value, SupportsIndex) or isinstance(value, mx.array)):
            raise WrongType(f"[{operation}] {name} must be an integer or None, got {value_text(value)}.")
    if not isinstance(mode, str):
        raise WrongType(f"[{operation}] mode must be a string, got {value_text(mode)}.")


def weights(operation: str, parts: Parts, transpose: bool, group_size: int | None, bits: int | None, mode: str) -> tuple[Format, int, int]:
    """Check the parts of quantized weights, and return their format and the sizes n and k."""
    require_options(operation, transpose, group_size, bits, mode)
    if mode not in FORMATS:
        raise WrongValue(f"[{operation}] mode must be one of {', '.join(map(repr, FORMATS))}, got {mode!r}.")
    groups, widths = FORMATS[mode]
    form = Format(groups[0] if group_size is None else index(group_size), widths[0] if bits is None else index(bits), mode)
    if form.group_size not in groups or form.bits not in widths:
        takes = f"group_size {_either(groups)} and bits {_either(widths)}"
        raise WrongValue(f"[{operation}] Mode {mode!r} takes {takes}, got {form.group_size} and {form.bits}.")
    w, scales, biases = parts
    packed, held = w[0], scales[0]
    shapes = shape_text(packed, held)
    if w[1] != mx.uint32:
        raise WrongValue(f"[{operation}] w must be packed in uint32, got {dtype_name(w[1])}.")
    if mode == "affine":
        if biases is None:
            raise WrongValue(f"[{operation}] Mode 'affine' needs biases, got None.")
        if not mx.issubdtype(mx.result_type(scales[1], biases[1]), mx.floating):
            raise WrongValue(f"[{operation}] scales and biases must be of floating types, got {dtype_text(scales[1], biases[1])}.")
        if biases[0] != held:
            raise WrongValue(f"[{operation}] scales and biases must have the same shape, got {shape_text(held, biases[0])}.")
    elif biases is not None:
        raise WrongValue(f"[{operation}] Mode {mode!r} has no biases, got some of the shape {shape_text(biases[0])}.")
    elif scales[1] != mx.uint8:
        raise WrongValue(f"[{operation}] scales of mode {mode!r} must be uint8, got {dtype_name(scales[1])}.")
    if len(packed) < 2 or packed[:-1] != held[:-1]:
        raise WrongValue(f"[{operation}] w and scales must agree in all of 2 or more dimensions but the last, got {shapes}.")
    columns = packed[-1] * 32 // form.bits
    if columns != held[-1] * form.group_size:
        raise WrongValue(
            f"[{operation}] w and scales do not belong together with group_size={form.group_size} and bits={form.bits}: {columns} numbers "
            f"and {held[-1]} scales in a row, got {shapes}."
        )
    return (form, packed[-2], columns) if transpose else (form, columns, packed[-2])


def computed_in(operation: str, x: Spec, scales: Spec, biases: Spec | None) -> mx.Dtype:
    """Return the dtype of the result; raise an error if MLX does not compute in it."""
    return dense_dtype(operation, x[1] if biases is None else mx.result_type(x[1], mx.result_type(scales[1], biases[1])))


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, sorted(numbers)))
