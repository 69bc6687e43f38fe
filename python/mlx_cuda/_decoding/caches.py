"""mlx-lm's KV caches as a recorded step sees them: memory of a fixed capacity, and a place in it that lies on the device.

The caches stay mlx-lm's own objects. While a step is recorded, the model is given stand-ins for them; after each replayed step the
objects are told where they stand, so that trimming, saving and steps of several tokens are theirs.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

LEAST_CAPACITY = 1024
HEADROOM = 256  # rows that a new cache has room for at least


class NotReplayed(Exception):
    """Why a model's steps are not replayed."""


class Place(NamedTuple):
    """Where a token goes: its place in the sequence, its row in the cache, and how many rows are seen with it."""

    offset: int
    row: int
    length: int


class Growing:
    """``KVCache``: row after row; its capacity doubles."""

    name: ClassVar = "KVCache"

    @staticmethod
    def capacity(cache: Any) -> int:
        capacity = LEAST_CAPACITY
        while capacity < cache.offset + HEADROOM:
            capacity *= 2
        return capacity

    @staticmethod
    def content(cache: Any, array: mx.array) -> mx.array:
        """The rows that there are."""
        return array[..., : cache.offset, :]

    @staticmethod
    def next(cache: Any, capacity: int) -> Place | None:
        """Where the next token goes, if there is room."""
        offset = cache.offset
        return Place(offset, offset, offset + 1) if offset < capacity else None

    @staticmethod
    def last(cache: Any) -> Place:
        """Where the last token is."""
        return Place(cache.offset - 1, cache.offset - 1, cache.offset)

    @staticmethod
    def settle(cache: Any) -> None:
        """Agree with memory that holds the content alone."""

    @staticmethod
    def advance(cache: Any, place: Place) -> None:
        cache.offset = place.offset + 1

    @staticmethod
    def window(size: int | None, capacity: int) -> int | None:  # noqa: ARG004
        return size


class Rotating:
    """``RotatingKVCache``: the newest rows take the place of the oldest, but for the first ``keep``."""

    name: ClassVar = "RotatingKVCache"

    @staticmethod
    def capacity(cache: Any) -> int:
        return int(cache.max_size)

    @staticmethod
    def content(cache: Any, array: mx.array) -> mx.array:
        extra = array.shape[2] - cache.max_size
        if extra > 0:
            return mx.concatenate([array[..., : cache.keep, :], array[..., cache.keep + extra :, :]], axis=2)
        return array[..., : min(cache.offset, array.shape[2]), :]

    @staticmethod
    def next(cache: Any, capacity: int) -> Place | None:
        if cache.max_size != capacity:  # another window
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
            raise NotReplayed("a window is shorter than its RotatingKVCache")
        return None


KINDS: tuple[type[Growing | Rotating], ...] = (Growing, Rotating)


def kind_of(cache: Any) -> type[Growing | Rotating]:
    """How a cache of mlx-lm is replayed."""
    for kind in KINDS:
        if type(cache).__name__ == kind.name and type(cache).__module__ == "mlx_lm.models.cache":
            return kind
    raise NotReplayed(f"its cache is a {type(cache).__name__}")
