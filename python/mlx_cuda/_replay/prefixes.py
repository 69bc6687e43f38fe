"""Pages that are known by what they hold, so that sequences that begin alike have the same ones."""

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
    """One page, which is free again when no sequence has it any more."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Watched(weakref.ref[Page]):
    """Of a page that is not free; its number is known when it is gone."""

    __slots__ = ("number",)
    number: int


class Free:
    """The pages of a pool that nobody has.

    A page comes back by a weak reference, which tells that it is gone when nobody can get it any more, whatever thread let go of it. A
    finaliser would run before: another thread could find the page meanwhile, and have it beside the next one.
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
    """Pages by a digest of all their rows, which nobody writes any more.

    What a page holds, and not which tokens led to it, is compared: so a prefix that was computed in other company, and rounded otherwise,
    is another one.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows  # of a page
        self.known: weakref.WeakValueDictionary[bytes, Page] = weakref.WeakValueDictionary()
        self._seed = secrets.randbits(64)  # so that nobody can have two prefixes that differ be taken for one

    def digests(self, parts: list[mx.array], lengths: ManyOf[int], stream: mx.Stream) -> list[list[bytes]]:
        """Of the pages that each sequence fills before its last row. ``parts``: ``[B, heads, rows, …]``, a sequence's rows the last."""
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
        """Have these be a sequence's first pages: those that there are, and new ones where there are none, as long as there are any."""
        for digest in digests:
            page = self.known.get(digest)
            if page is None:
                if not free:
                    return
                page = self.known[digest] = free.take()
            pages.append(page)
