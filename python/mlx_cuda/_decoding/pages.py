"""Keys and values of many sequences in pages, and mlx-lm's caches that have theirs there.

A batched cache of mlx-lm's becomes an object of a class that is made of its own, and holds the numbers of pages in place of arrays. When
sequences join, leave or are given away, lists change and nothing is copied. Whatever else is asked of such an object turns it back first.
Layers that have a state in the place of rows are held by the same sequences (`states.py`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .._attention.paged import in_order
from .._loader import native
from .caches import POISON, BatchedRotating, Replaced, kind_of
from .prefixes import Free, Prefixes
from .recording import WIDEST_QUANTIZED
from .states import States

if TYPE_CHECKING:
    from collections.abc import Sequence as ManyOf

    from .prefixes import Page

PAGE = 64  # rows
AHEAD = 4  # pages that a sequence is given before it needs them, where there are enough
_STATE = "_mlx_cuda_held"
_CONTENT = ("keys", "values", "cache")  # the names of what a cache holds
_numbers = itertools.count()


class Sequence:
    """The pages of one sequence.

    Rows are written once: two that hold the same sequence, and as many rows of it, do not both write the next one.
    """

    __slots__ = ("free", "number", "pages", "rows")

    def __init__(self, free: Free) -> None:
        self.free = free
        self.number = next(_numbers)  # of it alone
        self.pages: list[Page] = []
        self.rows = 0  # that were written

    def reserve(self, rows: int) -> bool:
        """Have pages for so many rows."""
        missing = -(-rows // PAGE) - len(self.pages)
        if missing > 0:
            if missing > len(self.free):
                return False
            wanted = missing + AHEAD if len(self.free) > missing + 16 * AHEAD else missing
            for _ in range(wanted):  # one after the other: another thread, or one that ends here, gives pages back meanwhile
                self.pages.append(self.free.take())
        return True


class Settings:
    """What :func:`mlx_cuda.patch` was asked for."""

    packing: Packing | None = None


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

    def table(self, rows: int, columns: int) -> list[list[int]]:
        """Numbers of pages, of which those that are none are never read."""
        own = [([page.number for page in sequence.pages] + [0] * columns)[:columns] for sequence in self.sequences]
        return own + [[0] * columns] * (rows - len(own))


class Packing(NamedTuple):
    """How pages are quantised, with mode "affine"."""

    group_size: int
    bits: int

    def takes(self, array: mx.array) -> bool:
        dim = array.shape[3]
        return array.dtype in {mx.float16, mx.bfloat16} and dim % 32 == 0 and dim % self.group_size == 0 and dim <= WIDEST_QUANTIZED

    def packed(self, array: mx.array) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array, self.group_size, self.bits))

    def unpacked(self, parts: ManyOf[mx.array]) -> mx.array:
        return mx.dequantize(parts[0], parts[1], parts[2], self.group_size, self.bits)


class Pool:
    """Pages of all layers: keys and values, or the parts of both. The first of them is nobody's: a step is recorded with it.

    And the states of layers that have these, of ``most`` sequences at once.
    """

    def __init__(self, caches: list[Any], count: int, most: int, packing: Packing | None, stream: mx.Stream) -> None:
        self.packing = packing
        self.like = [[(a.shape[1], a.shape[3], a.dtype) for a in keys_and_values(cache)] for cache in caches]
        self.windows = [window_of(cache) for cache in caches]
        self.arrays: list[list[mx.array]] = []
        for pair in self.like:
            parts = self._parts([mx.full((1, heads, PAGE, dim), POISON).astype(dtype) for heads, dim, dtype in pair])
            self.arrays.append([mx.contiguous(mx.broadcast_to(part, (count, *part.shape[1:]))) for part in parts])
            mx.eval(self.arrays[-1])
        self.count = count
        self.free = Free(range(1, count))
        self.prefixes = None if any(self.windows) else Prefixes(PAGE)  # of a window not all rows are there
        self.stream = stream
        self.last: mx.array | None = None  # what was begun last
        self.given: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of sequences that left
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()  # the first layer's cache of each batch
        self.replaced: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of layers with states
        self.states = States(list(map(states_of, caches)), most, functools.partial(_numbers_in_use, self.replaced))

    def _parts(self, rows: ManyOf[mx.array]) -> list[mx.array]:
        return [*rows] if self.packing is None else [part for each in rows for part in self.packing.packed(each)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self.arrays for array in pair) + self.states.nbytes

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
        held = Held(self, tuple(Sequence(self.free) for _ in lengths), tuple(lengths))
        sequences = held.sequences
        parts = [part for cache in caches for part in self._parts(rows_of(cache))] if any(lengths) else []  # of whom one token comes
        if parts and self.prefixes is not None:
            for sequence, digests in zip(sequences, self.prefixes.digests(parts, lengths, stream), strict=True):
                self.prefixes.fill(sequence.pages, digests, self.free)
        if not self.reserve(held):
            return None
        self.wait()
        if parts:
            table = held.table(len(sequences), max(len(sequence.pages) for sequence in sequences))
            native.module(stream).write_to_pages(
                [array for pair in self.arrays for array in pair], parts,
                mx.array(table, mx.int32), mx.array(lengths, mx.int32), stream,
            )  # fmt: skip
        self.states.put(held.numbers, states or list(map(states_of, caches)))
        return held

    def arrange(self, held: Held, step: Any) -> None:
        """Have these sequences' states be where a step of theirs finds them; caches that hold them too have their own from now on."""
        if self.states and (self.states.copies or self.states.order != held.numbers):
            self._settle_copies()
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
            for numbers, copies in itertools.groupby(sorted(self.states.copies, key=_numbers_of), key=_numbers_of):
                content = self.states.of(numbers)
                for cache in copies:
                    _leave(cache, {"cache": [array.__copy__() for array in content[vars(cache)[_STATE][1]]]})

    def reserve(self, held: Held) -> bool:
        """Have pages for one more row of each sequence; what was given away leaves its own where there are too few."""

        def all_have() -> bool:
            return all(sequence.reserve(length + 1) for sequence, length in zip(held.sequences, held.lengths, strict=True))

        return all_have() or (self.make_room() and all_have())

    def rows(self, held: Held, layer: int) -> list[mx.array]:
        """Keys and values of a layer, ``[B, heads, rows, dim]``, which end at the same row."""
        longest = max(held.lengths)
        count = min(longest, self.windows[layer] or longest)
        table = mx.array(held.table(len(held.lengths), -(-longest // PAGE)), mx.int32)
        place = mx.arange(count) + mx.array(held.lengths)[:, None] - count
        self.wait()
        index = mx.maximum(place, 0)[:, None, :, None]
        arrays = [mx.take_along_axis(in_order(pages, table), index, axis=2) for pages in self.arrays[layer]]
        if self.packing is not None:
            arrays = [self.packing.unpacked(arrays[first : first + 3]) for first in (0, 3)]
        mx.eval(arrays)
        return arrays

    def make_room(self) -> bool:
        """Have what was given away be copied to memory of its own; whether there was any."""
        given, copies = list(self.given), len(self.states.copies)
        for cache in given:
            settle(cache)
        if copies:
            self._settle_copies()
        return bool(given) or copies > 0


def settle(cache: Any) -> Any:
    """A cache, which is no more in pages."""
    held, layer, rest = vars(cache)[_STATE]
    if not held.pool.states.like[layer]:
        keys, values = held.pool.rows(held, layer)
        return _leave(cache, {**_places(held, rest), "keys": keys, "values": values})
    held.pool.wait()
    with held.pool.states.lock:
        if not is_in_pages(cache):  # another thread was faster
            return cache
        return _leave(cache, {"cache": held.pool.states.of(vars(cache)[_STATE][0].numbers, layer)[0]})


def _leave(cache: Any, content: dict[str, Any]) -> Any:
    held, _, rest = vars(cache)[_STATE]
    for caches in (held.pool.given, held.pool.batches, held.pool.replaced, held.pool.states.copies):
        caches.discard(cache)
    vars(cache).update(rest, **content)  # which nobody sees before the class is its own
    cache.__class__ = plain_class(cache)
    del vars(cache)[_STATE]
    return cache


def known_again(caches: list[Any]) -> None:
    """Of caches that were put back: those that have states in pages again, which somebody else may have by now."""
    for cache in caches:
        if is_in_pages(cache) and not has_rows(cache):
            pool = vars(cache)[_STATE][0].pool
            with pool.states.lock:
                pool.replaced.add(cache)
                pool.states.copies.add(cache)


def _numbers_in_use(caches: weakref.WeakSet[Any]) -> set[int]:
    """The sequences whose states somebody has. A cache whose first step was interrupted has been put back, and has none.

    No method of the pool: one that it holds itself would keep its memory until Python's collector comes.
    """
    states = [vars(cache).get(_STATE) for cache in list(caches)]
    return {number for state in states if state is not None for number in state[0].numbers}


def _numbers_of(cache: Any) -> list[int]:
    numbers: list[int] = vars(cache)[_STATE][0].numbers
    return numbers


def _places(held: Held, rest: dict[str, Any]) -> dict[str, Any]:
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


def enter(cache: Any, held: Held, layer: int) -> None:
    """Have a cache be in pages, in place of its arrays."""
    rest = {name: None if name in _CONTENT else value for name, value in vars(cache).items()}
    vars(cache)[_STATE] = (held, layer, rest)
    cache.__class__ = _in_pages(type(cache), tuple(rest))  # type: ignore[arg-type]
    for name in rest:
        del vars(cache)[name]
    if held.pool.states.like[layer]:
        with held.pool.states.lock:
            held.pool.replaced.add(cache)


def give_away(cache: Any, held: Held, layer: int) -> Any:
    """A cache that is in pages, and is not the one that goes on there."""
    enter(cache, held, layer)
    if held.pool.states.like[layer]:
        with held.pool.states.lock:
            held.pool.states.copies.add(cache)
    else:
        held.pool.given.add(cache)
    return cache


def has_rows(cache: Any) -> bool:
    """Whether it has rows, not a state."""
    return plain_class(cache).__name__ != Replaced.name


def keys_and_values(cache: Any) -> list[mx.array]:
    return [cache.keys, cache.values] if has_rows(cache) else []


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
    """Keys and values of a batch's cache, the oldest first; nothing of a state."""
    if not has_rows(cache):
        return []
    if getattr(cache, "rotated", False):
        return [mx.roll(array, -cache._idx, 2) for array in (cache.keys, cache.values)]
    return [array[..., : cache._idx, :] for array in (cache.keys, cache.values)]


def is_in_pages(cache: Any) -> bool:
    return hasattr(type(cache), _STATE)


def plain_class(cache: Any) -> type:
    """What the cache is, or would be with arrays of its own."""
    return type(cache).__mro__[1] if is_in_pages(cache) else type(cache)


def held_by(caches: list[Any]) -> Held | None:
    """What caches of all layers hold, if all of them are in the same pages."""
    if not all(is_in_pages(cache) for cache in caches):
        return None
    first: Held = vars(caches[0])[_STATE][0]
    same = all((state := vars(cache)[_STATE])[0] == first and state[1] == layer for layer, cache in enumerate(caches))
    return first if same and len(caches) == len(first.pool.arrays) else None


def hold(caches: list[Any], held: Held) -> None:
    """Have caches hold this, which are the ones that write the next row."""
    for sequence, length in zip(held.sequences, held.lengths, strict=True):
        sequence.rows = max(sequence.rows, length)
    for layer, cache in enumerate(caches):
        if is_in_pages(cache):
            state = vars(cache)[_STATE]
            vars(cache)[_STATE] = (held, *state[1:])
        else:
            enter(cache, held, layer)
    held.pool.batches.add(caches[0])
    held.pool.states.end()


def _attribute(name: str) -> property:
    def read(cache: Any) -> Any:
        if name in _CONTENT:
            return getattr(settle(cache), name)
        held, _, rest = vars(cache)[_STATE]
        return (rest | _places(held, rest))[name]

    return property(read, lambda cache, value: setattr(settle(cache), name, value))


@functools.cache
def _in_pages(plain: Any, names: tuple[str, ...]) -> type:
    """The class of such caches: where somebody reads their arrays, or writes to them, they are what they were."""

    def held_of(cache: Any) -> Held:
        held: Held = vars(cache)[_STATE][0]
        return held

    def change(cache: Any, held: Held) -> None:
        vars(cache)[_STATE] = (held, *vars(cache)[_STATE][1:])

    def filter_(cache: Any, batch_indices: Any) -> None:
        if not isinstance(batch_indices, list) or not batch_indices:
            settle(cache).filter(batch_indices)
        else:
            change(cache, held_of(cache).only(batch_indices))

    def extend(cache: Any, other: Any) -> None:
        held = held_of(cache)
        if is_in_pages(other) and held_of(other).pool is held.pool:
            more = held_of(other)
            change(cache, Held(held.pool, held.sequences + more.sequences, held.lengths + more.lengths))
            if not has_rows(other):
                with held.pool.states.lock:
                    held.pool.states.copies.add(other)
        else:
            settle(cache).extend(other)

    def copied(cache: Any, memo: dict[int, Any]) -> Any:
        held, layer, rest = vars(cache)[_STATE]
        other = object.__new__(plain)
        vars(other).update(copy.deepcopy(rest, memo))
        return give_away(other, held, layer)

    def extract(cache: Any, idx: int) -> Any:
        held, layer, _ = vars(cache)[_STATE]
        window, arrays = held.pool.windows[layer], len(held.pool.states.like[layer])
        if arrays:
            one = plain(arrays)
        else:
            classes = plain.update_and_fetch.__globals__
            one = classes["KVCache"]() if window is None else classes["RotatingKVCache"](window)
        return give_away(one, held.only([idx]), layer)

    def nbytes(cache: Any) -> int:
        held, layer, _ = vars(cache)[_STATE]
        if like := held.pool.states.like[layer]:
            return sum(len(held.sequences) * math.prod(shape) * dtype.size for shape, dtype in like)
        rows = PAGE * sum(len(sequence.pages) for sequence in held.sequences)
        return sum(rows * heads * dim * dtype.size for heads, dim, dtype in held.pool.like[layer])  # as many as its own arrays would have

    own: dict[str, Any] = {name: _attribute(name) for name in names}
    own.update(
        __module__=plain.__module__,
        **{_STATE: True},
        # Who makes another one of this class has a plain one.
        __new__=lambda _, *arguments, **options: plain(*arguments, **options),
        from_state=getattr(plain, "from_state", None),
        empty=lambda cache: False,  # noqa: ARG005
        nbytes=property(nbytes),
        __deepcopy__=copied,
        __reduce_ex__=lambda cache, protocol: settle(cache).__reduce_ex__(protocol),
    )
    if "left_padding" in names:
        own.update(filter=filter_, extend=extend, extract=extract)
    cls: type = type(plain.__name__, (plain,), own)
    return cls
