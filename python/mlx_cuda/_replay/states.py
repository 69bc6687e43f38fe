"""Arrays that layers replace for each token, such as the state of linear attention, for batches in a paged KV cache.

A captured step finds the states of its sequences in the first rows of memory that all captures share, in the order of the batch. When
sequences join or leave, or another batch of the model runs, these rows are rearranged; those of sequences that are still in use are copied
out first.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from .memory import POISON

ByLayers: TypeAlias = list[list[mx.array]]


class States:
    """The arrays of all such layers, ``[most, …]``, and the sequence of each row; sequences are known by their numbers."""

    def __init__(self, arrays: ByLayers, most: int, in_use: Callable[[], set[int]]) -> None:
        """``arrays``: the states of layers in some batch, none for layers with rows. ``in_use``: returns the sequences in use."""
        self.most, self.in_use = most, in_use
        self.like = [[(array.shape[1:], array.dtype) for array in own] for own in arrays]
        self.memory = [[mx.full((most, *shape), POISON).astype(dtype) for shape, dtype in own] for own in self.like]
        mx.eval(self.memory)
        self.lock = threading.RLock()  # another thread may read, or copy, a cache
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that hold sequences of which others may take the next step
        self.order: list[int] = []  # whose the memory's rows are
        self._stepping: list[int] = []  # the owners while a step replaces them; none if it is interrupted
        self._apart: dict[int, tuple[ByLayers, int]] = {}  # states that are in no row: arrays, and which of their rows
        self._read: tuple[list[int], ByLayers] | None = None  # what was read last, while it is so

    def __bool__(self) -> bool:
        return any(self.like)

    @property
    def nbytes(self) -> int:
        apart = {id(array): array.nbytes for arrays, _ in self._apart.values() for own in arrays for array in own}
        return sum(array.nbytes for own in self.memory for array in own) + sum(apart.values())

    def first(self, rows: int) -> ByLayers:
        """Return the first rows of the memory, without a copy."""
        found = [[array[:rows] for array in own] for own in self.memory]
        mx.eval(found)
        return found

    def of(self, numbers: Sequence[int], layer: int | None = None) -> ByLayers:
        """Return the states of these sequences, of all layers or of one, in new arrays. Earlier steps must have ended."""
        with self.lock:
            if layer is not None:  # of one layer after the other, but read at once
                if self._read is None or self._read[0] != numbers:
                    self._read = [*numbers], self.of(numbers)
                return [[array.__copy__() for array in self._read[1][layer]]]
            if any(number not in self._apart and number not in self.order for number in numbers):
                raise RuntimeError("[decode_step] A sequence's state is lost: its last step was interrupted.\n  fix: start it again")
            places = [self._apart.get(number) or (self.memory, self.order.index(number)) for number in numbers]
            runs = [(arrays, mx.array([row for _, row in run])) for arrays, run in _runs(places)]
            found = [
                [mx.concatenate([mx.take(arrays[at][i], rows, axis=0) for arrays, rows in runs]) for i in range(len(own))]
                for at, own in enumerate(self.like)
            ]
            mx.eval(found)
            return found

    def put(self, numbers: Sequence[int], arrays: ByLayers) -> None:
        """Set the states of these sequences."""
        if not self:
            return
        with self.lock:
            self._read = None
            self._apart |= {number: (arrays, row) for row, number in enumerate(numbers)}

    def leave(self) -> None:
        """Copy states that are in use out of the memory; its rows are free then."""
        with self.lock:
            used = self.in_use()
            if leaving := [number for number in self.order if number in used and number not in self._apart]:
                self.put(leaving, self.of(leaving))
            self.order = []

    def arrange(self, numbers: list[int], step: Any) -> None:
        """Arrange the memory's first rows for a step of these sequences. Earlier steps must have ended."""
        with self.lock:
            if self.order != numbers or not self._apart.keys().isdisjoint(numbers):
                content = self.of(numbers)
                self.put(numbers, content)
                self.leave()
                self.write(step, content, len(numbers))
                self.order = [*numbers]
                used = self.in_use().difference(numbers)
                self._apart = {number: place for number, place in self._apart.items() if number in used}

    def write(self, step: Any, content: ByLayers, rows: int) -> None:
        flat, memory = ([array for own in arrays for array in own] for arrays in (content, self.first(rows)))
        step.fill(flat, [None] * len(flat), memory)

    def begin(self) -> None:
        """A step replaces the states from here on; if it does not reach `end`, they are lost."""
        self.order, self._stepping, self._read = [], self.order, None

    def end(self) -> None:
        """The step has ended."""
        self.order = self._stepping


def _runs(places: list[tuple[ByLayers, int]]) -> list[tuple[ByLayers, list[tuple[ByLayers, int]]]]:
    """Return runs of adjacent sequences whose states are contiguous."""
    runs = (list(run) for _, run in itertools.groupby(places, key=lambda place: id(place[0])))
    return [(run[0][0], run) for run in runs]
