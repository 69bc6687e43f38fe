"""The fakes that mlx-lm's models get instead of caches during a capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import mlx.core as mx

from .._attention.paged import in_order
from .._replay import step
from .._replay.capture import Capture, Pages, StandIn
from .._replay.errors import NotReplayed
from .._replay.kinds import Kind
from .._replay.packing import WIDEST_QUANTIZED
from .caches import Batched, BatchedRotating, Quantized, RowKind, kind_of
from .copies import package_of
from .positions import notes_of

ASKING = set[str]()  # packages whose models ask on the host whether a token is the first of its sequence


class Position(mx.array):
    """A token's position in device memory. Models that compare it with 0 run their first step eagerly."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Any:
        return False if isinstance(other, int) and other == 0 else super().__eq__(other)


def position_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-vlm's number of tokens in a cache, which a captured step reads on the device."""
    ASKING.add(package_of(theirs))

    @wraps(theirs)
    def cache_position_offset(cache: Any) -> Any:
        return cache.position() if isinstance(cache, RowStandIn) else theirs(cache)

    return cache_position_offset


class RowStandIn(StandIn):
    """The fake of a cache with one row per token."""

    def __init__(self, capture: Capture, kind: RowKind, memory: list[mx.array], place: int) -> None:
        self.capture = capture
        self.kind = kind
        self.memory = memory
        self.place = place
        self.starts: mx.array | None = None
        self.fetched: tuple[Any, Any] | None = None  # what attention is given
        self.has_row, self.gives_masks = False, kind.batched
        if kind.batched:
            self.offset = capture.step.offsets(place)
            self.starts = self.left_padding = capture.step.starts(place)
        else:
            self.offset = capture.step.offset(place)

    def position(self) -> Position:
        """Return the number of tokens in its cache, including left padding in a batch."""
        step, place = self.capture.step, self.place
        return Position((step.row(place) if self.kind is Batched else step.offset(place)) + int(self.fetched is not None))

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:  # noqa: ARG002, N803
        if N != 1:
            raise NotReplayed("a mask is asked for several tokens")
        step, capacity = self.capture.step, self.memory[0].shape[2]
        window = self.kind.window(window_size, capacity)
        if window is None and self.starts is None and not self.capture.more_masks:
            return None
        row, lengths, starts = mx.arange(capacity), step.lengths(self.place), self.starts
        length = lengths[:1]
        if self.kind is BatchedRotating and starts is not None:  # padding is the oldest of the rows, wherever they begin
            age = mx.remainder(step.row(self.place) - row, capacity)
            mask: mx.array = age < (length - mx.maximum(starts, 0))[:, None, None, None]
            self.capture.masks[id(mask)] = (mask, self.place, {"mask": mask})
            return mask
        mask = row < length
        if window is not None:
            mask = mask & (length <= row + window)
        if starts is not None:
            mask = mask & (starts[:, None, None, None] <= row)
        seen = {"lengths": lengths, "left_padding": starts, "window_size": None if window is None else window - 1}
        self.capture.masks[id(mask)] = (mask, self.place, seen)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._check(keys, values, (self.memory[0].shape[3], self.memory[1].shape[3]))
        keys, values = (given.astype(memory.dtype) for given, memory in zip((keys, values), self.memory, strict=True))
        self._appended(self.capture.step.append(keys, values, *self.memory, self.place))
        return self._given(self.memory[0], self.memory[1])

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return keys and values for layers that attend to another layer's."""
        if self.fetched is None:
            raise NotReplayed("rows of a cache are read before it has the token's own")
        return self.fetched

    def _given(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.fetched is not None:
            raise NotReplayed("a cache is given several rows by a step of one token")
        self.fetched, self.has_row = (keys, values), True
        return self.fetched

    def _check(self, keys: mx.array, values: mx.array, dims: tuple[int, int]) -> None:
        for given, dim in zip((keys, values), dims, strict=True):
            if given.shape != (*self.memory[0].shape[:2], 1, dim):
                raise NotReplayed(f"keys or values of shape {given.shape} go to a cache of {self.memory[0].shape[:2]} with rows of {dim}")

    def _appended(self, memory: list[mx.array]) -> None:
        self.memory = memory
        self.offset = self.offset + 1
        self.capture.places[id(memory[0])] = (memory[0], self.place)


class PagedStandIn(RowStandIn):
    """The fake of a paged batch; quantized if a ``form`` is given. Each sequence has its own first row."""

    def __init__(
        self,
        capture: Capture,
        memory: list[mx.array],
        capacity: int,
        form: tuple[int, int] | None = None,
        window: int | None = None,
        place: int = 0,
    ) -> None:
        super().__init__(capture, Batched, memory, place)
        self.capacity, self.form, self.window = capacity, form, window

    def position(self) -> Position:
        return Position(self.capture.step.lengths(self.place).max() - int(self.fetched is None))

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:  # noqa: ARG002, N803
        if N != 1:
            raise NotReplayed("a mask is asked for several tokens")
        lengths = self.capture.step.lengths(self.place)
        row, ends = mx.arange(self.capacity), lengths[:, None, None, None]
        window_size = min(filter(None, (window_size, self.window)), default=None)
        mask: mx.array = row < ends if window_size is None else (row < ends) & (ends <= row + window_size)
        seen = {"lengths": lengths, "window_size": None if window_size is None else window_size - 1}
        self.capture.masks[id(mask)] = (mask, self.place, seen)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step, memory = self.capture.step, self.memory
        if self.form is None:
            self._check_pages(keys, values, (memory[0].shape[3], memory[1].shape[3]))
            keys, values = (given.astype(pages.dtype) for given, pages in zip((keys, values), memory, strict=True))
            self.memory = step.append(keys, values, *memory, self.place)
            ordered = [in_order(pages, step.table(self.place)) for pages in self.memory]
        else:
            group, bits = self.form
            self._check_pages(keys, values, (memory[1].shape[3] * group, memory[4].shape[3] * group))
            keys, values = (given.astype(memory[i].dtype) for given, i in ((keys, 1), (values, 4)))
            self.memory = step.append_quantized(keys, values, memory, group, bits, self.place)
            parts = [in_order(pages, step.table(self.place)) for pages in self.memory]
            ordered = [mx.dequantize(parts[i], parts[i + 1], parts[i + 2], group, bits) for i in (0, 3)]
        self.offset = self.offset + 1
        # Computations other than attention get them in order; attention does not use these.
        self.capture.places[id(ordered[0])] = (ordered[0], self.place)
        self.capture.pages[id(ordered[0])] = Pages(self.memory, self.form, self.window, self.place)
        return self._given(ordered[0], ordered[1])

    def _check_pages(self, keys: mx.array, values: mx.array, dims: tuple[int, int]) -> None:
        batch, heads = self.offset.shape[0], self.memory[0].shape[1]
        for given, dim in zip((keys, values), dims, strict=True):
            if given.shape != (batch, heads, 1, dim):
                raise NotReplayed(f"keys or values of shape {given.shape} go to pages of {heads} heads with rows of {dim}")


class QuantizedStandIn(RowStandIn):
    """The fake of a quantized cache."""

    def __init__(self, capture: Capture, memory: list[mx.array], place: int, form: tuple[int, int]) -> None:
        super().__init__(capture, Quantized, memory, place)
        self.group_size, self.bits = form

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        step, group, bits = self.capture.step, self.group_size, self.bits
        dims = (self.memory[1].shape[3] * group, self.memory[4].shape[3] * group)
        self._check(keys, values, dims)
        keys, values = (given.astype(self.memory[i].dtype) for given, i in ((keys, 1), (values, 4)))
        if bits in {4, 8} and max(dims) <= WIDEST_QUANTIZED:
            self._appended(step.append_quantized(keys, values, self.memory, group, bits, self.place))
        else:
            parts = zip(*(mx.quantize(each, group_size=group, bits=bits) for each in (keys, values)), strict=True)
            pairs = [step.append(k, v, self.memory[i], self.memory[i + 3], self.place) for i, (k, v) in enumerate(parts)]
            self._appended([k for k, _ in pairs] + [v for _, v in pairs])
        return self._given(tuple(self.memory[:3]), tuple(self.memory[3:]))


class ReplacedStandIn(StandIn):
    """The fake of a cache whose arrays are replaced. ``changes``: whether the model replaces each of them.

    The model gets another cache of the same class, whose methods work on these arrays.
    """

    def __init__(self, capture: Capture, memory: list[mx.array], cls: type, changes: list[bool]) -> None:
        self.memory, self.changes = memory, changes
        self.given = [capture.step.content(array) for array in memory]
        self._shown: Any = cls(len(memory))
        self._shown.cache = list(self.given)

    @property
    def shown(self) -> Any:
        return self._shown

    def replaced(self) -> tuple[list[mx.array], list[mx.array]]:
        found: tuple[list[mx.array], list[mx.array]] = ([], [])
        for value, given, memory, changes in zip(self.shown.cache, self.given, self.memory, self.changes, strict=True):
            if changes != (value is not given):
                raise NotReplayed("other arrays of its cache are replaced while it is captured")
            if changes:
                if not isinstance(value, mx.array) or (value.shape, value.dtype) != (memory.shape, memory.dtype):
                    raise NotReplayed("an array of its cache is replaced by one of another shape or dtype")
                found[0].append(value)
                found[1].append(memory)
        return found


def stand_in(
    capture: Capture, kind: Kind, cache: Any, before: list[mx.array] | None, memory: list[mx.array], place: int
) -> RowStandIn | ReplacedStandIn:
    """Return the fake of a cache; ``before``: its arrays, if the step replaces some."""
    if before is not None:
        changes = [one is not other for one, other in zip(before, kind.arrays(cache), strict=True)]
        return ReplacedStandIn(capture, memory, type(cache), changes)
    if kind is Quantized:
        return QuantizedStandIn(capture, memory, place, Quantized.form(cache))
    return RowStandIn(capture, cast("RowKind", kind), memory, place)


class Session(step.Session):
    """A captured step of mlx-lm's caches."""

    kind_of = staticmethod(kind_of)
    stand_in = staticmethod(stand_in)
    notes_of = staticmethod(notes_of)
