"""Calls of the native kernels, and their derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from .._common.gradients import with_gradients
from .._loader import native
from .backward import gradients
from .composed import composed

if TYPE_CHECKING:
    from .rules import Call

upstream_gated_delta = mx.fast.gated_delta_update


def fused(call: Call, stream: mx.Stream, *, delta: bool, chunked: bool) -> tuple[mx.array, mx.array]:
    """y, and the state after the last token; with derivatives of a composition where somebody may ask for them."""
    module = native.module(stream)

    def forward(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        own = call.with_arrays(arrays)
        y, state = module.linear_attention(*own, delta, chunked, stream)
        return y if own.offsets is None else mx.where(_inside(own)[None, :, None, None], y, 0), state  # it writes no other rows

    def backward(primals: tuple[mx.array, ...], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        if chunked:
            return gradients(call.with_arrays(primals), cotangents, delta=delta)
        floats = [each for each in primals if mx.issubdtype(each.dtype, mx.floating)]
        others = list(primals[len(floats) :])
        slopes = mx.vjp(lambda *arrays: list(unfused(call.with_arrays([*arrays, *others]), delta=delta)), floats, list(cotangents))[1]
        return [*slopes, *map(mx.zeros_like, others)]

    arrays = call.arrays()
    return with_gradients(forward, backward)(*arrays) if module.traced(arrays) else forward(*arrays)


def unfused(call: Call, *, delta: bool) -> tuple[mx.array, mx.array]:
    """The same of MLX's operations: by chunks, or where channels have decays of their own by MLX's function, which loops over time.

    Packed sequences are a batch of all tokens, each entry of which sees its own.
    """
    if call.offsets is not None:
        token, sequences = mx.arange(call.v.shape[1]), call.sequences
        own = (token >= call.offsets[:-1, None]) & (token < call.offsets[1:, None])
        q, k, v, g, beta = (mx.broadcast_to(each, (sequences, *each.shape[1:])) for each in call[:5])
        mask = own if call.mask is None else own & call.mask
        y, state = unfused(call._replace(q=q, k=k, v=v, g=g, beta=beta, mask=mask, offsets=None), delta=delta)
        return y.sum(axis=0, keepdims=True).astype(y.dtype), state
    if call.g.ndim == 3:
        return composed(call, delta=delta)
    return by_upstream(call)


def by_upstream(call: Call) -> tuple[mx.array, mx.array]:
    """The gated delta rule by MLX's own function."""
    q, k, v, g, beta, state, mask, _ = call
    y, state = upstream_gated_delta(q, k, v, g, beta, state, mask)
    return y.astype(v.dtype), state


def _inside(call: Call) -> mx.array:
    """Which tokens belong to a sequence."""
    token = mx.arange(call.v.shape[1])
    assert call.offsets is not None  # noqa: S101
    return (token >= call.offsets[0]) & (token < call.offsets[-1])
