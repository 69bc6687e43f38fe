"""The interface of caches for captured steps: a library has one class of static methods for each class of its caches.

A library has a package beside this one: ``caches.py`` has the classes, ``copies.py`` known copies of its caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


class Place(NamedTuple):
    """The place of a token: its position in the sequence, its row in the cache, the number of rows including it, and how far the first rows
    of a batch's sequences have moved.
    """

    offset: int
    row: int
    length: int
    start: int = 0


class Kind(Protocol):
    """The interface of one class of caches."""

    batched: bool  # whether its sequences have an offset and left padding of their own

    def state(self, cache: Any, /) -> Any: ...  # what a place depends on, so that it is found once for all caches that are alike
    def arrays(self, cache: Any, /) -> list[Any]: ...  # what it holds; None where there is nothing yet
    def give(self, cache: Any, arrays: list[mx.array], /) -> None: ...
    def before(self, cache: Any, /) -> list[mx.array] | None: ...  # what the last step began with, where it is not in the cache any more
    def memory(self, like: mx.array, capacity: int, /) -> mx.array: ...  # poisoned rows, as many as there are to be
    def fits(self, array: mx.array, memory: mx.array, /) -> bool: ...
    def capacity(self, cache: Any, /) -> int: ...  # how many rows it may grow to
    def used(self, cache: Any, /) -> int | None: ...  # how many of an array's rows hold something, or more; None without rows
    def content(self, cache: Any, array: mx.array, /) -> tuple[mx.array, int | None]: ...  # an array, and how many first rows it has
    def next(self, cache: Any, capacity: int, /) -> Place | None: ...  # where the next token goes, if it fits
    def last(self, cache: Any, /) -> Place: ...  # where the last token is
    def settle(self, cache: Any, /) -> None: ...  # agree with memory that holds the content alone
    def advance(self, cache: Any, place: Place, /) -> None: ...  # the token at this place is its last


class BatchedKind(Kind, Protocol):
    """The same for a batch."""

    def sequences(self, cache: Any, /) -> tuple[list[int], list[int]]: ...  # what each has beyond the offset, and start, of the place
