"""Calls of linear attention, computed by the native kernels, with their gradients, or by MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .._common.choice import Choice
from .._common.gradients import with_gradients
from .._loader import native
from .._operation import Call as AnyCall
from .backward import gradients
from .composed import composed
from .rules import Call

RESULTS = "tuple[mx.array, mx.array]"

upstream_gated_delta = mx.fast.gated_delta_update


@dataclass(slots=True)
class LinearAttentionCall(AnyCall[tuple[mx.array, mx.array]]):
    """A call of linear attention: y and the final state."""

    arrays: Call
    choice: Choice
    stream: mx.Stream
    delta: bool  # by the gated delta rule
    through: mx.array | None = None  # how much of v is added to y

    def result(self) -> tuple[mx.array, mx.array]:
        call, engine, on, delta = self.arrays, self.choice.engine, self.stream, self.delta
        with mx.stream(on):
            if engine != "mlx":
                y, state = fused(call, on, delta=delta, chunked=engine == "chunked")
            elif 0 in (*call.v.shape, call.sequences, call.k.shape[3]):
                shape = (call.sequences, *call.v.shape[2:], call.k.shape[3])
                y, state = mx.zeros(call.v.shape, call.v.dtype), mx.zeros(shape, mx.float32) if call.state is None else call.state
            else:
                y, state = by_upstream(call) if delta and call.offsets is None else unfused(call, delta=delta)
            return (y if self.through is None else y + call.v * self.through[:, None]), state


def fused(call: Call, stream: mx.Stream, *, delta: bool, chunked: bool) -> tuple[mx.array, mx.array]:
    """Return y and the final state, with the gradients of the fallback if they may be needed."""
    module = native.module(stream)

    def forward(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        own = call.with_arrays(arrays)
        y, state = module.linear_attention(*own, delta, chunked, stream)
        return y if own.offsets is None else mx.where(_inside(own)[None, :, None, None], y, 0), state  # it writes no other rows

    def compose(arrays: Sequence[mx.array], cotangents: Sequence[mx.array]) -> list[mx.array]:
        with mx.stream(stream):
            return derived(call.with_arrays(arrays), cotangents, delta=delta)

    def backward(primals: tuple[mx.array, ...], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        if not chunked:
            return compose(primals, cotangents)
        arrays, given = [*primals, *cotangents], len(primals)

        def by_kernels(*arrays: mx.array) -> list[mx.array]:
            derived = gradients(call.with_arrays(arrays[:given]), arrays[given:], module, stream, delta=delta)
            return by_composition(*arrays) if derived is None else derived

        def by_composition(*arrays: mx.array) -> list[mx.array]:
            return compose(arrays[:given], arrays[given:])

        def again(arrays: tuple[mx.array, ...], derived: list[mx.array], _: list[mx.array]) -> list[mx.array]:
            with mx.stream(stream):
                return of_floats(by_composition, arrays, derived)

        def forwards(arrays: tuple[mx.array, ...], tangents: Sequence[mx.array | None]) -> list[mx.array]:
            with mx.stream(stream):
                moved = [mx.zeros_like(each) if tangent is None else tangent for each, tangent in zip(arrays, tangents, strict=True)]
                return mx.jvp(by_composition, list(arrays), moved)[1]

        return with_gradients(by_kernels, again, forwards)(*arrays) if module.traced(arrays) else by_kernels(*arrays)

    arrays = call.arrays()
    return with_gradients(forward, backward)(*arrays) if module.traced(arrays) else forward(*arrays)


def derived(call: Call, cotangents: Sequence[mx.array], *, delta: bool) -> list[mx.array]:
    """Return the gradients of all arrays of a call, as MLX derives them from the fallback."""
    return of_floats(lambda *arrays: list(unfused(call.with_arrays(arrays), delta=delta)), call.arrays(), cotangents)


def of_floats(function: Callable[..., list[mx.array]], arrays: Sequence[mx.array], cotangents: Sequence[mx.array]) -> list[mx.array]:
    """Return the gradients, with zeros for masks and offsets."""
    which = [i for i, each in enumerate(arrays) if mx.issubdtype(each.dtype, mx.floating)]
    derived = [mx.zeros_like(each) for each in arrays]

    def of_some(*floats: mx.array) -> list[mx.array]:
        own = list(arrays)
        for i, each in zip(which, floats, strict=True):
            own[i] = each
        return function(*own)

    for i, one in zip(which, mx.vjp(of_some, [arrays[i] for i in which], list(cotangents))[1], strict=True):
        derived[i] = one
    return derived


def unfused(call: Call, *, delta: bool) -> tuple[mx.array, mx.array]:
    """Compute a call by MLX's operations: in chunks, or with one decay per channel by MLX's function, which loops over time.

    Packed sequences become a batch of all tokens, each entry of which is masked to its own.
    """
    if call.offsets is not None:
        token, sequences = mx.arange(call.v.shape[1]), call.sequences
        own = mx.logical_and(token >= call.offsets[:-1, None], token < call.offsets[1:, None])
        q, k, v, g, beta = (mx.broadcast_to(each, (sequences, *each.shape[1:])) for each in call[:5])
        mask = own if call.mask is None else mx.logical_and(own, call.mask)
        y, state = unfused(call._replace(q=q, k=k, v=v, g=g, beta=beta, mask=mask, offsets=None), delta=delta)
        return y.sum(axis=0, keepdims=True).astype(y.dtype), state
    if call.g.ndim == 3:
        return composed(call, delta=delta)
    return by_upstream(call)


def by_upstream(call: Call) -> tuple[mx.array, mx.array]:
    """Call MLX's own gated delta rule."""
    q, k, v, g, beta, state, mask, _ = call
    y, state = upstream_gated_delta(q, k, v, g, beta, state, mask)
    return y.astype(v.dtype), state


def _inside(call: Call) -> mx.array:
    """Return which tokens belong to a sequence."""
    token = mx.arange(call.v.shape[1])
    assert call.offsets is not None  # noqa: S101
    return mx.logical_and(token >= call.offsets[0], token < call.offsets[-1])
