"""Operations whose graph follows from what their arguments look like, so that Python has to build it only once.

Checking arguments and asking rules costs microseconds a call, more than MLX takes for its own operations. The native module keeps what a
call added to MLX's graph, and adds the same for a later one of equal shapes, dtypes, options and stream.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from . import native as _native

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

P = ParamSpec("P")


def remembered(operation: Callable[P, mx.array]) -> Callable[P, mx.array]:
    """The operation, by way of the native module once that is loaded."""
    module, answer = None, operation

    @wraps(operation)
    def call(*arguments: P.args, **options: P.kwargs) -> mx.array:
        nonlocal module, answer
        if _native.loaded is not module:
            answer = natively(operation)
            module = _native.loaded
        return answer(*arguments, **options)

    return call


def natively(operation: Callable[P, mx.array]) -> Callable[P, mx.array]:
    """The operation as a function of the native module, if that is loaded: it asks Python only what it does not remember."""
    module: Any = _native.loaded
    return operation if module is None else _by(module, operation)


@cache
def _by(module: Any, operation: Callable[..., mx.array]) -> Any:
    return module.remembered(operation)
