"""Batches whose sequences join and leave: the captures of all batch sizes share one paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mlx.core as mx

from .._loader import native
from .._replay.capture import Capture, StandIn
from .._replay.errors import CaptureFailed, NotReplayed, own_arrays
from .._replay.kinds import Place
from .._replay.memory import is_full
from .._replay.packing import Form, settings
from .._replay.pool import Held, Pool, held_by
from .._replay.sequences import PAGE, is_in_pages, most_pages, pages_for
from .._replay.step import Taken, begin_capture, compare, now
from .caches import Batched, Replaced, kind_of
from .in_pages import hold
from .pages import (
    bytes_of_a_page,
    form_of,
    has_rows,
    keys_and_values,
    layer_of,
    lengths_of,
    load,
    rows_of,
    settle,
    settle_copies,
    states_of,
    window_of,
)
from .positions import notes_of
from .stand_ins import PagedStandIn, ReplacedStandIn

LEAST_ROWS = 16384  # of all sequences
HEADROOM = 512  # rows for each sequence of the largest batch that is expected, beside those that the first ones have
EXPECTED = 48  # sequences: mlx-lm's server has up to 32, and as many more as it takes at a time
LARGEST_PART = 1 / 6  # of what MLX may use, for the first pages; more where they turn out to be too few
LARGEST_SHARE = 3 / 4  # of what is left of it then
PARTS = (1.0, 0.25, 0.0)  # of what is expected: how much is asked for, one after the other, while memory is full
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128)


class Changes(NamedTuple):
    """The arrays of a layer's state that a step replaces, and the class of the cache."""

    cls: type
    arrays: list[bool]


class PagedSession:
    """A captured step for up to so many sequences, over so many pages."""

    def __init__(self, pool: Pool, tokens: mx.array, columns: int, stream: mx.Stream) -> None:
        self.pool, self.columns = pool, columns
        self.batch, self.dtype = bucket_of(tokens.shape[0]), tokens.dtype
        self.count = len(pool.regions)
        self.step = native.module(stream).step(mx.zeros((self.batch, 1), tokens.dtype), self.count, stream, (PAGE, columns))
        self.known: tuple[Any, ...] = ()  # of which sequences, with how many pages and rows, the step knows
        self.turn = 0  # steps since

    def record(self, model: Any, function: Callable[..., Any], logits: tuple[int, ...], changes: list[Changes | None]) -> None:
        """Capture the step of a model with logits of this shape per sequence. ``changes``: of layers with states."""
        self.logits, self.changes, pool = logits, changes, self.pool
        pool.wait()
        pool.states.leave()  # it runs once
        states = pool.states.first(self.batch)

        def stand_ins(capture: Capture) -> list[StandIn]:
            return [
                PagedStandIn(capture, list(parts), self.columns * PAGE, pool.packing, window, place)
                if change is None
                else ReplacedStandIn(capture, own, change.cls, change.arrays)
                for parts, window, place, own, change in zip(pool.arrays, pool.windows, pool.places, states, changes, strict=True)
            ]

        tokens = mx.zeros((self.batch, 1), self.dtype)
        capture = Capture(self.step, notes=notes_of(model))
        begin_capture(capture, model, function, tokens, stand_ins, shape=(self.batch, *logits), places=self.count)
        if self.step.has_sums:  # captures for other numbers of sequences are compared as they run
            raise NotReplayed("its steps contain an all-reduce")

    def call(self, tokens: mx.array, held: Held, stream: mx.Stream) -> tuple[mx.array, Held] | None:
        """Return the logits of the next step and the new contents; None if there are too few pages."""
        pool = self.pool
        if not pool.reserve(held):
            return None
        pages = sum([sequence.count for sequence in held.sequences])
        if pool.stream != stream:
            pool.wait()
        numbers, deltas = held.numbers, (now.deltas or ())[: len(held.lengths)]
        pool.arrange(held, self.step, anew=settle_copies(pool))
        if self.known != (numbers, held.lengths, pages, deltas):
            own, starts = (([*each] + [0] * self.batch)[: self.batch] for each in (held.lengths, deltas))
            tables = [held.table(place, self.batch, self.columns) for place in range(self.count)]
            self.known = ()
            self.step.set_sequences(mx.array([[own, starts]] * self.count, mx.int32), mx.array(tables, mx.int32))
            self.turn = 0
        tokens = tokens.astype(self.dtype)
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]  # the caller's error, if there is one, before the states are the step's
        pool.states.begin()
        try:
            logits = self.step.replay(tokens, [Place(self.turn, 0, 0)] * self.count, stream)
        except native.module(stream).CaptureError:  # it was not launched
            pool.states.end()
            raise
        after = held._replace(lengths=tuple(length + 1 for length in held.lengths))
        self.known, self.turn = (numbers, after.lengths, pages, deltas), self.turn + 1
        pool.stream, pool.last = stream, logits
        return logits[: tokens.shape[0]], after


