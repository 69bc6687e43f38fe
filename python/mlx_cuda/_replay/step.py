"""A captured step for one cache: captured, compared with the model itself, and launched."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .._loader import native
from .capture import Capture, StandIn, while_captured
from .errors import KEPT, CaptureFailed, NotReplayed, are_kept, own_arrays
from .kinds import BatchedKind, Kind, Place
from .watch import Watch

# Of a captured step's logits against the model's own, by relative norm: other kernels round otherwise, and now and then choose another
# expert; reading a poisoned row gives a far larger error.
LARGEST_ERROR = 0.3


class _Now(threading.local):
    """The step of this thread."""

    deltas: tuple[int, ...] | None = None  # of its sequences: how far positions, which the model counts itself, are from places


now = _Now()


class Taken(NamedTuple):
    """A step that the model has run eagerly and that is to be captured."""

    model: Any
    function: Callable[..., Any]  # its own ``__call__``
    tokens: mx.array  # the caches' last
    caches: list[Any]
    before: list[list[mx.array] | None]  # what it began with, of caches that do not have it any more
    logits: mx.array  # the model's own


class Session(ABC):
    """A captured step, the memory of its caches, and the cache that uses it.

    A library defines the kinds of its caches, and the fakes of its models (``before``: what a step began with).
    """

    @staticmethod
    @abstractmethod
    def kind_of(cache: Any) -> Kind: ...  # NotReplayed where there is none
    @staticmethod
    @abstractmethod
    def stand_in(capture: Capture, kind: Kind, cache: Any, before: Any, memory: list[mx.array], place: int) -> StandIn: ...
    @staticmethod
    @abstractmethod
    def notes_of(model: Any) -> tuple[str, ...]: ...  # attributes that it may write in a step

    def __init__(self, tokens: mx.array, caches: list[Any], stream: mx.Stream) -> None:
        self.stream = stream
        self.kinds = [self.kind_of(cache) for cache in caches]
        if any(array is None for array in self._arrays(caches)):
            raise NotReplayed("its cache is empty")
        self.shape, self.dtype = tokens.shape, tokens.dtype
        self.capacities = [kind.capacity(cache) for kind, cache in zip(self.kinds, caches, strict=True)]
        groups: dict[tuple[Any, ...], int] = {}
        self.groups = [
            groups.setdefault((kind, capacity, kind.state(cache)), len(groups))
            for kind, capacity, cache in zip(self.kinds, self.capacities, caches, strict=True)
        ]
        # The caches of each group, by index: a step goes over them with `map`, which takes less time than a loop over all layers.
        self.members = [[at for at, group in enumerate(self.groups) if group == one] for one in range(len(groups))]
        self.batched: list[tuple[BatchedKind, int, int]] = [
            (cast("BatchedKind", kind), index, group)
            for index, (kind, group) in enumerate(zip(self.kinds, self.groups, strict=True))
            if kind.batched
        ]
        self.sequences: dict[int, tuple[mx.array, mx.array]] = {}  # of groups: what each has beyond the offset and the start
        self.known: list[mx.array] = []  # offsets and left padding of the batched caches that are known
        self.same = native.module(stream).same_arrays
        self.deltas = now.deltas  # those that the step knows
        self.apart = 0 if now.deltas is None else 1  # a place for these
        self.step = native.module(stream).step(tokens, len(groups) + self.apart, stream)
        self.memory = self._memory(caches)
        with own_arrays():
            mx.eval(self.memory)
        self.owner: Callable[[], Any] = lambda: None
        self.owners: list[weakref.ref[Any]] = []  # the caches of all layers, once there are any

    def record(self, taken: Taken, twins: list[Any] | None) -> mx.array:
        """Capture the step, compare its result with the model's own, and return the latter.

        ``twins``: the caches before the step, if there are other processes. These may do something else meanwhile, so a step with
        all-reduces is compared with the model's own without the other processes' parts, and the model's own result is used.
        """
        model, function, tokens, caches, before, expected = taken
        places = self._places(caches, lambda kind, cache, _: kind.last(cache))
        assert places is not None  # noqa: S101  (groups are of caches at equal places)

        def stand_ins(capture: Capture) -> list[StandIn]:
            return [
                self.stand_in(capture, kind, cache, then, list(memory), group)
                for kind, cache, then, memory, group in zip(self.kinds, caches, before, self.memory, self.groups, strict=True)
            ]

        capture = Capture(self.step, len(places) - 1, self.notes_of(model))
        begin_capture(capture, model, function, tokens, stand_ins, shape=expected.shape, places=len(places))
        if not self._read(caches):
            raise NotReplayed("the sequences of its caches begin at different rows")
        own = [kind.arrays(cache) if then is None else then for kind, cache, then in zip(self.kinds, caches, before, strict=True)]
        if not self.step.has_sums:
            shared, result = self._replayed(tokens, places, caches, own, expected)
        elif twins is None:
            raise NotReplayed("its steps contain an all-reduce, but MLX_WORLD_SIZE is not set")
        else:
            try:
                self.step.leave_alone(True)
                with own_arrays():  # what its copies of the caches were made of is computed by now
                    alone = function(model, tokens, cache=twins)
                    mx.eval(alone)
                self._replayed(tokens, places, caches, own, alone)
            finally:
                self.step.leave_alone(False)
            shared, result = self._fill(caches, [kind.arrays(cache) for kind, cache in zip(self.kinds, caches, strict=True)]), expected
        self._give(caches, shared)
        return result

    def _replayed(
        self, tokens: mx.array, places: list[Place], caches: list[Any], arrays: list[list[mx.array]], expected: mx.array
    ) -> tuple[list[mx.array], mx.array]:
        """Return the memory of the caches and the step's result, after it has run once with the expected result."""
        shared = self._fill(caches, arrays)
        replayed: mx.array = self.step.replay(tokens, places, self.stream)
        compare(replayed, expected)
        return shared, replayed

    @classmethod
    def _memory(cls, caches: list[Any]) -> list[list[mx.array]]:
        """Return arrays with as many rows as each cache may grow to; they are not evaluated."""
        kinds = [cls.kind_of(cache) for cache in caches]
        return [
            [kind.memory(array, kind.capacity(cache)) for array in kind.arrays(cache) if array is not None]
            for kind, cache in zip(kinds, caches, strict=True)
        ]

    @classmethod
    def nbytes_for(cls, caches: list[Any]) -> int:
        """Return the size of a session for these caches."""
        return sum(array.nbytes for own in cls._memory(caches) for array in own)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for own in self.memory for array in own)

    def leave(self) -> None:
        """Detach from the cache; the memory is free when nothing refers to its arrays."""
        self.owner = lambda: None

    def release(self) -> None:
        """Give the caches their own arrays, without unused rows."""
        caches = [owner() for owner in self.owners]
        if all(cache is not None for cache in caches) and self.step.owns(self._arrays(caches)):
            for kind, cache in zip(self.kinds, caches, strict=True):
                arrays = without_spare_rows(kind, cache)
                if arrays is not None:
                    kind.give(cache, [mx.contiguous(array) for array in arrays])
                    mx.async_eval(*kind.arrays(cache))  # type: ignore[no-untyped-call]

    @property
    def is_over(self) -> bool:
        """Return whether the last cache is gone."""
        return isinstance(self.owner, weakref.ref) and self.owner() is None

    def is_for(self, stream: mx.Stream) -> bool:
        """Return whether it can run on this stream: the peer memory of its all-reduces belongs to the stream of the capture."""
        return not self.step.has_sums or stream == self.stream

    def take(self, caches: list[Any]) -> bool:
        """Use the memory for other caches that fit, with their contents; return False if they do not fit, or the memory is in use."""
        try:
            if [self.kind_of(cache) for cache in caches] != self.kinds:
                return False
        except NotReplayed:
            return False
        arrays = [kind.arrays(cache) for kind, cache in zip(self.kinds, caches, strict=True)]
        for kind, own, memory in zip(self.kinds, arrays, self.memory, strict=True):
            if len(own) != len(memory) or any(a is None or not kind.fits(a, m) for a, m in zip(own, memory, strict=True)):
                return False
        mx.eval(arrays)  # they may be made of what was in this memory
        if not self.step.free() or self._next(caches) is None or not self._read(caches):
            return False
        self._give(caches, self._fill(caches, arrays))
        return True

    def call(self, tokens: mx.array, caches: list[Any], stream: mx.Stream) -> mx.array | None:
        """Return the logits of the next step; None if the call does not fit the capture."""
        places = self._next(caches) if tokens.shape == self.shape else None
        if not self.is_for(stream):
            return None
        if places is None or not self.step.owns(self._arrays(caches)):
            return None
        known = self.deltas == now.deltas and (not self.batched or self.same(self._vectors(caches), self.known))
        if not known and not self._read(caches):
            return None
        logits: mx.array = self.step.replay(tokens.astype(self.dtype), places, stream)
        for kind, cache, group in zip(self.kinds, caches, self.groups, strict=True):
            kind.advance(cache, places[group])
        if self.batched:
            self._advance(caches, places)
        return logits

    def _vectors(self, caches: list[Any]) -> list[mx.array]:
        return [array for _, index, _ in self.batched for array in (caches[index].offset, caches[index].left_padding)]

    def _read(self, caches: list[Any]) -> bool:
        """Set where each sequence begins, which synchronizes; return False if caches at the same place disagree."""
        if not self.batched and now.deltas is None:
            return True
        vectors = self._vectors(caches)
        mx.eval(vectors)
        batch = self.shape[0]
        found: dict[int, tuple[list[int], list[int]]] = {}
        for kind, index, group in self.batched:
            own = kind.sequences(caches[index])
            if found.setdefault(group, own) != own or [len(each) for each in own] != [batch, batch]:
                return False
        none = ([0] * batch, [0] * batch)
        rows: list[Any] = [found.get(group, none) for group in range(max(self.groups) + 1)]
        rows += [] if now.deltas is None else [(none[0], list(now.deltas))]
        self.step.set_sequences(mx.array(rows, mx.int32))
        self.deltas = now.deltas
        self.sequences = {group: (mx.array(offsets), mx.array(starts)) for group, (offsets, starts) in found.items()}
        self.known = [array.__copy__() for array in vectors]  # which += leaves alone
        return True

    def _advance(self, caches: list[Any], places: list[Place]) -> None:
        """Update the batched caches' own arrays: lazily evaluated sums."""
        offsets = {group: of + (places[group].offset + 1) for group, (of, _) in self.sequences.items()}
        starts = {group: of + places[group].start for group, (_, of) in self.sequences.items() if places[group].start}
        for at, (_, index, group) in enumerate(self.batched):
            self.known[2 * at] = offsets[group]
            caches[index].offset = offsets[group].__copy__()  # each its own object, for +=
            if group in starts:
                self.known[2 * at + 1] = starts[group]
                caches[index].left_padding = starts[group].__copy__()

    def _next(self, caches: list[Any]) -> list[Place] | None:
        return self._places(caches, lambda kind, cache, capacity: kind.next(cache, capacity))

    def _places(self, caches: list[Any], place_of: Callable[[Kind, Any, int], Place | None]) -> list[Place] | None:
        if len(caches) != len(self.kinds):
            return None
        places: list[Place] = []
        for members in self.members:
            first = members[0]
            kind = self.kinds[first]
            states = list(map(kind.state, map(caches.__getitem__, members)))
            place = place_of(kind, caches[first], self.capacities[first]) if states.count(states[0]) == len(states) else None
            if place is None:
                return None
            places.append(place)
        return [*places, *[Place(0, 0, 1)] * self.apart]

    def _arrays(self, caches: list[Any]) -> list[Any]:
        return [array for kind, cache in zip(self.kinds, caches, strict=True) for array in kind.arrays(cache)]

    def _fill(self, caches: list[Any], arrays: list[list[mx.array]]) -> list[mx.array]:
        """Copy the caches' arrays, or those before the step, to the memory."""
        content = [kind.content(cache, a) for kind, cache, own in zip(self.kinds, caches, arrays, strict=True) for a in own]
        memory = [array for own in self.memory for array in own]
        return list(self.step.fill([array for array, _ in content], [rows for _, rows in content], memory))

    def _give(self, caches: list[Any], shared: list[mx.array]) -> None:
        self.step.clear([kind.used(cache) for kind, cache, own in zip(self.kinds, caches, self.memory, strict=True) for _ in own])
        rest = iter(shared)
        for kind, cache, memory in zip(self.kinds, caches, self.memory, strict=True):
            kind.settle(cache)
            kind.give(cache, [next(rest) for _ in memory])
        self.owners = list(map(weakref.ref, caches))
        self.owner = self.owners[0]


