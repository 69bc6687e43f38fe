"""mlx-lm's KV caches in a captured step: memory of a fixed capacity, and a position in device memory.

The caches stay mlx-lm's own objects. During a capture the model gets fakes for them. After each graph launch the objects' positions are
updated, so that trimming, saving and steps of several tokens work.
"""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
from mlx.utils import tree_map

from .._replay.errors import NotReplayed
from .._replay.kinds import Place
from .._replay.memory import POISON
from .copies import TRIED, digest, known_as, modules_of, package_of

RowKind: TypeAlias = "type[Growing | Rotating | Quantized | Batched | BatchedRotating]"
Kind: TypeAlias = "type[Replaced] | RowKind"

LEAST_CAPACITY = 1024
HEADROOM = 256  # rows that a new cache has room for at least
LARGEST_STEP = 4096  # rows by which it grows at most: a new capture takes far less than decoding so many tokens


def standing(caches: list[Any], *, updated: bool = False) -> list[dict[str, Any]]:
    """Return the contents of caches, for :func:`put_back`; ``updated``: before in-place updates of arrays besides keys and values."""
    states = [getattr(cache, "__dict__", {}).copy() for cache in caches]
    for state in states:
        for name, value in state.items():
            if isinstance(value, list):
                state[name] = value.copy()
    for state in states if updated else []:
        arrays = {name: value for name, value in state.items() if isinstance(value, mx.array) and name not in {"keys", "values"}}
        state.update({name: array.__copy__() for name, array in arrays.items()})
    return states


def put_back(caches: list[Any], states: list[dict[str, Any]]) -> None:
    """Restore caches after a step that ended early.

    The step wrote to unused rows, or to the oldest row of a full cache, which the next token overwrites as well.
    """
    for cache, state in zip(caches, states, strict=True):
        if state:
            vars(cache).update(state)
            for name in vars(cache).keys() - state.keys():  # it went to pages meanwhile, or has left them
                del vars(cache)[name]


def arrays_in(value: Any) -> list[mx.array]:
    """Return the arrays in nested dicts, lists and tuples."""
    if isinstance(value, mx.array):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [array for each in inner for array in arrays_in(each)]


def twin(cache: Any) -> Any:
    """Return a copy of a cache that steps do not change."""
    other = copy.copy(cache)
    vars(other).update(tree_map(lambda value: value.__copy__() if isinstance(value, mx.array) else value, vars(other)))
    return other


def are_empty(caches: list[Any]) -> bool:
    """Return whether there is no token before this step, by the first cache that counts tokens on the CPU."""
    for cache in caches:
        held = getattr(cache, "__dict__", {})
        place = held.get("_idx", held.get("offset"))
        if isinstance(place, int):
            return place == 0
    return False


def capacity_for(rows: int, most: int | None = None) -> int:
    """Return the number of rows for a growing cache; ``most``: for one with a maximum size, up to which it grows."""
    capacity = LEAST_CAPACITY
    while capacity < rows + HEADROOM and (most is None or capacity < most):
        capacity += min(capacity, LARGEST_STEP)
    return capacity if most is None else min(capacity, most)


class KeysAndValues:
    """The common part of caches with one row per token."""

    batched: ClassVar = False

    @staticmethod
    def arrays(cache: Any) -> list[Any]:
        return [cache.keys, cache.values]

    @staticmethod
    def give(cache: Any, arrays: list[mx.array]) -> None:
        cache.keys, cache.values = arrays

    @staticmethod
    def memory(like: mx.array, capacity: int) -> mx.array:
        return mx.full((*like.shape[:2], capacity, like.shape[3]), POISON).astype(like.dtype)

    @staticmethod
    def fits(array: mx.array, memory: mx.array) -> bool:
        return (array.shape[:2], array.shape[3:], array.dtype) == (memory.shape[:2], memory.shape[3:], memory.dtype)

    @staticmethod
    def before(cache: Any) -> list[mx.array] | None:  # noqa: ARG004
        return None

    @staticmethod
    def settle(cache: Any) -> None:
        """There are no other rows."""


class Growing(KeysAndValues):
    """``KVCache``: rows are appended. ``state`` is their number."""

    name: ClassVar = "KVCache"
    state: ClassVar = attrgetter("offset")

    @classmethod
    def capacity(cls, cache: Any) -> int:
        return capacity_for(cls.state(cache))

    @classmethod
    def used(cls, cache: Any) -> int:
        return int(cls.state(cache))

    @classmethod
    def content(cls, cache: Any, array: mx.array) -> tuple[mx.array, int]:
        return array, cls.state(cache)

    @classmethod
    def next(cls, cache: Any, capacity: int) -> Place | None:
        row = cls.state(cache)
        return Place(row, row, row + 1) if row < capacity else None

    @classmethod
    def last(cls, cache: Any) -> Place:
        rows = cls.state(cache)
        return Place(rows - 1, rows - 1, rows)

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        cache.offset = place.offset + 1

    @staticmethod
    def window(size: int | None, capacity: int) -> int | None:  # noqa: ARG004
        return size


