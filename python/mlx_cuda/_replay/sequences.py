"""Sequences in a paged KV cache."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

from .prefixes import Free, Page

PAGE = 64  # rows
AHEAD = 4  # pages that a sequence is given before it needs them, where there are enough
STATE = "_mlx_cuda_held"  # in a cache's attributes, and alone there: its pages, its layer, and its other attributes
_numbers = itertools.count()


def most_pages(window: int | None) -> float:
    """Return the most pages of a window: beyond them, the newest page replaces the oldest."""
    return math.inf if window is None else (window + PAGE - 2) // PAGE + 1


def pages_for(rows: int, most: float) -> int:
    """Return the number of pages of a sequence with so many rows."""
    return int(min(-(-rows // PAGE), most))


class Region:
    """The pages of all layers with the same window, or none. The first page belongs to no sequence: steps are captured with it."""

    def __init__(self, window: int | None, count: int) -> None:
        self.count, self.most = count, most_pages(window)
        self.free = Free(range(1, count))


class Sequence:
    """The pages of one sequence, for each region.

    Rows are written once: of two caches that refer to the same rows of a sequence, only one writes the next row.
    """

    __slots__ = ("count", "number", "pages", "regions", "room", "rows")

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions
        self.number = next(_numbers)  # of it alone
        self.pages: list[list[Page]] = [[] for _ in regions]
        self.count = 0  # of all pages
        self.room = 0.0  # rows that there are pages for
        self.rows = 0  # that were written

    def reserve(self, rows: int) -> bool:
        """Allocate pages for so many rows."""
        if rows <= self.room:
            return True
        for region, own in zip(self.regions, self.pages, strict=True):
            missing, free = pages_for(rows, region.most) - len(own), region.free
            if missing > 0:
                if missing > len(free):
                    return False
                if len(free) > missing + 16 * AHEAD:
                    missing = pages_for(rows + AHEAD * PAGE, region.most) - len(own)
                for _ in range(missing):  # one after the other: another thread, or one that ends here, gives pages back meanwhile
                    own.append(free.take())
        pairs = zip(self.regions, map(len, self.pages), strict=True)
        self.room, self.count = min(math.inf if own == region.most else own * PAGE for region, own in pairs), sum(map(len, self.pages))
        return True


def is_in_pages(cache: Any) -> bool:
    return STATE in getattr(cache, "__dict__", ())


def numbers_in_use(caches: weakref.WeakSet[Any]) -> set[int]:
    """Return the sequences whose states are in use. A cache whose first step was interrupted has none.

    It is not a method of the pool: the pool would then keep its own memory until Python's garbage collector runs.
    """
    states = [vars(cache).get(STATE) for cache in list(caches)]
    return {number for state in states if state is not None for number in state[0].numbers}
