"""Our attention in place of MLX's own, for programs that call the latter, such as mlx-lm."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import mlx.core as mx

from . import _native
from ._arrays import resolve
from ._attention import _choose, _prepare, fused
from ._composed import upstream_attention

if TYPE_CHECKING:
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
    if _native.loaded is not None and sinks is None and (mask is None or mask.__class__ is str):
        again = None
        with contextlib.suppress(TypeError):  # a device as stream, or no array
            again = _native.loaded.attention_again(q, k, v, scale, mask == "causal", stream)
        if again is not None and mask in (None, "causal"):
            return again
    with contextlib.suppress(TypeError, ValueError):  # MLX says itself what is wrong with the arguments
        on = resolve(stream)
        with mx.stream(on):
            arguments = _prepare(q, k, v, scale, mask, None, None, sinks, None, None)
            choice = _choose(*arguments, on)
            if choice.engine in ("decode", "cudnn"):
                return fused(choice.engine, *arguments, on)
    return upstream_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)


class Patched:
    """What :func:`patch` returns: leaving it as a context manager brings MLX's own function back."""

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        unpatch()


def patch() -> Patched:
    """Route :func:`mlx.core.fast.scaled_dot_product_attention` here wherever that is faster, for all of the process.

    mlx-lm's models call it by that name at each step, so they follow without a change::

        mlx_cuda.patch()  # until unpatch(), or: with mlx_cuda.patch(): ...

    Calls that no fused kernel of ours takes go to MLX's own function, with the arguments as they are.
    """
    mx.fast.scaled_dot_product_attention = _attention
    return Patched()


def unpatch() -> None:
    """Bring MLX's own function back; nothing happens where it is there."""
    mx.fast.scaled_dot_product_attention = upstream_attention
