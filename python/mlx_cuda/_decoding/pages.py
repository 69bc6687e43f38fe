"""Keys and values of many sequences in pages, and what mlx-lm's batched caches hold that have theirs there (`in_pages.py`).

Layers that have a state in the place of rows are held by the same sequences (`states.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .._loader import native
from .caches import POISON, BatchedRotating, Replaced, kind_of
from .prefixes import Free, Prefixes
from .recording import WIDEST_QUANTIZED
from .states import States

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as ManyOf
    from typing import TypeAlias

    from .prefixes import Page

    Form: TypeAlias = list[tuple[int, int, mx.Dtype]]

PAGE = 64  # rows
AHEAD = 4  # pages that a sequence is given before it needs them, where there are enough
STATE = "_mlx_cuda_held"  # in a cache's attributes, and alone there: what it holds in pages, its layer, and its other attributes
_numbers = itertools.count()


def most_pages(window: int | None) -> float:
    """In how many pages a window may lie: of more rows the newest page takes the place of the oldest."""
    return math.inf if window is None else (window + PAGE - 2) // PAGE + 1


def pages_for(rows: int, most: float) -> int:
    """How many pages a sequence of so many rows has."""
    return int(min(-(-rows // PAGE), most))


class Region:
    """The pages of those layers that have the same window, or none. The first of them is nobody's: a step is recorded with it."""

    def __init__(self, window: int | None, count: int) -> None:
        self.count, self.most = count, most_pages(window)
        self.free = Free(range(1, count))


class Sequence:
    """The pages of one sequence, of each region.

    Rows are written once: two that hold the same sequence, and as many rows of it, do not both write the next one.
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
        """Have pages for so many rows."""
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


class Settings:
    """What :func:`mlx_cuda.patch` was asked for."""

    packing: Packing | None = None

    def packing_of(self, forms: Iterable[Form]) -> Packing | None:
        """How pages of keys and values of these forms are quantized."""
        takes = self.packing is not None and all(self.packing.takes(dim, dtype) for form in forms for _, dim, dtype in form)
        return self.packing if takes else None


settings = Settings()


class Held(NamedTuple):
    """What a cache in pages holds: sequences, and how many rows of each."""

    pool: Pool
    sequences: tuple[Sequence, ...]
    lengths: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        return [sequence.number for sequence in self.sequences]

    def only(self, indices: ManyOf[int]) -> Held:
        return Held(self.pool, tuple(self.sequences[i] for i in indices), tuple(self.lengths[i] for i in indices))

    def are_last(self) -> bool:
        """Whether the sequences end where these lengths say, and each is here once."""
        return len({*self.sequences}) == len(self.sequences) and all(
            sequence.rows <= length for sequence, length in zip(self.sequences, self.lengths, strict=True)
        )

    def table(self, place: int, rows: int, columns: int) -> list[list[int]]:
        """Numbers of a region's pages, of which those that are none are never read."""
        found, most = [], self.pool.regions[place].most
        for sequence in self.sequences:
            own = [page.number for page in sequence.pages[place]]
            if len(own) == most:
                own *= -(-columns // len(own))
            found.append((own + [0] * columns)[:columns])
        return found + [[0] * columns] * (rows - len(found))


class Packing(NamedTuple):
    """How pages are quantised, with mode "affine"."""

    group_size: int
    bits: int

    def takes(self, dim: int, dtype: mx.Dtype) -> bool:
        return dtype in {mx.float16, mx.bfloat16} and dim % 32 == 0 and dim % self.group_size == 0 and dim <= WIDEST_QUANTIZED

    def packed(self, array: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array, self.group_size, self.bits))

    def unpacked(self, parts: ManyOf[mx.array]) -> mx.array:
        return mx.dequantize(parts[0], parts[1], parts[2], self.group_size, self.bits)


