"""The paged KV cache of many sequences, and what a cache object refers to.

Layers with a state instead of rows belong to the same sequences (`states.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence as ManyOf
from typing import Any, NamedTuple

import mlx.core as mx

from .._loader import native
from .memory import POISON
from .packing import Form, Packing
from .prefixes import Prefixes
from .sequences import PAGE, STATE, Region, Sequence, is_in_pages, numbers_in_use
from .states import ByLayers, States


class Layer(NamedTuple):
    """A layer of a batch: the form and window of its keys and values, or the arrays of its state."""

    form: Form
    window: int | None
    states: list[mx.array]


class Held(NamedTuple):
    """The contents of a paged cache object: sequences, and the number of rows of each."""

    pool: Pool
    sequences: tuple[Sequence, ...]
    lengths: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        return [sequence.number for sequence in self.sequences]

    def only(self, indices: ManyOf[int]) -> Held:
        return Held(self.pool, tuple(self.sequences[i] for i in indices), tuple(self.lengths[i] for i in indices))

    def are_last(self) -> bool:
        """Return whether the sequences end at these lengths, and each occurs once."""
        return len({*self.sequences}) == len(self.sequences) and all(
            sequence.rows <= length for sequence, length in zip(self.sequences, self.lengths, strict=True)
        )

    def table(self, place: int, rows: int, columns: int) -> list[list[int]]:
        """Return the block table of a region; unused entries are never read."""
        found, most = [], self.pool.regions[place].most
        for sequence in self.sequences:
            own = [page.number for page in sequence.pages[place]]
            if len(own) == most:
                own *= -(-columns // len(own))
            found.append((own + [0] * columns)[:columns])
        return found + [[0] * columns] * (rows - len(found))


class Pool:
    """The pages of all layers: keys and values, or their quantized parts.

    It also has the states of layers with states, for at most ``most`` sequences.
    """

    def __init__(self, layers: list[Layer], counts: dict[int | None, int], most: int, packing: Packing | None, stream: mx.Stream) -> None:
        """``counts``: the number of pages for each window, and for none."""
        self.packing = packing
        self.like = [layer.form for layer in layers]
        self.windows = [layer.window for layer in layers]
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
        self.states = States([layer.states for layer in layers], most, functools.partial(numbers_in_use, self.replaced))

    def _parts(self, rows: ManyOf[mx.array]) -> list[mx.array]:
        return [*rows] if self.packing is None else [part for each in rows for part in self.packing.packed(each)]

    @property
    def nbytes_of_pages(self) -> int:
        return sum(array.nbytes for own in self.arrays for array in own)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of_pages + self.states.nbytes

    def is_shared(self, caches: list[Any]) -> bool:
        """Return whether other caches may refer to these sequences, whose states a step would replace."""
        return bool(self.states.copies) and any(cache in self.states.copies for cache in caches)

    def wait(self) -> None:
        if self.last is not None:
            mx.eval(self.last)

    def load(self, rows: ByLayers, lengths: list[int], states: ByLayers, stream: mx.Stream) -> Held | None:
        """Copy a batch's keys and values to pages, each sequence's rows at the end; return None if there are too few pages, even without
        sequences that have left.
        """
        held = Held(self, tuple(Sequence(self.regions) for _ in lengths), tuple(lengths))
        parts = list(map(self._parts, rows))
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
        self.states.put(held.numbers, states)
        return held

    def arrange(self, held: Held, step: Any, *, anew: bool) -> None:
        """Move these sequences' states to where a step finds them. ``anew``: after other caches have left."""
        if self.states and (anew or self.states.order != held.numbers):
            self.states.arrange(held.numbers, step)

    def kept(self, held: Held) -> ByLayers:
        """Return the states of these sequences before a step replaces them."""
        if not self.states:
            return []
        self.wait()
        return self.states.of(held.numbers)

    def restore(self, held: Held, states: ByLayers) -> None:
        """Restore these states."""
        self.wait()
        self.states.put(held.numbers, states)

    def reserve(self, held: Held) -> bool:
        """Allocate pages for one more row of each sequence."""
        return all(sequence.reserve(length + 1) for sequence, length in zip(held.sequences, held.lengths, strict=True))

    def rows(self, held: Held, layer: int) -> list[mx.array]:
        """Return the keys and values of a layer, ``[B, heads, rows, dim]``, aligned to the last row, with zeros before a sequence's first.

        They are new arrays, evaluated in order with the steps before and after, without synchronization.
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
        """Return the rows of all pages that belong to these sequences, ``[B, heads, rows]``, and a mask unless all are valid."""
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
        """Return the state of a layer in new arrays."""
        self.wait()
        return self.states.of(held.numbers, layer)[0]


def held_by(caches: list[Any]) -> Held | None:
    """Return what the caches of all layers refer to, if all are in the same pages."""
    if not all(map(is_in_pages, caches)):  # no generator: an interrupt within one would be lost
        return None
    first: Held = vars(caches[0])[STATE][0]
    same = all((state := vars(cache)[STATE])[0] == first and state[1] == layer for layer, cache in enumerate(caches))
    return first if same and len(caches) == len(first.pool.arrays) else None
