"""MLX's matmuls with a batch of quantized weights, in the one layout for which they are right on CUDA.

MLX 0.32.4 multiplies a whole batch by its first matrix if weights are broadcast (as keys that several query heads share), and has no
kernel for a batch that is a slice of another array (as the keys of a cache). So axes along which weights are broadcast become tokens of
x, which reads the weights once, and the weights become contiguous. If K is one or two tiles, its kernel reads beyond the ends of x and of
the weights, so K is padded to three. More matrices than a grid holds, or results than an int counts, are computed in parts.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from .._common.arrays import StreamOrDevice, resolve
from .._loader import native
from .._loader.replacing import Prepared, in_place_of
from .formats import FORMATS
from .rules import FEWEST_UPSTREAM_TILES, UPSTREAM_BITS, UPSTREAM_COLUMNS, UPSTREAM_TILE
from .upstream import MOST_COUNTED, MOST_MATMULS

upstream_quantized_matmul = mx.quantized_matmul  # whatever patch() puts in its place later

FEWEST_ROWS = 8  # in all, of MLX's kernel that works in tiles


@in_place_of(upstream_quantized_matmul)
def batched_quantized_matmul(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None = None, transpose: bool = True,
    group_size: int | None = None, bits: int | None = None, mode: str = "affine", *, stream: StreamOrDevice = None,
) -> Prepared | None:  # fmt: skip
    on, form = resolve(stream), (transpose, group_size, bits, mode)
    parts = [w, scales] if biases is None else [w, scales, biases]
    if on.device.type != mx.gpu or not all(isinstance(each, mx.array) for each in (x, *parts)):
        return None  # of other arrays, which our operations would take, MLX says what is wrong
    if any(part.shape[:-2] != w.shape[:-2] for part in parts):
        return None
    compute = _padded if min(x.ndim, w.ndim) < 3 else _batched
    with mx.stream(on):
        result = compute(x, parts, form)  # here, as MLX's operations in it check the rest
    return Prepared(lambda: result)


def _batched(x: mx.array, parts: list[mx.array], form: tuple[Any, ...]) -> mx.array:
    count = max(x.ndim, parts[0].ndim) - 2
    own, batch = (tuple([1] * (count + 2 - array.ndim)) + array.shape[:-2] for array in (x, parts[0]))
    biases = parts[2] if len(parts) > 2 else None
    if any(a != b and 1 not in {a, b} for a, b in zip(own, batch, strict=True)):
        return upstream_quantized_matmul(x, parts[0], parts[1], biases, *form)  # which says what is wrong
    if x.size == 0:  # a division by zero inside MLX
        values = mx.dequantize(parts[0], parts[1], biases, *form[1:])
        return x @ (values.swapaxes(-1, -2) if form[0] else values)
    lead = tuple(map(max, own, batch))
    length, inner = x.shape[-2:]
    kept = [axis for axis in range(count) if batch[axis] != 1]
    order = [*kept, *(axis for axis in range(count) if batch[axis] == 1)]
    of_kept = [lead[axis] for axis in kept]
    rows = math.prod(lead[axis] for axis in order[len(kept) :]) * length
    x = mx.broadcast_to(x.reshape(*own, length, inner), (*lead, length, inner))
    x = x.transpose(*order, count, count + 1).reshape(*of_kept, rows, inner)
    w, scales, *rest = (mx.contiguous(part.reshape(*of_kept, *part.shape[-2:])) for part in parts)
    out = _in_parts(x, [w, scales, *rest], form)
    out = out.reshape(*(lead[axis] for axis in order), length, out.shape[-1])
    return out.transpose(*(order.index(axis) for axis in range(count)), count, count + 1)


def _in_parts(x: mx.array, parts: list[mx.array], form: tuple[Any, ...]) -> mx.array:
    """Call MLX's matmul with contiguous weights in parts: it counts results in an int and matrices in a grid."""
    batch, (rows, _), columns = x.shape[:-2], x.shape[-2:], parts[0].shape[-2]
    most = max(MOST_COUNTED // (columns if form[0] else parts[0].shape[-1] * 32), 1)
    if rows > most:
        return mx.concatenate([_in_parts(x[..., at : at + most, :], parts, form) for at in range(0, rows, most)], axis=-2)
    count = math.prod(batch)
    if count <= MOST_MATMULS:
        return _padded(x, parts, form)
    x, *parts = (each.reshape(-1, *each.shape[-2:]) for each in (x, *parts))
    some = (slice(at, at + MOST_MATMULS) for at in range(0, count, MOST_MATMULS))
    out = mx.concatenate([_padded(x[of], [part[of] for part in parts], form) for of in some])
    return out.reshape(*batch, *out.shape[1:])


def _padded(x: mx.array, parts: list[mx.array], form: tuple[Any, ...]) -> mx.array:
    """Call MLX's matmul with K padded to the number of tiles that it prefetches, also for the gradient of x."""
    w, scales, *rest = parts
    transpose, _, bits, mode = form
    if bits is None and mode in FORMATS:
        bits = FORMATS[mode][1][0]
    if bits not in UPSTREAM_BITS or x.dtype == mx.float32 or x.size < FEWEST_ROWS * x.shape[-1]:
        return upstream_quantized_matmul(x, w, scales, rest[0] if rest else None, *form)
    width = w.shape[-1] * 32 // bits  # of a row of the weights: K, or that of the gradient, for which they are transposed
    tile = max(UPSTREAM_TILE, width // max(scales.shape[-1], 1))
    lacking = FEWEST_UPSTREAM_TILES * tile - width
    columns = w.shape[-2] if transpose else x.shape[-1]
    beyond = lacking > 0 and width % tile == 0 and columns % UPSTREAM_COLUMNS == 0 and (transpose or _traced(x))
    if beyond:
        w, scales, *rest = (_wider(part, part.shape[-1] * lacking // width) for part in parts)
        x = _wider(x, lacking) if transpose else x
    out = upstream_quantized_matmul(x, w, scales, rest[0] if rest else None, *form)
    return out[..., :width] if beyond and not transpose else out


def _traced(x: mx.array) -> bool:
    engine = native.engine(resolve(None))
    return not isinstance(engine, str) and engine.module.traced([x])


def _wider(array: mx.array, by: int) -> mx.array:
    """Append zeros to each row of values, or of packed weights, their scales and biases."""
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, by)])
