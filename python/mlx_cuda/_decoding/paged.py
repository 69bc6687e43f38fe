"""Batches whose sequences join and leave: keys and values in pages, which the recordings for all sizes of a batch share.

A batched cache of mlx-lm's becomes an object of a class that is made of its own, and holds the numbers of pages in place of arrays. When
sequences join, leave or are given away, lists change and nothing is copied. Whatever else is asked of such an object turns it back first.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .._attention.paged import in_order
from .._loader import native
from .caches import POISON, Batched, BatchedRotating, NotReplayed, Place, kind_of
from .recording import WIDEST_QUANTIZED, PagedStandIn
from .step import begin_recording, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ManyOf

PAGE = 64  # rows
AHEAD = 4  # pages that a sequence is given before it needs them, where there are enough
LEAST_ROWS = 16384  # of all sequences
HEADROOM = 512  # rows for each sequence of the largest batch that is expected, beside those that the first ones have
EXPECTED = 48  # sequences: mlx-lm's server has up to 32, and as many more as it takes at a time
LARGEST_PART = 1 / 6  # of what MLX may use, for the first pages; more where they turn out to be too few
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128)
_STATE = "_mlx_cuda_held"
_numbers = itertools.count()


class Sequence:
    """The pages of one sequence, which are free again when nobody holds it any more."""

    __slots__ = ("free", "number", "pages")

    def __init__(self, free: list[int]) -> None:
        self.free = free
        self.number = next(_numbers)  # of it alone
        self.pages: list[int] = []

    def reserve(self, rows: int) -> bool:
        """Have pages for so many rows."""
        missing = -(-rows // PAGE) - len(self.pages)
        if missing > 0:
            if missing > len(self.free):
                return False
            wanted = missing + AHEAD if len(self.free) > missing + 16 * AHEAD else missing
            self.pages += self.free[-wanted:]
            del self.free[-wanted:]
        return True

    def __del__(self) -> None:
        self.free.extend(self.pages)


class Settings:
    """What :func:`mlx_cuda.patch` was asked for."""

    packing: Packing | None = None


settings = Settings()


class Held(NamedTuple):
    """What a cache in pages holds: sequences, and how many rows of each."""

    pool: Pool
    sequences: tuple[Sequence, ...]
    lengths: tuple[int, ...]

    def only(self, indices: ManyOf[int]) -> Held:
        return Held(self.pool, tuple(self.sequences[i] for i in indices), tuple(self.lengths[i] for i in indices))

    def table(self, rows: int, columns: int) -> list[list[int]]:
        """Numbers of pages, of which those that are none are never read."""
        own = [(sequence.pages + [0] * columns)[:columns] for sequence in self.sequences]
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
    """Pages of all layers: keys and values, or the parts of both. The first of them is nobody's: a step is recorded with it."""

    def __init__(self, caches: list[Any], count: int, packing: Packing | None, stream: mx.Stream) -> None:
        self.packing = packing
        self.like = [[(a.shape[1], a.shape[3], a.dtype) for a in (cache.keys, cache.values)] for cache in caches]
        self.windows = [_window(cache) for cache in caches]
        self.arrays: list[list[mx.array]] = []
        for pair in self.like:
            parts = self._parts([mx.full((1, heads, PAGE, dim), POISON).astype(dtype) for heads, dim, dtype in pair])
            self.arrays.append([mx.contiguous(mx.broadcast_to(part, (count, *part.shape[1:]))) for part in parts])
            mx.eval(self.arrays[-1])
        self.count = count
        self.free = list(range(1, count))
        self.stream = stream
        self.last: mx.array | None = None  # what was begun last
        self.given: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of sequences that left
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()  # the first layer's cache of each batch

    def _parts(self, rows: ManyOf[mx.array]) -> list[mx.array]:
        return [*rows] if self.packing is None else [part for each in rows for part in self.packing.packed(each)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self.arrays for array in pair)

    def wait(self) -> None:
        if self.last is not None:
            mx.eval(self.last)

    def load(self, caches: list[Any], stream: mx.Stream) -> Held | None:
        """What caches of mlx-lm's hold, copied to pages; None where there are too few."""
        lengths = caches[0].offset.tolist()
        sequences = tuple(Sequence(self.free) for _ in lengths)
        if not all(sequence.reserve(length + 1) for sequence, length in zip(sequences, lengths, strict=True)):
            return None
        held = Held(self, sequences, tuple(lengths))
        table = held.table(len(sequences), max(len(sequence.pages) for sequence in sequences))
        self.wait()
        native.module(stream).write_to_pages(
            [array for pair in self.arrays for array in pair],
            [part for cache in caches for part in self._parts(_rows(cache))],
            mx.array(table, mx.int32), mx.array(lengths, mx.int32), stream,
        )  # fmt: skip
        return held

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
        given = list(self.given)
        for cache in given:
            settle(cache)
        return bool(given)


