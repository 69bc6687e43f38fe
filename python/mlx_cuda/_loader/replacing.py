"""Functions that stand in for MLX's: which calls they leave to it, and whose errors reach the caller."""

from __future__ import annotations

import io
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from .._common.errors import Refused
from . import native

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

_ONE = mx.array(1.0)


def in_shapeless_trace() -> bool:
    """Whether MLX is tracing a function for arrays of any size: ``shapeless=True`` of ``mx.compile`` and of exports.

    What we choose is chosen for the sizes of the trace, so there MLX's own function computes. Of the trace itself MLX tells nothing, but
    it broadcasts otherwise: what is broadcast to its own shape is computed once more when sizes are known.
    """
    if native.loaded is not None:
        return native.loaded.in_shapeless_trace()
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.broadcast_arrays(_ONE, _ONE)[0])
    return "Broadcast" in graph.getvalue()


def in_place_of(upstream: Callable[..., R]) -> Callable[[Callable[..., Callable[[], R] | None]], Callable[..., R]]:
    """Decorate what checks a call's arguments and returns what computes it, or None to leave it to this function.

    Where it raises, that function says what is wrong with the arguments. If nothing is, either our operation takes less than MLX's, which
    :class:`Refused` says, or the error is a fault of ours: it reaches the caller, as do all errors of what computes the call.
    """

    def replace(prepare: Callable[..., Callable[[], R] | None]) -> Callable[..., R]:
        @wraps(upstream)
        def function(*arguments: Any, **options: Any) -> R:
            try:
                compute = prepare(*arguments, **options)
            except Exception as error:
                result = upstream(*arguments, **options)
                if isinstance(error, Refused):
                    return result
                raise
            if compute is None or in_shapeless_trace():
                return upstream(*arguments, **options)
            return compute()

        vars(function).update(vars(prepare), upstream=upstream)
        return function

    return replace
