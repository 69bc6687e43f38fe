"""Replacements of functions: which calls they pass on to MLX, whose errors reach the caller, and for which threads they are there."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from .._common.errors import Refused
from . import native

R = TypeVar("R")

_ONE = mx.array(1.0)
# Of who replaces functions, in all threads or in its own: each restores what it has found.
alone = threading.RLock()


def in_shapeless_trace() -> bool:
    """Return whether MLX is tracing a function for arrays of any size: ``shapeless=True`` of ``mx.compile`` and of exports.

    An engine would be chosen for the sizes of the trace, so MLX's own function computes there. MLX does not report such a trace, but it
    broadcasts differently: a broadcast to the array's own shape is computed again when sizes are known.
    """
    if native.loaded is not None:
        return native.loaded.in_shapeless_trace()
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.broadcast_arrays(_ONE, _ONE)[0])
    return "Broadcast" in graph.getvalue()


class Prepared(NamedTuple):
    """A prepared call that is not of an operation."""

    result: Callable[[], Any] | None  # None: MLX's
    sizes: tuple[int, int] | None = None  # as those of a call of an operation


def in_place_of(upstream: Callable[..., R], taken: Callable[[Any], bool] | None = None) -> Callable[[Callable[..., Any]], Callable[..., R]]:
    """Decorate a function that checks and prepares a call: it replaces MLX's function. None, or a call that is not ``taken``, goes to MLX.

    If it raises, MLX's function reports what is wrong with the arguments. If MLX accepts them, either mlx-cuda supports less, which is a
    :class:`Refused`, or the error is a bug of mlx-cuda: it reaches the caller, as do all errors of the computation.
    """

    def replace(prepare: Callable[..., Any]) -> Callable[..., R]:
        def prepared(*arguments: Any, **options: Any) -> Any:
            try:
                ours = prepare(*arguments, **options)
                if taken is not None and not taken(ours):
                    ours = None
            except Exception as error:
                result = upstream(*arguments, **options)
                if isinstance(error, Refused):
                    return Prepared(lambda: result)
                raise
            if ours is None or ours.result is None or in_shapeless_trace():
                return Prepared(partial(upstream, *arguments, **options), None if ours is None else ours.sizes)
            return ours

        @wraps(upstream)
        def function(*arguments: Any, **options: Any) -> R:
            found: R = prepared(*arguments, **options).result()
            return found

        vars(function).update(vars(prepare), upstream=upstream, prepare=prepared)
        return function

    return replace


def put_in(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class, or one of a module's variables."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


@contextlib.contextmanager
def in_this_thread(functions: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace functions, given with their owners and names, for this thread; others call what was there. The caller has ``alone``."""
    threads = {threading.get_ident()}
    with contextlib.ExitStack() as before:
        before.callback(threads.clear)  # who has kept such a function calls what was there, too
        for owner, name, function in functions:
            others = owner[name] if isinstance(owner, dict) else getattr(owner, name)
            if others is not function:
                before.callback(put_in, owner, name, others)
                put_in(owner, name, _by_thread(threads, function, others))
        yield


def _by_thread(threads: set[int], function: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(others)
    def call(*arguments: Any, **options: Any) -> Any:
        return (function if threading.get_ident() in threads else others)(*arguments, **options)

    vars(call).setdefault("unpatched", others)
    return call