def settle(cache: Any) -> Any:
    """A cache, which is no more in pages."""
    held, layer, rest = vars(cache)[_STATE]
    keys, values = held.pool.rows(held, layer)
    vars(cache).update(rest, **_places(held, rest), keys=keys, values=values)  # which nobody sees before the class is its own
    cache.__class__ = type(cache).__mro__[1]
    del vars(cache)[_STATE]
    held.pool.given.discard(cache)
    held.pool.batches.discard(cache)
    return cache


def _places(held: Held, rest: dict[str, Any]) -> dict[str, Any]:
    """Where a batch's sequences, or the only one, begin and end, by the names that caches have for that."""
    longest = max(held.lengths)
    rows = min(longest, rest.get("max_size", longest))
    places: dict[str, Any] = {"_idx": rows, "_offset": longest, "rotated": False, "offset": longest}
    if "left_padding" in rest:
        offsets = mx.array(held.lengths)
        places |= {"offset": offsets, "left_padding": rows - mx.minimum(offsets, rows)}
    return {name: value for name, value in places.items() if name in rest}


def enter(cache: Any, held: Held, layer: int) -> None:
    """Have a cache be in pages, in place of its arrays."""
    rest = {**vars(cache), "keys": None, "values": None}
    vars(cache)[_STATE] = (held, layer, rest)
    cache.__class__ = _in_pages(type(cache), tuple(rest))  # type: ignore[arg-type]
    for name in rest:
        del vars(cache)[name]


def _window(cache: Any) -> int | None:
    """How many rows there are at most."""
    return cache.max_size if kind_of(cache) is BatchedRotating else None


def _rows(cache: Any) -> list[mx.array]:
    """Keys and values of a batch's cache, the oldest first."""
    if getattr(cache, "rotated", False):
        return [mx.roll(array, -cache._idx, 2) for array in (cache.keys, cache.values)]
    return [array[..., : cache._idx, :] for array in (cache.keys, cache.values)]


def is_in_pages(cache: Any) -> bool:
    return hasattr(type(cache), _STATE)


def held_by(caches: list[Any]) -> Held | None:
    """What caches of all layers hold, if all of them are in the same pages."""
    if not all(is_in_pages(cache) for cache in caches):
        return None
    first: Held = vars(caches[0])[_STATE][0]
    same = all((state := vars(cache)[_STATE])[0] == first and state[1] == layer for layer, cache in enumerate(caches))
    return first if same and len(caches) == len(first.pool.arrays) else None


def hold(caches: list[Any], held: Held) -> None:
    """Have caches hold this."""
    for layer, cache in enumerate(caches):
        if is_in_pages(cache):
            state = vars(cache)[_STATE]
            vars(cache)[_STATE] = (held, *state[1:])
        else:
            enter(cache, held, layer)
    held.pool.batches.add(caches[0])


def _attribute(name: str) -> property:
    def read(cache: Any) -> Any:
        if name in {"keys", "values"}:
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
        if not isinstance(batch_indices, list) or not batch_indices or len({*batch_indices}) < len(batch_indices):
            settle(cache).filter(batch_indices)
        else:
            change(cache, held_of(cache).only(batch_indices))

    def extend(cache: Any, other: Any) -> None:
        held = held_of(cache)
        if is_in_pages(other) and held_of(other).pool is held.pool:
            more = held_of(other)
            change(cache, Held(held.pool, held.sequences + more.sequences, held.lengths + more.lengths))
        else:
            settle(cache).extend(other)

    def extract(cache: Any, idx: int) -> Any:
        held, layer, _ = vars(cache)[_STATE]
        classes = plain.update_and_fetch.__globals__
        window = held.pool.windows[layer]
        one = classes["KVCache"]() if window is None else classes["RotatingKVCache"](window)
        enter(one, held.only([idx]), layer)
        held.pool.given.add(one)
        return one

    def nbytes(cache: Any) -> int:
        held, layer, _ = vars(cache)[_STATE]
        pages = sum(len(sequence.pages) for sequence in held.sequences)
        return pages * sum(array.nbytes for array in held.pool.arrays[layer]) // held.pool.count  # type: ignore[no-any-return]

    own: dict[str, Any] = {name: _attribute(name) for name in names}
    own.update(
        __module__=plain.__module__,
        **{_STATE: True},
        size=lambda cache: cache._idx,
        empty=lambda cache: False,  # noqa: ARG005
        nbytes=property(nbytes),
        __reduce_ex__=lambda cache, protocol: settle(cache).__reduce_ex__(protocol),  # a copy has arrays of its own
    )
    if "left_padding" in names:
        own.update(filter=filter_, extend=extend, extract=extract)
    cls: type = type(plain.__name__, (plain,), own)
    return cls