def begin_capture(
    capture: Capture,
    model: Any,
    function: Callable[..., Any],
    tokens: mx.array,
    stand_ins: Callable[[Capture], list[StandIn]],
    *,
    shape: tuple[int, ...],
    places: int,
) -> None:
    """Capture what a model does with its fakes, for other tokens than these; its logits must have this shape."""
    step = capture.step
    random: Any = mx.random.state
    drawn = random[0]
    weights = Watch(model, mx.default_stream(mx.default_device()), capture.notes)

    def encode(capture: Capture) -> None:
        given, result = _called(capture, model, function, stand_ins)
        if not isinstance(result, mx.array) or result.shape != shape:
            raise NotReplayed("it returns something else than logits")
        if any(not each.has_row for each in given):
            raise NotReplayed("a cache is given no row by a step of one token")
        if random[0] is not drawn:
            raise NotReplayed("it draws random numbers")
        if not weights.same(model):
            raise NotReplayed("it changes what it holds itself")
        # For another token at another place: what is not in the graph does not have the right value by chance.
        other = mx.where(tokens == 0, 1, 0).astype(tokens.dtype)
        result = mx.contiguous(result)
        new, memory = ([array for each in given for array in each.replaced()[i]] for i in range(2))
        if new:
            result = step.finish(result, new, memory)
        step.record(result, other, [Place(0, 0, 1)] * places)

    while_captured(capture, encode)
    if step.nodes == 0:
        raise NotReplayed("MLX_USE_CUDA_GRAPHS=0 is set")
    # And MLX moves the memory of an array that the host reads, of which the captured graph knows nothing.
    if are_kept(step.has_arrays_left):
        raise NotReplayed(KEPT)


