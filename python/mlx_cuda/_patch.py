"""Our attention in place of MLX's own, for programs that call the latter, such as mlx-lm."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import mlx.core as mx

from . import _native
from ._arrays import resolve
from ._attention import OURS, choose, fused, prepare, remember
from ._composed import upstream_attention

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ._arrays import StreamOrDevice


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """:func:`mlx.core.fast.scaled_dot_product_attention`, computed by mlx_cuda where that is faster.

    Like :func:`mlx_cuda.attention`, it gives zeros to a query that sees no key.
    """
    again: mx.array | None = None
    try:
        if _native.loaded is not None:
            again = _native.loaded.attention_again(q, k, v, scale, mask, None, None, sinks, None, None, False, False, force_fused, stream)
    except TypeError:  # what MLX refuses
        again = None
    if again is not None:
        return again
    with contextlib.suppress(TypeError, ValueError):  # MLX says itself what is wrong with the arguments
        on = resolve(stream)
        with mx.stream(on):
            arguments = prepare(q, k, v, scale, mask, None, None, sinks)
            choice = choose(*arguments, on)
            remember(choice, (q, k, v, scale, mask, None, None, sinks, None, None, False, False, force_fused), on)
            if choice.engine in OURS:
                return fused(choice.engine, *arguments, on)[0]
    return upstream_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)


class Patched:
    """What :func:`patch` returns: leaving it as a context manager brings back what was there before."""

    def __init__(self, before: Callable[..., mx.array]) -> None:
        self._before = before

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        mx.fast.scaled_dot_product_attention = self._before


def patch() -> Patched:
    """Route :func:`mlx.core.fast.scaled_dot_product_attention` here wherever that is faster, for all of the process.

    mlx-lm's wrapper, and its models that do without it, call it by that name at each step, so they follow without a change::

        mlx_cuda.patch()  # until unpatch(), or: with mlx_cuda.patch(): ...

    Calls that no fused kernel of ours takes go to MLX's own function, with the arguments as they are. A program that holds on to the
    function itself (``from mlx.core.fast import scaled_dot_product_attention``) has to be patched before it does.
    """
    patched = Patched(mx.fast.scaled_dot_product_attention)
    mx.fast.scaled_dot_product_attention = _attention
    return patched


def unpatch() -> None:
    """Bring MLX's own function back; nothing happens where it is there."""
    mx.fast.scaled_dot_product_attention = upstream_attention