class PagedSession:
    """A recorded step for so many sequences, or fewer, of so many pages."""

    def __init__(self, model: Any, pool: Pool, tokens: mx.array, columns: int, stream: mx.Stream) -> None:
        self.pool, self.columns = pool, columns
        self.batch, self.dtype = bucket_of(tokens.shape[0]), tokens.dtype
        self.held = native.module(stream).Held(model)
        self.step = native.module(stream).step(mx.zeros((self.batch, 1), tokens.dtype), 1, stream, (PAGE, columns))
        self.known: tuple[Any, ...] = ()  # of which sequences, with how many pages and rows, the step knows
        self.turn = 0  # steps since

    def record(self, model: Any, function: Callable[..., Any], logits: tuple[int, ...]) -> None:
        """Record the step of a model that gives logits of this shape for a sequence."""
        self.logits = logits

        def stand_ins(recording: Any) -> list[Any]:
            return [
                PagedStandIn(recording, list(parts), self.columns * PAGE, self.pool.packing, window)
                for parts, window in zip(self.pool.arrays, self.pool.windows, strict=True)
            ]

        tokens = mx.zeros((self.batch, 1), self.dtype)
        begin_recording(self.step, model, function, tokens, stand_ins, (self.batch, *logits), 1)

    def call(self, tokens: mx.array, held: Held, stream: mx.Stream) -> tuple[mx.array, Held] | None:
        """The logits of the next step, and what there is then; None where the pages do not suffice."""
        if not all(sequence.reserve(length + 1) for sequence, length in zip(held.sequences, held.lengths, strict=True)):
            return None
        pool, pages = self.pool, sum(len(sequence.pages) for sequence in held.sequences)
        if pool.stream != stream:
            pool.wait()
        numbers = [sequence.number for sequence in held.sequences]
        if self.known != (numbers, held.lengths, pages):
            own = list(held.lengths) + [0] * (self.batch - len(held.lengths))
            table = mx.array(held.table(self.batch, self.columns), mx.int32)
            self.known = ()
            self.step.set_sequences(mx.array([[own, [0] * self.batch]], mx.int32), table)
            self.turn = 0
        logits = self.step.replay(tokens.astype(self.dtype), [Place(self.turn, 0, 0)], stream)
        after = held._replace(lengths=tuple(length + 1 for length in held.lengths))
        self.known, self.turn = (numbers, after.lengths, pages), self.turn + 1
        pool.stream, pool.last = stream, logits
        return logits[: tokens.shape[0]], after