class Batches:
    """A model's batches in one thread: their pages and captures, the most recent capture first."""

    def __init__(self, *, refused: bool = False) -> None:
        self.pool: Pool | None = None
        self.sessions: list[PagedSession] = []
        self.refused = refused  # batches of this model are not put into pages
        self._bytes = 0  # that pages are to have at least: twice those that were too few

    def take(self, caches: list[Any]) -> bool:
        """Return whether the contents of these caches can be paged: rows of whole sequences, the same in all layers, and states.

        A single sequence is not paged if there are no others for it to join: contiguous memory is faster.
        """
        if self.refused or not all(map(_is_batch, caches)):
            return False
        rows = [cache for cache in caches if has_rows(cache)]
        if not rows or (rows[0].offset.shape[0] == 1 and (self.pool is None or not self.pool.batches)):
            return False
        arrays = [array for cache in rows for array in (cache.keys, cache.values) if array is not None]
        if len(arrays) < 2 * len(rows) and (arrays or self.pool is None):
            return False
        if any(array.shape[3] % 8 or array.itemsize not in {2, 4} for array in arrays):
            return False
        mx.eval([(cache.offset, cache.left_padding) for cache in rows])
        offsets = rows[0].offset.tolist()
        return min(offsets, default=-1) >= 0 and all(cache.offset.tolist() == offsets and _is_whole(cache) for cache in rows)

    def replay(self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], stream: mx.Stream) -> mx.array | None:
        """Return the logits of a step that is like a captured one; else None, and the caches have their own arrays."""
        self.sessions = [session for session in self.sessions if not session.step.moved()]
        held, pool = held_by(caches), self.pool
        if held is not None and (held.pool is not pool or not held.are_last() or pool.is_shared(caches)):
            held = None
        if held is None:
            _settle_all(caches)
        if pool is not None and (held is not None or self._fits(caches)):
            rows = 1 + max(held.lengths if held is not None else lengths_of(caches))
            fitting = [session for session in self.sessions if session.columns * PAGE >= rows]
            if fitting:
                held = load(pool, caches, stream) if held is None else held
                result = None if held is None else self._call(fitting, model, function, tokens, held, stream)
                if result is not None:
                    hold(caches, result[1])
                    return result[0]
                self._more()
        _settle_all(caches)
        return None

    def _call(
        self, fitting: list[PagedSession], model: Any, function: Callable[..., Any], tokens: mx.array, held: Held, stream: mx.Stream
    ) -> tuple[mx.array, Held] | None:
        """Return the logits of one of these captures, or of a new one for so many sequences, which is compared with the first of them."""
        session = next((each for each in fitting if each.batch == bucket_of(tokens.shape[0])), None)
        if session is not None:
            return session.call(tokens, held, stream)
        if self._has_few_states(tokens):
            return None
        like = fitting[0]
        session = PagedSession(like.pool, tokens, like.columns, stream)
        session.record(model, function, like.logits, like.changes)
        few, pool = held.only(range(min(tokens.shape[0], like.batch))), held.pool
        settle_copies(pool)
        before = pool.kept(held)
        try:
            same = like.call(tokens[: len(few.lengths)], few, stream)
            pool.restore(held, before)
            result = session.call(tokens, held, stream)  # which appends the same once more
            if result is not None and same is not None:
                compare(result[0][: len(few.lengths)], same[0])
                self._keep(session)
        except BaseException:
            pool.restore(held, before)
            raise
        return result

    def _keep(self, session: PagedSession) -> None:
        """Replace a similar capture."""
        others = [each for each in self.sessions if (each.batch, each.columns) != (session.batch, session.columns)]
        self.sessions = [session, *others]

    def _more(self) -> None:
        """Let the next capture allocate more pages, and memory for as many states as it needs."""
        if self.pool is not None:
            self._bytes, self.pool, self.sessions = 2 * self.pool.nbytes_of_pages, None, []

    def record(self, taken: Taken, stream: mx.Stream) -> mx.array | None:
        """Capture the step, compare it with the model's own, and continue paged; return the model's result, None without memory."""
        model, function, tokens, caches, before, expected = taken
        rows = max(lengths_of(caches))
        if self.pool is None or not self._fits(caches) or self._has_few_states(tokens):
            if not self._make_pool(caches, stream):
                return None
            assert self.pool is not None  # noqa: S101  (for mypy)
        columns = 16
        while columns * PAGE < rows + 256:
            columns *= 2
        session = PagedSession(self.pool, tokens, columns, stream)
        session.record(model, function, expected.shape[1:], list(map(_changes, caches, before)))
        held = load(self.pool, caches, stream, [then or [] for then in before])
        result = None
        if held is not None:
            result = session.call(tokens, held._replace(lengths=tuple(length - 1 for length in held.lengths)), stream)
        if result is None:
            self._more()
            return None
        compare(result[0], expected)
        hold(caches, result[1])
        self._keep(session)
        return result[0]

    def _make_pool(self, caches: list[Any], stream: mx.Stream) -> bool:
        """Allocate pages for everything expected, or less if other programs use the memory; return False if nothing fits."""
        full = ""
        for part in PARTS:
            counts, most = self._expected(caches, part)
            if not counts:
                return False
            try:
                with own_arrays():
                    packing = settings.packing_of(map(form_of, caches))
                    self.pool, self.sessions = Pool(list(map(layer_of, caches)), counts, most, packing, stream), []
            except CaptureFailed as error:
                if not is_full(error):
                    raise
                full = str(error)
            else:
                return True
            mx.clear_cache()  # which has what was got of them: smaller ones find nothing there
        raise CaptureFailed(full)

    def _has_few_states(self, tokens: mx.array) -> bool:
        """Return whether there is no memory for the states of so many sequences."""
        return self.pool is not None and bool(self.pool.states) and bucket_of(tokens.shape[0]) > self.pool.states.most

    def _fits(self, caches: list[Any]) -> bool:
        """Return whether the pages and states have the form of these caches, with the current quantization."""
        pool = self.pool
        if pool is None or len(caches) != len(pool.arrays) or pool.packing != settings.packing_of(pool.like) or not self.take(caches):
            return False
        return all(
            _has_form(keys_and_values(cache), pair)
            and [(array.shape[1:], array.dtype) for array in states_of(cache)] == own
            and window_of(cache) == window
            for cache, pair, own, window in zip(caches, pool.like, pool.states.like, pool.windows, strict=True)
        )

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else self.pool.nbytes

    @property
    def records(self) -> bool:
        """Return whether a batch is paged with its first step, because others have been."""
        return self.pool is not None or self._bytes > 0

    def _expected(self, caches: list[Any], part: float) -> tuple[dict[int | None, int], int]:
        """Return the number of pages for each window, and the states of so many sequences; no pages if not even these fit.

        ``part``: the share of the expected sequences, if it is more than those that there are.
        """
        rows, packing = max(lengths_of(caches)), settings.packing_of(map(form_of, caches))
        size = 1.0 if packing is None else packing.bits / 16 + 2 / packing.group_size
        pages = {window_of(cache): pages_for(rows + HEADROOM, most_pages(window_of(cache))) for cache in caches if has_rows(cache)}
        of_a_sequence = max(1, sum(int(bytes_of_a_page(cache) * size) * pages[window_of(cache)] for cache in caches if has_rows(cache)))
        batch = len(lengths_of(caches))
        limit, room = mx.get_memory_limit(), int(LARGEST_SHARE * (mx.get_memory_limit() - mx.get_active_memory()))
        states, of_a_state = bucket_of(batch), sum(array.nbytes // batch for cache in caches for array in states_of(cache))
        if of_a_state:
            most = min(LARGEST_PART * limit, room / 2)
            fitting = [bucket for bucket in BUCKETS if bucket <= part * EXPECTED and bucket * of_a_state <= most]
            states = max(states, *fitting, 0)
            room -= states * of_a_state
        wanted = max(EXPECTED, batch, LEAST_ROWS // (rows + HEADROOM))
        count = max(min(wanted, int(LARGEST_PART * limit) // of_a_sequence), batch, self._bytes // of_a_sequence)
        count = min(max(int(part * count), batch), room // of_a_sequence)
        return ({window: 1 + count * own for window, own in pages.items()} if count >= batch else {}), states


def _changes(cache: Any, before: list[mx.array] | None) -> Changes | None:
    """Return which arrays of a cache a step has replaced, if it replaces arrays."""
    if before is None:
        return None
    return Changes(type(cache), [one is not other for one, other in zip(before, states_of(cache), strict=True)])


def _is_batch(cache: Any) -> bool:
    try:
        if is_in_pages(cache):
            return False
        if kind_of(cache) is Replaced:
            return len(cache.cache) > 0 and all(isinstance(array, mx.array) for array in cache.cache) and not Replaced.is_padded(cache)
        return (cache._right_padding if kind_of(cache) is Batched else cache._lengths) is None and "left_padding" in vars(cache)
    except (NotReplayed, AttributeError):
        return False


def _has_form(arrays: Iterable[mx.array | None], form: Form) -> bool:
    """Return whether keys and values have the form of the pages, or there are none yet."""
    own = [None if array is None else (array.shape[1], array.shape[3], array.dtype) for array in arrays]
    return own in ([None] * len(form), form)


def _settle_all(caches: list[Any]) -> None:
    for cache in caches:
        if is_in_pages(cache):
            settle(cache)


def _is_whole(cache: Any) -> bool:
    """Return whether the rows of each sequence are its last ones, as many as its window shows."""
    rows, window = 0 if cache.keys is None else rows_of(cache)[0].shape[2], window_of(cache)
    there = [rows - max(0, left) for left in cache.left_padding.tolist()]
    pairs = zip(cache.offset.tolist(), there, strict=True)
    return all(offset == count if window is None else min(offset, window) <= count <= offset for offset, count in pairs)


def bucket_of(batch: int) -> int:
    """Return the batch size of the capture that computes so many sequences."""
    return next((bucket for bucket in BUCKETS if bucket >= batch), -(-batch // 64) * 64)