class Pool:
    """Pages of all layers: keys and values, or the parts of both.

    And the states of layers that have these, of ``most`` sequences at once.
    """

    def __init__(self, caches: list[Any], counts: dict[int | None, int], most: int, packing: Packing | None, stream: mx.Stream) -> None:
        """``counts``: how many pages there are of each window, and of none."""
        self.packing = packing
        self.like = [form_of(cache) for cache in caches]
        self.windows = [window_of(cache) for cache in caches]
        self.regions = [Region(window, count) for window, count in counts.items()]
        self.places = [list(counts).index(window) if like else 0 for window, like in zip(self.windows, self.like, strict=True)]
        self.arrays: list[list[mx.array]] = []
        for place, pair in zip(self.places, self.like, strict=True):
            parts = self._parts([mx.full((1, heads, PAGE, dim), POISON).astype(dtype) for heads, dim, dtype in pair])
            shapes = [(self.regions[place].count, *part.shape[1:]) for part in parts]
            self.arrays.append([mx.contiguous(mx.broadcast_to(part, shape)) for part, shape in zip(parts, shapes, strict=True)])
            mx.eval(self.arrays[-1])
        self.prefixes = None if any(self.windows) else Prefixes(PAGE)  # of a window not all rows are there
        self.stream = stream
        self.last: mx.array | None = None  # what was begun last
        self._indices: tuple[Any, dict[tuple[int, int], tuple[mx.array, mx.array | None]]] = (None, {})  # of the rows read last
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()  # the first layer's cache of each batch
        self.replaced: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of layers with states
        self.states = States(list(map(states_of, caches)), most, functools.partial(_numbers_in_use, self.replaced))

    def _parts(self, rows: ManyOf[mx.array]) -> list[mx.array]:
        return [*rows] if self.packing is None else [part for each in rows for part in self.packing.packed(each)]

    @property
    def nbytes_of_pages(self) -> int:
        return sum(array.nbytes for own in self.arrays for array in own)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of_pages + self.states.nbytes

    def is_shared(self, caches: list[Any]) -> bool:
        """Whether others may hold what these do, whose states a step would replace."""
        return bool(self.states.copies) and any(cache in self.states.copies for cache in caches)

    def wait(self) -> None:
        if self.last is not None:
            mx.eval(self.last)

    def load(self, caches: list[Any], stream: mx.Stream, states: list[list[mx.array]] | None = None) -> Held | None:
        """What caches of mlx-lm's hold, copied to pages; None where there are too few, even without those of sequences that left.

        ``states``: those of all layers, where the caches have others by now.
        """
        lengths = lengths_of(caches)
        held = Held(self, tuple(Sequence(self.regions) for _ in lengths), tuple(lengths))
        parts = [self._parts(rows_of(cache)) if any(lengths) else [] for cache in caches]  # nothing of whom one token comes
        if any(parts) and self.prefixes is not None:
            found = self.prefixes.digests([part for own in parts for part in own], lengths, stream)
            for sequence, digests in zip(held.sequences, found, strict=True):
                self.prefixes.fill(sequence.pages[0], digests, self.regions[0].free)
        if not self.reserve(held):
            return None
        self.wait()
        for place in range(len(self.regions)) if any(parts) else ():
            layers = [layer for layer, own in enumerate(self.places) if own == place]
            table = mx.array(held.table(place, len(lengths), -(-max(lengths) // PAGE)), mx.int32)
            native.module(stream).write_to_pages(
                [array for layer in layers for array in self.arrays[layer]], [part for layer in layers for part in parts[layer]],
                table, mx.array(lengths, mx.int32), stream,
            )  # fmt: skip
        self.states.put(held.numbers, states or list(map(states_of, caches)))
        return held

    def arrange(self, held: Held, step: Any) -> None:
        """Have these sequences' states be where a step of theirs finds them; caches that hold them too have their own from now on."""
        copies = bool(self.states.copies)
        if copies:
            self._settle_copies()
        if self.states and (copies or self.states.order != held.numbers):
            self.states.arrange(held.numbers, step)

    def kept(self, held: Held) -> list[list[mx.array]]:
        """The states of these sequences, which steps replace."""
        if not self.states:
            return []
        self._settle_copies()
        return self.states.of(held.numbers)

    def restore(self, held: Held, states: list[list[mx.array]]) -> None:
        """Have them be what they were."""
        self.wait()
        self.states.put(held.numbers, states)

    def _settle_copies(self) -> None:
        self.wait()
        with self.states.lock:
            for cache in filter(has_rows, list(self.states.copies)):
                settle(cache)
            for numbers, copies in itertools.groupby(sorted(self.states.copies, key=_numbers_of), key=_numbers_of):
                content = self.states.of(numbers)
                for cache in copies:
                    _, layer, rest = vars(cache)[STATE]
                    _leave(cache, {**rest, "cache": [array.__copy__() for array in content[layer]]})

    def reserve(self, held: Held) -> bool:
        """Have pages for one more row of each sequence."""
        return all(sequence.reserve(length + 1) for sequence, length in zip(held.sequences, held.lengths, strict=True))

    def rows(self, held: Held, layer: int) -> list[mx.array]:
        """Keys and values of a layer, ``[B, heads, rows, dim]``, which end at the same row, with zeros before a sequence's first.

        They are arrays of their own, begun in order with the steps before and after: nobody waits.
        """
        found = []
        for pages in self.arrays[layer]:
            _, heads, _, dim = pages.shape
            index, there = self._index(held, layer, heads)
            rows = mx.take(pages.reshape(-1, dim), index, axis=0)
            found.append(rows if there is None else mx.where(there, rows, mx.zeros_like(rows)))
        if self.packing is not None:
            found = [self.packing.unpacked(found[first : first + 3]) for first in (0, 3)]
        if self.stream == mx.default_stream(mx.default_device()):
            mx.async_eval(*found)  # type: ignore[no-untyped-call]
            self.last = found[0]
        else:
            self.wait()
            mx.eval(found)
        return found

    def _index(self, held: Held, layer: int, heads: int) -> tuple[mx.array, mx.array | None]:
        """Which rows of all pages these sequences' are, ``[B, heads, rows]``, and where there are any, unless that is everywhere."""
        longest, place = max(held.lengths), self.places[layer]
        count = min(longest, self.windows[layer] or longest)
        if self._indices[0] != (held.numbers, held.lengths):
            self._indices = (held.numbers, held.lengths), {}
        known = self._indices[1]  # another thread may replace it
        if (heads, place) not in known:
            table = mx.array(held.table(place, len(held.lengths), -(-longest // PAGE)), mx.int32)
            row = mx.arange(count) + mx.array(held.lengths)[:, None] - count
            there = None if min(held.lengths) >= count else (row >= 0)[:, None, :, None]
            row = mx.maximum(row, 0)
            page = mx.take_along_axis(table, row // PAGE, axis=1)[:, None] * heads + mx.arange(heads)[:, None]
            known[heads, place] = page * PAGE + (row % PAGE)[:, None], there
        return known[heads, place]

    def state(self, held: Held, layer: int) -> list[mx.array]:
        """The state of a layer, in arrays of its own."""
        self.wait()
        return self.states.of(held.numbers, layer)[0]


def content_of(held: Held, layer: int, rest: dict[str, Any]) -> dict[str, Any]:
    """What a cache with these attributes, in pages, would have in arrays of its own."""
    if held.pool.states.like[layer]:
        return {**rest, "cache": held.pool.state(held, layer)}
    keys, values = held.pool.rows(held, layer)
    return {**rest, **places_of(held, rest), "keys": keys, "values": values}


def settle(cache: Any) -> Any:
    """A cache, which is no more in pages."""
    if state := vars(cache).get(STATE):
        with state[0].pool.states.lock:
            if is_in_pages(cache):  # otherwise another thread was faster
                _leave(cache, content_of(*vars(cache)[STATE]))
    return cache


def _leave(cache: Any, content: dict[str, Any]) -> None:
    pool = vars(cache)[STATE][0].pool
    for caches in (pool.batches, pool.replaced, pool.states.copies):
        caches.discard(cache)
    vars(cache).update(content)
    del vars(cache)[STATE]


def known_again(caches: list[Any]) -> None:
    """Of caches that were put back: those that have states in pages again, which somebody else may have by now."""
    for cache in caches:
        if is_in_pages(cache) and not has_rows(cache):
            pool = vars(cache)[STATE][0].pool
            with pool.states.lock:
                pool.replaced.add(cache)
                pool.states.copies.add(cache)


def _numbers_in_use(caches: weakref.WeakSet[Any]) -> set[int]:
    """The sequences whose states somebody has. A cache whose first step was interrupted has been put back, and has none.

    No method of the pool: one that it holds itself would keep its memory until Python's collector comes.
    """
    states = [vars(cache).get(STATE) for cache in list(caches)]
    return {number for state in states if state is not None for number in state[0].numbers}


def _numbers_of(cache: Any) -> list[int]:
    numbers: list[int] = vars(cache)[STATE][0].numbers
    return numbers


def places_of(held: Held, rest: dict[str, Any]) -> dict[str, Any]:
    """Where a batch's sequences, or the only one, begin and end, by the names that caches have for that."""
    if "cache" in rest:
        return {}
    longest = max(held.lengths)
    rows = min(longest, rest.get("max_size", longest))
    places: dict[str, Any] = {"_idx": rows, "_offset": longest, "rotated": False, "offset": longest}
    if "left_padding" in rest:
        offsets = mx.array(held.lengths)
        places |= {"offset": offsets, "left_padding": rows - mx.minimum(offsets, rows)}
    return {name: value for name, value in places.items() if name in rest}


def has_rows(cache: Any) -> bool:
    """Whether it has rows, not a state."""
    return type(cache).__name__ != Replaced.name


def keys_and_values(cache: Any) -> list[mx.array]:
    return [cache.keys, cache.values] if has_rows(cache) else []


def form_of(cache: Any) -> Form:
    """Heads, head dimension and dtype of a cache's keys and of its values."""
    return [(array.shape[1], array.shape[3], array.dtype) for array in keys_and_values(cache)]


def bytes_of_a_page(cache: Any) -> int:
    """As the cache has its rows."""
    return sum(heads * PAGE * dim * dtype.size for heads, dim, dtype in form_of(cache))


def states_of(cache: Any) -> list[mx.array]:
    return [] if has_rows(cache) else Replaced.arrays(cache)


def lengths_of(caches: list[Any]) -> list[int]:
    """The rows of each sequence of a batch, as the first layer that has rows knows them."""
    lengths: list[int] = next(cache for cache in caches if has_rows(cache)).offset.tolist()
    return lengths


def window_of(cache: Any) -> int | None:
    """How many rows there are at most."""
    return cache.max_size if kind_of(cache) is BatchedRotating else None


def rows_of(cache: Any) -> list[mx.array]:
    """Keys and values of a batch's cache, the oldest first, of a window no more than it has; nothing of a state."""
    if not has_rows(cache):
        return []
    if getattr(cache, "rotated", False):
        return [mx.roll(array, -cache._idx, 2) for array in (cache.keys, cache.values)]
    first = max(0, cache._idx - (window_of(cache) or cache._idx))
    return [array[..., first : cache._idx, :] for array in (cache.keys, cache.values)]


def is_in_pages(cache: Any) -> bool:
    return STATE in getattr(cache, "__dict__", ())


def held_by(caches: list[Any]) -> Held | None:
    """What caches of all layers hold, if all of them are in the same pages."""
    if not all(map(is_in_pages, caches)):  # no generator: an interrupt within one would be lost
        return None
    first: Held = vars(caches[0])[STATE][0]
    same = all((state := vars(cache)[STATE])[0] == first and state[1] == layer for layer, cache in enumerate(caches))
    return first if same and len(caches) == len(first.pool.arrays) else None
