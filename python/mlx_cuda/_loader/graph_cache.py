"""Operations whose graph follows from what their arguments look like, so that Python has to build it only once.

Checking arguments and asking rules costs microseconds a call, more than MLX takes for its own operations. The native module keeps what a
call added to MLX's graph, and adds the same for a later one of equal shapes, dtypes, options and stream.
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
    """What has a ``prepare`` and gives an array or a tuple of them, by way of the native module once that is loaded."""
    module: Any = None
    call, prepare = operation, vars(operation)["prepare"]

    @wraps(operation)
    def by_way(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal module, call
        if native.loaded is not module:
            call = natively(operation)
            module = native.loaded
        result: R = prepare(*arguments, **options).result() if module is None else call(*arguments, **options)
        return result

    return by_way


def growing(**axes: int) -> Callable[[Operation], Operation]:
    """Have calls cached together that differ only in the size of these axes of their arrays, such as the number of keys.

    Where they have one size in a call, the graph is taken to hold for that size alone, or for the ``sizes`` that a prepared call says.
    """

    def mark(operation: Operation) -> Operation:
        places = inspect.unwrap(operation).__code__.co_varnames
        vars(operation)["growing"] = [(places.index(name), name, axis) for name, axis in axes.items()]
        return operation

    return mark


def natively(operation: Callable[P, R]) -> Callable[P, R]:
    """The operation as a function of the native module, if that is loaded: it calls Python only for what is not in its cache."""
    module: Any = native.loaded
    return operation if module is None else _by(module, operation)


@cache
def _by(module: Any, operation: Any) -> Any:
    marks = vars(operation)
    return module.cached(operation, marks.get("growing", []), *map(marks.get, ("of_batches", "upstream", "prepare")))