def _called(
    capture: Capture, model: Any, function: Callable[..., Any], stand_ins: Callable[[Capture], list[StandIn]]
) -> tuple[list[StandIn], Any]:
    """Return the fakes and the model's results. If its code does not run with mlx-cuda's masks, only those of caches are given."""
    given = stand_ins(capture)
    try:
        return given, function(model, capture.step.tokens(), cache=[each.shown for each in given])
    except (NotReplayed, CaptureFailed):
        raise
    except Exception as error:
        if capture.more_masks and any(not each.gives_masks for each in given):
            capture.more_masks = False
            capture.forget()
            return _called(capture, model, function, stand_ins)
        if isinstance(error, RuntimeError):  # as of memory that is full
            raise CaptureFailed(str(error)) from error
        # Of the model's code, which fakes were given to, and nothing of the caller's.
        raise NotReplayed(f"the model's code does not run while it is captured: {error!r}") from error


def compare(replayed: mx.array, expected: mx.array) -> None:
    """Raise where a captured step's logits are not the model's own."""
    with own_arrays():
        # Models mask tokens of their vocabulary by -inf, which is no difference where both have it.
        error = mx.linalg.norm(mx.where(replayed == expected, 0, replayed - expected).astype(mx.float32))
        error /= mx.linalg.norm(mx.where(mx.isinf(expected), 0, expected).astype(mx.float32))
        size = float(error.item())  # type: ignore[arg-type]
    if not size < LARGEST_ERROR:
        raise NotReplayed(f"a captured step gives other logits (relative error {size:.2g})")


def without_spare_rows(kind: Kind, cache: Any) -> list[mx.array] | None:
    """Return the contents of a cache without rows that were never written; None if there are none."""
    arrays, rows = kind.arrays(cache), kind.used(cache)
    if rows is None or any(array is None for array in arrays) or all(array.shape[2] <= rows for array in arrays):
        return None
    return [array[..., :rows, :] for array in arrays]