class Batches:
    """A model's batches of one thread: their pages, and the recordings for them, the one that ran last first."""

    def __init__(self, *, refused: bool = False) -> None:
        self.pool: Pool | None = None
        self.sessions: list[PagedSession] = []
        self.refused = refused  # batches of this model are not put into pages
        self._count = 0  # pages that were too few

    def take(self, caches: list[Any]) -> bool:
        """Whether what these caches hold can be in pages: rows of whole sequences, the same ones in all layers.

        Not so one sequence where there are no others that it may join: it is faster with memory of its own.
        """
        if self.refused or not all(map(_is_batch, caches)):
            return False
        if caches[0].offset.shape[0] == 1 and (self.pool is None or not self.pool.batches):
            return False
        arrays = [array for cache in caches for array in (cache.keys, cache.values)]
        if any(array is None or array.shape[3] % 8 or array.itemsize not in {2, 4} for array in arrays):
            return False
        mx.eval([(cache.offset, cache.left_padding) for cache in caches])
        return all(cache.offset.tolist() == caches[0].offset.tolist() and _is_whole(cache) for cache in caches)

    def replay(self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], stream: mx.Stream) -> mx.array | None:
        """The logits of a step where one like it has been recorded; otherwise None, and the caches have arrays of their own."""
        held = held_by(caches) if is_in_pages(caches[0]) and hasattr(caches[0], "left_padding") else None
        pool, known = self.pool, held is not None
        if pool is not None and (held.pool is pool if held is not None else self._fits(caches)):
            rows = 1 + max(held.lengths if held is not None else caches[0].offset.tolist())
            fitting = [session for session in self.sessions if session.columns * PAGE >= rows]
            held = held if known or not fitting else pool.load(caches, stream)
            result = None
            if fitting and held is not None:
                batch = bucket_of(tokens.shape[0])
                session = next((each for each in fitting if each.batch == batch), None)
                if session is None:
                    session = self._another(fitting[0], model, function, tokens, stream)
                    result = session.call(tokens, held, stream)
                    few = min(tokens.shape[0], fitting[0].batch)
                    same = fitting[0].call(tokens[:few], held.only(range(few)), stream)  # which appends the same once more
                    if result is not None and same is not None:
                        compare(result[0][:few], same[0])
                        self.sessions.insert(0, session)
                else:
                    result = session.call(tokens, held, stream)
                if result is None and pool.make_room():
                    result = session.call(tokens, held, stream)
                if result is not None:
                    hold(caches, result[1])
                    return result[0]
            if fitting:  # there are too few pages
                self._more()
        for cache in caches:
            if is_in_pages(cache):
                settle(cache)
        return None

    def _another(self, like: PagedSession, model: Any, function: Callable[..., Any], tokens: mx.array, stream: mx.Stream) -> PagedSession:
        session = PagedSession(model, like.pool, tokens, like.columns, stream)
        session.record(model, function, like.logits)
        return session

    def _more(self) -> None:
        """Have the next recording make more pages."""
        if self.pool is not None:
            self._count, self.pool, self.sessions = 2 * self.pool.count, None, []

    def record(
        self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], expected: mx.array, stream: mx.Stream
    ) -> mx.array | None:
        """Record the step whose tokens are the caches' last, compare its result with the model's own, and go on in pages; that result.

        None where there is no room for pages.
        """
        rows = max(caches[0].offset.tolist())
        if self.pool is None or not self._fits(caches):
            count = self._expected(caches)
            if count == 0:
                return None
            self.pool, self.sessions = Pool(caches, count, self._packing(caches), stream), []
        columns = 16
        while columns * PAGE < rows + 256:
            columns *= 2
        session = PagedSession(model, self.pool, tokens, columns, stream)
        session.record(model, function, expected.shape[1:])
        held = self.pool.load(caches, stream)
        result = None
        if held is not None:
            result = session.call(tokens, held._replace(lengths=tuple(length - 1 for length in held.lengths)), stream)
        if result is None:
            self._more()
            return None
        compare(result[0], expected)
        hold(caches, result[1])
        self.sessions.insert(0, session)
        return result[0]

    def _fits(self, caches: list[Any]) -> bool:
        """Whether the pages are those of such caches."""
        return (
            self.pool is not None
            and len(caches) == len(self.pool.arrays)
            and self.take(caches)
            and all(
                (array.shape[1], array.shape[3], array.dtype) == like and _window(cache) == window
                for cache, pair, window in zip(caches, self.pool.like, self.pool.windows, strict=True)
                for array, like in zip((cache.keys, cache.values), pair, strict=True)
            )
        )

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else self.pool.nbytes

    @staticmethod
    def _packing(caches: list[Any]) -> Packing | None:
        wanted = settings.packing
        takes = wanted is not None and all(wanted.takes(array) for cache in caches for array in (cache.keys, cache.values))
        return wanted if takes else None

    @property
    def records(self) -> bool:
        """Whether a batch is put into pages with its first step: others have been."""
        return self.pool is not None or self._count > 0

    def _expected(self, caches: list[Any]) -> int:
        """How many pages there are to be; 0 where not even these sequences have room."""
        rows, batch = max(caches[0].offset.tolist()), caches[0].keys.shape[0]
        arrays = [array for cache in caches for array in (cache.keys, cache.values)]
        packing = self._packing(caches)
        part = 1.0 if packing is None else packing.bits / 16 + 2 / packing.group_size
        of_a_page = int(sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in arrays) * PAGE * part)
        needed = batch * (-(-(rows + HEADROOM) // PAGE)) + 1
        wanted = max(LEAST_ROWS, max(EXPECTED, batch) * (rows + HEADROOM)) // PAGE + 1
        most = int(LARGEST_PART * mx.get_memory_limit()) // of_a_page
        room = (mx.get_memory_limit() - mx.get_active_memory()) // of_a_page
        count = max(min(wanted, most), needed, self._count)
        return count if count <= room else 0


def _is_batch(cache: Any) -> bool:
    try:
        if is_in_pages(cache):
            return False
        return (cache._right_padding if kind_of(cache) is Batched else cache._lengths) is None and "left_padding" in vars(cache)
    except (NotReplayed, AttributeError):
        return False


def _is_whole(cache: Any) -> bool:
    """Whether the rows of each sequence are its last ones, and as many as it may see."""
    rows = _rows(cache)[0].shape[2]
    most = _window(cache) or rows
    there = [rows - max(0, left) for left in cache.left_padding.tolist()]
    return all(min(offset, most) <= count <= offset for offset, count in zip(cache.offset.tolist(), there, strict=True))


def bucket_of(batch: int) -> int:
    """For how many sequences a step is recorded that so many go through."""
    return next((bucket for bucket in BUCKETS if bucket >= batch), -(-batch // 64) * 64)
