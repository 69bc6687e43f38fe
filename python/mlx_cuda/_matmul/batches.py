"""MLX's products with a batch of quantised weights, brought into the one layout for which they are right on CUDA.

MLX 0.32.4 multiplies all of a batch with its first matrix where weights are broadcast, as keys are that several heads of queries share,
and has no kernel for a batch that is part of another array, as the keys of a cache are. So axes along which weights are broadcast become
rows of x, which reads the weights once, and the weights become contiguous.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .._common.arrays import resolve
from .._loader.replacing import in_place_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._common.arrays import StreamOrDevice

upstream_quantized_matmul = mx.quantized_matmul  # whatever patch() puts in its place later


@in_place_of(upstream_quantized_matmul)
def product_of_batches(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: StreamOrDevice = None,
) -> Callable[[], mx.array] | None:
    on = resolve(stream)
    parts = [w, scales] if biases is None else [w, scales, biases]
    if on.device.type != mx.gpu or min(x.ndim, w.ndim) < 3 or any(part.shape[:-2] != w.shape[:-2] for part in parts):
        return None
    with mx.stream(on):
        product = _product(x, parts, (transpose, group_size, bits, mode))  # here, as MLX's operations in it check the rest
    return lambda: product


def _product(x: mx.array, parts: list[mx.array], form: tuple[Any, ...]) -> mx.array:
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
    out = upstream_quantized_matmul(x, w, scales, rest[0] if rest else None, *form)
    out = out.reshape(*(lead[axis] for axis in order), length, out.shape[-1])
    return out.transpose(*(order.index(axis) for axis in range(count)), count, count + 1)
