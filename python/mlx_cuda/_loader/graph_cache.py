"""The dispatch cache: calls whose graph follows from the properties of their arguments, so that Python builds it only once.

Checks and rules cost microseconds per call, more than MLX's own operations. The native module stores the nodes that a call added to MLX's
graph, and adds the same for later calls of equal shapes, dtypes, options and stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from . import native

P = ParamSpec("P")
R = TypeVar("R")
Operation = TypeVar("Operation", bound="Callable[..., Any]")

MOST = 2**31 - 1  # elements of an axis


def cached(operation: Callable[P, R]) -> Callable[P, R]:
    """Cache a function with a ``prepare`` that returns an array or a tuple of arrays, once the native module is loaded."""
    module: Any = None
    call: Callable[..., R] = operation
    prepare = vars(operation)["prepare"]

    @wraps(operation)
    def by_way(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal module, call
        if native.loaded is not module:
            call = natively(operation)
            module = native.loaded
        if module is None:
            result: R = prepare(*arguments, **options).result()
            return result
        return call(*arguments, **options) if options else call(*arguments)  # without another dict for no options

    return by_way


def growing(**axes: int) -> Callable[[Operation], Operation]:
    """Cache calls together that differ only in the size of these axes of their arrays, such as the number of keys.

    An axis of another size in the same call makes the graph valid for that size only, or for the ``sizes`` of the prepared call.
    """

    def mark(operation: Operation) -> Operation:
        places = inspect.unwrap(operation).__code__.co_varnames
        vars(operation)["growing"] = [(places.index(name), name, axis) for name, axis in axes.items()]
        return operation

    return mark


def natively(operation: Callable[P, R]) -> Callable[P, R]:
    """Return the operation as a function of the native module, if it is loaded: it calls Python only on a cache miss."""
    module: Any = native.loaded
    return operation if module is None else _by(module, operation)


@cache
def _by(module: Any, operation: Any) -> Any:
    marks = vars(operation)
    return module.cached(operation, marks.get("growing", []), *map(marks.get, ("of_batches", "upstream", "prepare")))
