"""Our operations in place of MLX's own, for programs that call the latter, such as mlx-lm."""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ._attention.attention import OURS, allow_more_keys, choose, fused, prepare
from ._attention.composed import upstream_attention
from ._common.arrays import resolve
from ._loader import native as _native
from ._loader.graph_cache import growing, natively
from ._matmul import gather as _gather
from ._matmul import grouped as _grouped
from ._matmul import quantized as _quantized

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ._common.arrays import StreamOrDevice


@growing(k=2, v=2)
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
    with contextlib.suppress(TypeError, ValueError):  # MLX says itself what is wrong with the arguments
        on = resolve(stream)
        with mx.stream(on):
            arguments = prepare(q, k, v, scale=scale, mask=mask, sinks=sinks)
            choice = choose(*arguments, on)
            allow_more_keys(choice, *arguments, None)
            if choice.engine in OURS:
                return fused(choice.engine, *arguments, on)[0]
    return upstream_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)


def _product(prepare: Callable[..., Any], upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """MLX's function of a matrix product, which leaves to us what our kernels take."""

    @wraps(upstream)
    def product(*arguments: Any, **options: Any) -> mx.array:
        with contextlib.suppress(TypeError, ValueError):  # MLX says itself what is wrong with the arguments
            call = prepare(*arguments, **options)
            if call.choice.engine in _quantized.OURS:
                result: mx.array = call.result()
                return result
        return upstream(*arguments, **options)

    return product


class Route(NamedTuple):
    """A function of MLX that is replaced: where it is, what it is called, what it is and what takes its place."""

    owner: Any
    name: str
    upstream: Callable[..., mx.array]
    ours: Callable[..., mx.array]


ROUTES = (
    Route(mx.fast, "scaled_dot_product_attention", upstream_attention, _attention),
    *(
        Route(mx, upstream.__name__, upstream, _product(prepare, upstream))
        for upstream, prepare in (
            (_quantized.upstream_quantized_matmul, _quantized.prepare),
            (_grouped.upstream_gather_mm, _gather.prepare_gather_mm),
            (_gather.upstream_gather_qmm, _gather.prepare_gather_qmm),
        )
    ),
)


class Patched:
    """What :func:`patch` returns: leaving it as a context manager brings back what was there before."""

    def __init__(self, before: tuple[Callable[..., mx.array], ...]) -> None:
        self._before = before

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for route, before in zip(ROUTES, self._before, strict=True):
            setattr(route.owner, route.name, before)


def patch() -> Patched:
    """Route functions of MLX here wherever that is faster, for all of the process.

    They are :func:`mlx.core.fast.scaled_dot_product_attention`, :func:`mlx.core.quantized_matmul`, :func:`mlx.core.gather_mm` and
    :func:`mlx.core.gather_qmm`. The layers of MLX and the models of mlx-lm call them by these names at each step, so they follow
    without a change::

        mlx_cuda.patch()  # until unpatch(), or: with mlx_cuda.patch(): ...

    Calls that no kernel of ours takes go to MLX's own function, with the arguments as they are. A program that holds on to the
    function itself (``from mlx.core import quantized_matmul``) has to be patched before it does.
    """
    if mx.cuda.is_available():
        _native.load()
    patched = Patched(tuple(getattr(route.owner, route.name) for route in ROUTES))
    for route in ROUTES:
        setattr(route.owner, route.name, natively(route.ours))
    return patched


def unpatch() -> None:
    """Bring MLX's own functions back; nothing happens where they are there."""
    for route in ROUTES:
        setattr(route.owner, route.name, route.upstream)
