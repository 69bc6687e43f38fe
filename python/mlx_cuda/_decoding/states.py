"""What layers replace at each token, as the state of linear attention, of batches whose rows are in pages.

A recorded step finds the states of its sequences in the first rows of memory that all recordings share, in the order of the batch. Where
sequences have joined or left, or another batch of the model has its turn, these rows are put in order anew. Those of sequences that
somebody still has are copied out before.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .caches import POISON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class States:
    """The arrays of all layers that replace theirs, ``[most, …]``, and whose rows they are; sequences are known by their numbers."""

    def __init__(self, arrays: list[list[mx.array]], most: int, in_use: Callable[[], set[int]]) -> None:
        """``arrays``: what layers have of some batch, none of layers with rows. ``in_use``: gives the sequences that somebody has."""
        self.most, self.in_use = most, in_use
        self.like = [[(array.shape[1:], array.dtype) for array in own] for own in arrays]
        self.memory = [[mx.full((most, *shape), POISON).astype(dtype) for shape, dtype in own] for own in self.like]
        mx.eval(self.memory)
        self.order: list[int | None] = []  # whose the memory's rows are
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that hold sequences of which others may take the next step
        self._apart: dict[int, tuple[list[mx.array], int]] = {}  # sequences that have no row: arrays of all layers, and which of their rows
        self._lock = threading.RLock()  # another thread may read a cache

    def __bool__(self) -> bool:
        return any(self.like)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._all)

    @property
    def _all(self) -> list[mx.array]:
        return [array for own in self.memory for array in own]

    def first(self, rows: int) -> list[list[mx.array]]:
        """So many rows of the memory, where they lie."""
        found = [[array[:rows] for array in own] for own in self.memory]
        mx.eval(found)
        return found

    def of(self, numbers: Sequence[int]) -> list[list[mx.array]]:
        """The states of these sequences, by layers, in memory of their own. The steps before have ended."""
        with self._lock:
            missing = [number for number in numbers if number not in self._apart and number not in self.order]
            if missing:
                raise RuntimeError("[decode_step] A cache is read whose sequence has gone on in another one; cure: copy it before.")
            own = self._all
            places = [self._apart.get(number) or (own, self.order.index(number)) for number in numbers]
            parts = [(arrays, mx.array([row for _, row in run])) for arrays, run in _runs(places)]
            flat = [mx.concatenate([mx.take(arrays[i], rows, axis=0) for arrays, rows in parts]) for i in range(len(own))]
            mx.eval(flat)
            return self._by_layers(flat)

    def put(self, numbers: Sequence[int], arrays: list[list[mx.array]]) -> None:
        """Have these be the states of these sequences."""
        with self._lock:
            flat = [array for own in arrays for array in own]
            self._apart |= {number: (flat, row) for row, number in enumerate(numbers)}
            self.order = [number if number not in self._apart else None for number in self.order]

    def leave(self, but: Sequence[int] = ()) -> None:
        """Copy out of the memory what somebody has, but for these sequences; its rows are nobody's then."""
        with self._lock:
            used = self.in_use().difference(but)
            if leaving := [number for number in self.order if number in used]:
                self.put(leaving, self.of(leaving))
            self.order = []

    def arrange(self, numbers: list[int], step: Any) -> None:
        """Have the memory's first rows be those of these sequences, for a step of theirs. The steps before have ended."""
        with self._lock:
            if self.order == numbers:
                return
            content = self.of(numbers)
            self.leave(numbers)
            self.write(step, content, len(numbers))
            self.order = [*numbers]
            for number in numbers:
                self._apart.pop(number, None)

    def forget(self) -> None:
        """Let go of what nobody has any more."""
        if self._apart:
            with self._lock:
                used = self.in_use()
                self._apart = {number: place for number, place in self._apart.items() if number in used}

    def write(self, step: Any, content: list[list[mx.array]], rows: int) -> None:
        flat, memory = ([array for own in arrays for array in own] for arrays in (content, self.first(rows)))
        step.fill(flat, [None] * len(flat), memory)

    def _by_layers(self, flat: list[mx.array]) -> list[list[mx.array]]:
        rest = iter(flat)
        return [[next(rest) for _ in own] for own in self.like]


def _runs(places: list[tuple[list[mx.array], int]]) -> list[tuple[list[mx.array], list[tuple[list[mx.array], int]]]]:
    """Of adjacent sequences, those whose states lie together."""
    runs = (list(run) for _, run in itertools.groupby(places, key=lambda place: id(place[0])))
    return [(run[0][0], run) for run in runs]
