"""Methods of mlx-lm's cache classes that are replaced while steps are captured, until MLX is unpatched.

A cache stays an object of its class. Saved, copied and quantized data excludes unused rows of a captured step's memory. A paged batch
cache has none of its own attributes, but page numbers: when sequences join or leave, lists change and nothing is copied. Any other access
gives it its own arrays first.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from .._replay.errors import NotReplayed
from .._replay.pool import Held
from .._replay.sequences import PAGE, STATE, is_in_pages
from .._replay.step import without_spare_rows
from .caches import BATCHED_NAMES, Replaced, kind_of
from .pages import content_of, has_rows, places_of, settle

IN_PAGES = {*BATCHED_NAMES, Replaced.name}  # the classes whose objects may be
CONTENT = ("keys", "values", "cache")  # the names of what a cache holds
_ABSENT = object()
_own: dict[tuple[type, str], Any] = {}  # what classes had themselves instead of mlx-cuda
_adapted: set[type] = set()
_lock = threading.RLock()
_entered: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that are paged, or were


def hold(caches: list[Any], held: Held) -> None:
    """Let the caches of all layers refer to this; they write the next row."""
    for sequence, length in zip(held.sequences, held.lengths, strict=True):
        sequence.rows = max(sequence.rows, length)
    for layer, cache in enumerate(caches):
        if is_in_pages(cache):
            change(cache, held)
        else:
            _enter(cache, held, layer)
    held.pool.batches.add(caches[0])
    held.pool.states.end()


def change(cache: Any, held: Held) -> None:
    vars(cache)[STATE] = (held, *vars(cache)[STATE][1:])


def _enter(cache: Any, held: Held, layer: int) -> None:
    """Make a cache paged, without its own arrays."""
    adapt(type(cache))
    _entered.add(cache)
    rest = {name: None if name in CONTENT else value for name, value in vars(cache).items()}
    vars(cache)[STATE] = (held, layer, rest)
    for name in rest:
        del vars(cache)[name]
    if held.pool.states.like[layer]:
        with held.pool.states.lock:
            held.pool.replaced.add(cache)


def adapt(cls: Any) -> None:
    """Replace the methods of a cache class of mlx-lm."""
    if cls in _adapted:
        return
    makers: dict[str, Callable[[Any], Any]] = {"__getstate__": _getstate, "state": _state, "to_quantized": _to_quantized}
    if cls.__name__ in IN_PAGES:
        makers |= {"__getattr__": _getattr, "__setattr__": _setattr, "nbytes": _nbytes, "empty": _empty}
        makers |= {"filter": _filter, "extend": _extend, "extract": _extract}
    with _lock:
        for name, make in makers.items():
            own = _own.setdefault((cls, name), vars(cls).get(name, _ABSENT))
            if vars(cls).get(name, _ABSENT) is own and (hasattr(cls, name) or name in {"__getstate__", "__getattr__"}):
                setattr(cls, name, make(getattr(cls, name, None)))
        _adapted.add(cls)


def restore() -> None:
    """Restore the methods of the classes, except those with a cache that is still paged."""
    with _lock:
        kept = {type(cache) for cache in list(_entered) if is_in_pages(cache)}
        _adapted.intersection_update(kept)
        for cls, name in [each for each in _own if each[0] not in kept]:
            own = _own.pop((cls, name))
            if own is not _ABSENT:
                setattr(cls, name, own)
            elif name in vars(cls):
                delattr(cls, name)


def attributes(cache: Any) -> dict[str, Any]:
    """Return the attributes of a cache; arrays only have the used rows."""
    if is_in_pages(cache):
        held, layer, rest = vars(cache)[STATE]
        return content_of(held, layer, rest)
    with contextlib.suppress(NotReplayed):  # of a program's own class, that is made of mlx-lm's
        kind = kind_of(cache)
        if (arrays := without_spare_rows(kind, cache)) is not None:
            other = object.__new__(type(cache))
            vars(other).update(vars(cache))
            kind.give(other, arrays)
            cache = other
    found: dict[str, Any] = vars(cache).copy()
    return found


def _saved(cache: Any) -> Any:
    """Return a cache with these contents."""
    other = object.__new__(type(cache))
    vars(other).update(attributes(cache))
    return other


def _getstate(_: Any) -> Any:
    """Return the state for pickling and copying."""
    return attributes


def _state(own: Any) -> Any:
    """Return the state that mlx-lm saves."""
    return property(lambda cache: own.fget(_saved(cache)), own.fset)


def _to_quantized(own: Any) -> Any:
    return wraps(own)(lambda cache, *arguments, **options: own(_saved(cache), *arguments, **options))


def _getattr(_: Any) -> Any:
    def read(cache: Any, name: str) -> Any:
        held, _, rest = vars(cache).get(STATE) or (None, 0, {})
        if held is None or name not in rest:
            return object.__getattribute__(cache, name)  # it raises, unless another thread was faster
        return getattr(settle(cache), name) if name in CONTENT else (rest | places_of(held, rest))[name]

    return read


def _setattr(own: Any) -> Any:
    return lambda cache, name, value: own(settle(cache) if is_in_pages(cache) else cache, name, value)


def _nbytes(own: Any) -> Any:
    def nbytes(cache: Any) -> int:
        """Return the size of its own arrays."""
        if not is_in_pages(cache):
            return int(own.fget(cache))
        held, layer, _ = vars(cache)[STATE]
        if like := held.pool.states.like[layer]:
            return sum(len(held.sequences) * math.prod(shape) * dtype.size for shape, dtype in like)
        rows = PAGE * sum(len(sequence.pages[held.pool.places[layer]]) for sequence in held.sequences)
        return sum(rows * heads * dim * dtype.size for heads, dim, dtype in held.pool.like[layer])

    return property(nbytes)


def _empty(own: Any) -> Any:
    return wraps(own)(lambda cache: not is_in_pages(cache) and own(cache))


def _filter(own: Any) -> Any:
    @wraps(own)
    def call(cache: Any, batch_indices: Any) -> None:
        if is_in_pages(cache) and isinstance(batch_indices, list) and batch_indices:
            change(cache, vars(cache)[STATE][0].only(batch_indices))
        else:
            own(cache, batch_indices)

    return call


def _extend(own: Any) -> Any:
    @wraps(own)
    def call(cache: Any, other: Any) -> None:
        if not (is_in_pages(cache) and is_in_pages(other) and vars(cache)[STATE][0].pool is vars(other)[STATE][0].pool):
            own(cache, other)
            return
        (held, layer, _), more = vars(cache)[STATE], vars(other)[STATE][0]
        change(cache, Held(held.pool, held.sequences + more.sequences, held.lengths + more.lengths))
        if not has_rows(other) or held.pool.windows[layer]:  # whose steps write over what there is
            with held.pool.states.lock:
                held.pool.states.copies.add(other)

    return call


def _extract(own: Any) -> Any:
    """Return one sequence's cache, evaluated at once: unevaluated it would refer to the memory of the whole batch."""

    @wraps(own)
    def call(cache: Any, idx: int) -> Any:
        if is_in_pages(cache):
            return _extracted(cache, idx)
        one = own(cache, idx)
        kind = kind_of(one)
        if all(isinstance(array, mx.array) for array in kind.arrays(one)):
            kind.give(one, [mx.contiguous(array) for array in kind.arrays(one)])
            mx.async_eval(*kind.arrays(one))  # type: ignore[no-untyped-call]
        return one

    return call


def _extracted(cache: Any, idx: int) -> Any:
    held, layer, _ = vars(cache)[STATE]
    window, arrays = held.pool.windows[layer], len(held.pool.states.like[layer])
    if arrays:
        one = type(cache)(arrays)
    else:
        classes = type(cache).update_and_fetch.__globals__
        one = classes["KVCache"]() if window is None else classes["RotatingKVCache"](window)
    vars(one).update(content_of(held.only([idx]), layer, vars(one)))
    return one
