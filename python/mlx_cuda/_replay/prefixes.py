"""Prefix sharing: pages that are found by their contents."""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as ManyOf
from typing import TYPE_CHECKING

from .._loader import native

if TYPE_CHECKING:
    import mlx.core as mx


class Page:
    """A page, which is free when no sequence refers to it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Watched(weakref.ref[Page]):
    """A weak reference to a page that is in use, with its number."""

    __slots__ = ("number",)
    number: int


class Free:
    """The free pages of a pool.

    A page is returned by a weak reference, which reports that the page is unreachable, whatever thread released it. A finalizer would
    run earlier: another thread could find the page meanwhile.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free: list[Page | _Watched] = list(map(Page, numbers))
        self._watched: dict[int, _Watched] = {}

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> Page:
        number = self._free.pop().number
        page = Page(number)
        self._watched[number] = watched = _Watched(page, self._free.append)
        watched.number = number
        return page


class Prefixes:
    """Pages by a digest of all their rows, once these are not written any more.

    The contents are compared, not the tokens, so a prefix that was computed in another batch, and rounded differently, does not match.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows  # of a page
        self.known: weakref.WeakValueDictionary[bytes, Page] = weakref.WeakValueDictionary()
        self._seed = secrets.randbits(64)  # so that no request can make two different prefixes look equal

    def digests(self, parts: list[mx.array], lengths: ManyOf[int], stream: mx.Stream) -> list[list[bytes]]:
        """Return the digests of the full pages of each sequence. ``parts``: ``[B, heads, rows, …]``, each sequence's rows at the end."""
        counts = [max(0, length - 1) // self.rows for length in lengths]
        if not any(counts):
            return [[] for _ in counts]
        sums = native.module(stream).row_sums(parts, self._seed, stream)
        data, rows = memoryview(sums).cast("B"), sums.shape[1]  # type: ignore[arg-type]
        found: list[list[bytes]] = []
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            first, size = 8 * (rows * index + rows - length), 8 * self.rows
            pages = (data[begin : begin + size] for begin in range(first, first + count * size, size))
            found.append([hashlib.blake2b(page, digest_size=16).digest() for page in pages])
        return found

    def fill(self, pages: list[Page], digests: ManyOf[bytes], free: Free) -> None:
        """Assign a sequence's first pages: known ones, and new ones for the others, while there are any."""
        for digest in digests:
            page = self.known.get(digest)
            if page is None:
                if not free:
                    return
                page = self.known[digest] = free.take()
            pages.append(page)