class Quantized(Growing):
    """``QuantizedKVCache``: packed values, scales and biases of the keys, then of the values."""

    name: ClassVar = "QuantizedKVCache"
    form: ClassVar = attrgetter("group_size", "bits")

    @staticmethod
    def arrays(cache: Any) -> list[Any]:
        return [None] if cache.keys is None else [*cache.keys, *cache.values]

    @staticmethod
    def give(cache: Any, arrays: list[mx.array]) -> None:
        cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])


class Rotating(KeysAndValues):
    """``RotatingKVCache``: the newest rows replace the oldest, except the first ``keep``."""

    name: ClassVar = "RotatingKVCache"
    state: ClassVar = attrgetter("offset", "_idx", "max_size", "keep")
    used = Growing.used

    @staticmethod
    def capacity(cache: Any) -> int:
        return capacity_for(cache.offset, cache.max_size)

    @staticmethod
    def content(cache: Any, array: mx.array) -> tuple[mx.array, int]:
        extra = array.shape[2] - cache.max_size
        if extra > 0:
            return mx.concatenate([array[..., : cache.keep, :], array[..., cache.keep + extra :, :]], axis=2), cache.max_size
        return array, min(cache.offset, array.shape[2])

    @staticmethod
    def next(cache: Any, capacity: int) -> Place | None:
        if capacity < cache.max_size:  # its memory has not its full size yet
            return Growing.next(cache, capacity) if cache._idx == cache.offset else None
        if capacity > cache.max_size:  # another window
            return None
        row = cache._idx if cache._idx < capacity else cache.keep
        return Place(cache.offset, row, min(cache.offset + 1, capacity))

    @staticmethod
    def last(cache: Any) -> Place:
        return Place(cache.offset - 1, cache._idx - 1, min(cache.offset, cache.max_size))

    @staticmethod
    def settle(cache: Any) -> None:
        cache._idx = min(cache._idx, cache.max_size)

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        cache.offset = place.offset + 1
        cache._idx = place.row + 1

    @staticmethod
    def window(size: int | None, capacity: int) -> int | None:
        if size is not None and size < capacity:
            raise NotReplayed("a window is shorter than its rotating cache")
        return None


class Batched(Growing):
    """``BatchKVCache``: sequences that end at the same row, each with its own left padding."""

    name: ClassVar = "BatchKVCache"
    batched: ClassVar = True
    state: ClassVar = attrgetter("_idx")

    @staticmethod
    def sequences(cache: Any) -> tuple[list[int], list[int]]:
        return [offset - cache._idx for offset in cache.offset.tolist()], cache.left_padding.tolist()

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        vars(cache)["_idx"] = place.row + 1  # not by its class, which checks whether it is paged


class BatchedRotating(KeysAndValues):
    """``BatchRotatingKVCache``: the newest rows replace the oldest, left padding first."""

    name: ClassVar = "BatchRotatingKVCache"
    batched: ClassVar = True
    window = Rotating.window

    @staticmethod
    def capacity(cache: Any) -> int:
        return capacity_for(cache._offset, cache.max_size)

    @staticmethod
    def used(cache: Any) -> int:
        return int(max(cache._offset, cache._idx))

    @staticmethod
    def state(cache: Any) -> tuple[Any, ...]:
        return cache._offset, cache._idx, cache.rotated, cache.max_size, cache._lengths is None

    @staticmethod
    def content(cache: Any, array: mx.array) -> tuple[mx.array, int]:
        extra = array.shape[2] - cache.max_size
        return (array[..., extra:, :], cache.max_size) if extra > 0 else (array, cache._offset)

    @staticmethod
    def next(cache: Any, capacity: int) -> Place | None:
        full = cache._offset >= cache.max_size
        rotates = cache.rotated or cache._idx >= cache.max_size
        if cache._lengths is not None or full != rotates or not (full or cache._idx == cache._offset):
            return None
        if capacity < cache.max_size:  # its memory has not its full size yet
            return Place(cache._offset, cache._idx, cache._offset + 1) if cache._offset < capacity else None
        if capacity > cache.max_size:  # another window
            return None
        row = cache._idx if cache._idx < capacity else 0
        return Place(cache._offset, row, min(cache._offset + 1, capacity), min(0, capacity - cache._offset - 1))

    @staticmethod
    def last(cache: Any) -> Place:
        offset, size = cache._offset, cache.max_size
        return Place(offset - 1, cache._idx - 1, min(offset, size), min(0, size - offset))

    @staticmethod
    def sequences(cache: Any) -> tuple[list[int], list[int]]:
        moved = min(0, cache.max_size - cache._offset) + max(0, cache.keys.shape[2] - cache.max_size)
        return [offset - cache._offset for offset in cache.offset.tolist()], [left - moved for left in cache.left_padding.tolist()]

    @staticmethod
    def settle(cache: Any) -> None:
        extra = cache.keys.shape[2] - cache.max_size
        if extra > 0:
            cache.left_padding = cache.left_padding - extra
            cache._idx = cache.max_size

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        vars(cache).update(_offset=place.offset + 1, _idx=place.row + 1, rotated=place.start < 0)


class Replaced:
    """``ArraysCache``: arrays of a fixed size, all of which a step replaces, such as the state of linear attention."""

    name: ClassVar = "ArraysCache"
    batched: ClassVar = False

    @staticmethod
    def state(cache: Any) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def arrays(cache: Any) -> list[Any]:
        return list(cache.cache)

    @staticmethod
    def give(cache: Any, arrays: list[mx.array]) -> None:
        cache.cache = arrays

    @staticmethod
    def memory(like: mx.array, capacity: int) -> mx.array:  # noqa: ARG004
        return mx.full(like.shape, POISON).astype(like.dtype)

    @staticmethod
    def fits(array: mx.array, memory: mx.array) -> bool:
        return (array.shape, array.dtype) == (memory.shape, memory.dtype)

    before = arrays

    @staticmethod
    def used(cache: Any) -> None:
        """It has no rows."""

    @staticmethod
    def capacity(cache: Any) -> int:  # noqa: ARG004
        return 0

    @staticmethod
    def content(cache: Any, array: mx.array) -> tuple[mx.array, None]:  # noqa: ARG004
        """Return all arrays."""
        return array, None

    @staticmethod
    def next(cache: Any, capacity: int) -> Place | None:  # noqa: ARG004
        """It has no position; with padding, which the model would mask, it cannot be captured."""
        return None if Replaced.is_padded(cache) else Place(0, 0, 1)

    @staticmethod
    def is_padded(cache: Any) -> bool:
        """Return whether tokens are masked, or states kept for drafts. Padding that prefill has passed, which mlx-lm leaves as negative
        numbers, does not count.
        """
        if vars(cache).get("_speculation") is not None:
            return True
        left = cache.left_padding
        if left is not None and cache.lengths is None and max(left.tolist(), default=0) <= 0:
            cache.left_padding = None
        return cache.lengths is not None or cache.left_padding is not None

    @staticmethod
    def last(cache: Any) -> Place:
        if Replaced.is_padded(cache):
            raise NotReplayed("its cache has sequences with padding")
        return Place(0, 0, 1)

    @staticmethod
    def settle(cache: Any) -> None:
        """There is nothing but the arrays."""

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        """It has no position."""


KINDS: tuple[Kind, ...] = (Growing, Rotating, Quantized, Replaced, Batched, BatchedRotating)
NAMES = {kind.name for kind in KINDS}
BATCHED_NAMES = {kind.name for kind in KINDS if kind.batched}
_kinds: dict[type, Kind] = {}  # of the classes that have been asked for
_packages = {"mlx_lm"}  # which have them


def kind_of(cache: Any) -> Kind:
    """Return how a cache is captured: mlx-lm's own, or one of a known copy."""
    cls = type(cache)
    kind = _kinds.get(cls)
    if kind is None:
        kind = next((kind for kind in KINDS if kind.name == cls.__name__), None)
        if kind is None:
            raise NotReplayed(f"its cache is a {cls.__name__}")
        if cls.__module__ != "mlx_lm.models.cache" and known_as(cls) != kind.name:
            known = ", ".join(TRIED)
            raise NotReplayed(
                f"its cache is a {cls.__module__}.{cls.__name__} (digest {digest(cls)}), and the code of that is none of {known}"
            )
        _kinds[cls] = kind
    return kind


def has_known_caches(package: str) -> bool:
    """Return whether a package's caches are mlx-lm's or known copies."""
    if package in _packages:
        return True
    for _, variables in modules_of(package):
        for name in NAMES & variables.keys():
            if isinstance(variables[name], type) and package_of(variables[name]) == package and known_as(variables[name]) == name:
                _packages.add(package)
                return True
    return False
