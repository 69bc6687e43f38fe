"""Decode steps of models while MLX is patched: which calls they are, and when they are captured and launched."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .._all_sum import several_processes
from .._loader import native
from .._replay.capture import current
from .._replay.errors import KEPT, CaptureFailed, NotReplayed, are_kept
from .._replay.memory import has_room, is_full
from .._replay.step import Taken, now
from .._replay.watch import STATE as _STATE  # in the model's own attributes, so that it ends with the model
from .._replay.watch import Watch
from .batches import Batches, PagedSession
from .caches import BATCHED_NAMES, Replaced, are_empty, arrays_in, kind_of, put_back, standing, twin
from .calls import logits_of
from .copies import package_of
from .in_pages import adapt
from .pages import known_again
from .positions import NAME, NOTE, notes_of, numbers_of
from .prompts import are_evaluated, is_evaluated
from .stand_ins import ASKING, Session

MOST_SESSIONS = 16  # of a model: conversations that take turns, sizes of a batch
IDLE_MEMORY = 1 / 8  # of what MLX may use: captures whose cache is gone, or has another size at present
MEMORY_BESIDE_A_PROMPT = 1 / 32  # the same: of conversations that are over; larger ones are captured again
FAILURES = 3  # after so many a model is not tried again
FEW_REPLAYS = 8  # of each capture, on the average, where there were as many: a program copies its cache all the time
_inside = threading.local()  # whether a model of this thread is in a step already, whose parts are models too
_all: weakref.WeakSet[Decoding] = weakref.WeakSet()


class Own(threading.local):
    """The captures of a model in one thread, and the caches that may be next; another thread may replace it at any time."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.batches = Batches()
        self.weights: Watch | None = None  # the model's, when it was captured
        self.options = ""  # what it was called with besides tokens and caches
        # Steps that were not replayed, by the first cache of a sequence or batch, with the shape of its tokens.
        self._steps: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], int]] = weakref.WeakKeyDictionary()

    def steps(self, caches: list[Any], tokens: mx.array) -> int:
        shape, count = self._steps.get(caches[0], ((), 0))
        return count if shape == tokens.shape else 0

    def count(self, caches: list[Any], tokens: mx.array, count: int) -> None:
        self._steps[caches[0]] = (tokens.shape, count)


class Decoding:
    """A model's captured steps, separate for each thread because MLX's streams are, newest first; and the reason if there are none."""

    def __init__(self, model: Any = None) -> None:
        self.model = (lambda: None) if model is None else weakref.ref(model)
        self._own = Own()
        self.reason = "no decode step has been captured yet"
        self.failures: defaultdict[tuple[object, ...], float] = defaultdict(float)  # of caches of these kinds, and so many sequences
        self.captured = 0
        self.replayed = 0
        self.errors: deque[str] = deque(maxlen=4)  # of the last steps that failed, where memory was not full
        self._evaluated = False  # whether the model's weights were seen to be
        self._deltas: tuple[Any, tuple[int, ...] | None] = (None, None)  # how far positions were from places last
        self.output: Callable[..., Any] | None = None  # what the model returns its logits in
        _all.add(self)

    def __deepcopy__(self, memo: Any) -> Decoding:
        return Decoding()

    def __reduce__(self) -> Any:
        return (Decoding, ())

    @property
    def sessions(self) -> list[Session]:
        return self._own.sessions

    @property
    def batches(self) -> Batches:
        return self._own.batches

    @property
    def captures(self) -> list[Session | PagedSession]:
        return [*self.batches.sessions, *self.sessions]

    def forget(self) -> None:
        """Release captures: those with weights that the model no longer has, or all when MLX is unpatched."""
        self._own, self._evaluated = Own(), False

    def deltas_of(self, deltas: Any, batch: int) -> tuple[int, ...] | None:
        """Return the numbers of each sequence in one of these arrays; this synchronizes once."""
        if not isinstance(deltas, mx.array):
            return None
        known, numbers = self._deltas
        same = native.module(mx.default_stream(mx.default_device())).same_arrays
        if len(numbers or ()) != batch or not same([deltas], [known]):  # known by its array, which an update in place leaves alone
            numbers = numbers_of(deltas, batch)
            self._deltas = copy.copy(deltas), numbers
        return numbers

    def notice(self) -> None:
        """Release captures with other weights."""
        weights = self._own.weights
        if weights is not None and not weights.same(self.model()):
            self.forget()
            self.failures.clear()
            self.captured = self.replayed = 0

    def may_begin(self, model: Any) -> bool:
        """Return whether a call may be evaluated before its result is requested: not before the model's weights are."""
        self._evaluated = self._evaluated or is_evaluated(model)
        return self._evaluated

    def make_room(self) -> None:
        """Release the memory of finished requests, except a little, before the caches of another one grow."""
        sessions, left = self.sessions, MEMORY_BESIDE_A_PROMPT * mx.get_memory_limit()
        for session in list(sessions):
            if session.is_over:
                left -= session.nbytes
                if left < 0:
                    sessions.remove(session)

    def step(
        self,
        model: Any,
        function: Callable[..., Any],
        tokens: mx.array,
        caches: list[Any],
        *,
        at_once: bool,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Run a decode step: launched, captured or eager. ``options``: other arguments of the function."""
        try:
            _inside.a_step = True
            self.notice()
            given = repr(sorted(options.items())) if options else ""  # which tells True from 1
            if self._own.options != given:
                self.forget()
                self.failures.clear()
                self._own.options = given
            stream = mx.default_stream(mx.default_device())
            before, failed = standing(caches), False
            try:
                logits = self._replayed(model, function, tokens, caches, stream, at_once=at_once)
            except BaseException as error:
                put_back(caches, before)
                known_again(caches)
                if not _costs_nothing(error, stream):  # an interrupt, or an error of the caller's arrays; otherwise the model goes on
                    raise
                self.sessions.clear()
                self._own.batches = Batches(refused=isinstance(error, NotReplayed))
                self.failures[_kind(tokens, caches)] += _weight(error)
                self._failed("replaying", error)
                failed, full = True, is_full(error)
            if failed:  # not where the error, with all that it holds, is still there
                if full:
                    mx.clear_cache()  # MLX frees nothing of it for arrays of other sizes while others have the rest of the memory
                return _begun_at_once(function(model, tokens, cache=caches))
            if logits is not None:
                self.reason = ""
                self.replayed += 1
                return logits
            if self._records(tokens, caches, at_once=at_once) and (at_once or self.may_begin(model) or _hold_values(caches)):
                before = standing(caches, updated=True)
                try:
                    return self._record(model, function, tokens, caches, before, stream)
                except BaseException:
                    put_back(caches, before)
                    known_again(caches)
                    raise
            return _begun_at_once(function(model, tokens, cache=caches))
        finally:
            _inside.a_step = False

    def _failed(self, what: str, error: BaseException) -> None:
        self.reason = f"{what} it failed: {error}"
        if _weight(error) == 1 and not isinstance(error, NotReplayed):
            self.errors.append(self.reason)

    def _replayed(
        self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], stream: mx.Stream, *, at_once: bool
    ) -> mx.array | None:
        """Return the logits of an existing capture."""
        own = self._own  # another thread may replace it meanwhile
        logits = own.batches.replay(model, function, tokens, caches, stream)
        if logits is not None:
            return logits
        for session in self.sessions:
            if session.owner() is not caches[0]:
                continue
            if session.shape != tokens.shape:  # sequences have joined or left: its arrays are others
                session.leave()
                break
            logits = session.call(tokens, caches, stream)
            if logits is None and session.is_for(stream) and session.take(caches):
                logits = session.call(tokens, caches, stream)
            if logits is not None:
                return logits
            self.sessions.remove(session)
            own.count(caches, tokens, 1)
            break
        for session in self.sessions:
            if session.owner() is None and session.shape == tokens.shape and session.is_for(stream):
                if not at_once and tokens.shape[0] == 1 and not _after_a_prompt(caches) and own.steps(caches, tokens) == 0:
                    break  # as where there is no capture: its results do not depend on what ran before it
                if session.take(caches):
                    self._add(session)
                    return session.call(tokens, caches, stream)
        return None

    def _add(self, newest: Session) -> None:
        """Keep a capture, and the newest of the earlier ones."""
        kept, idle = [newest], 0.0
        for session in self.sessions:
            if session is not newest and len(kept) < MOST_SESSIONS:
                idle += session.nbytes if session.owner() is None else 0
                if session.owner() is not None or idle <= IDLE_MEMORY * mx.get_memory_limit():
                    kept.append(session)
        self.sessions[:] = kept

    def _records(self, tokens: mx.array, caches: list[Any], *, at_once: bool) -> bool:
        """Return whether a step of caches of known kinds is captured: the first after a prompt; the second without one or of a batch.

        Also the second if its memory is so large that each request has its own capture (``make_room``): the first token would wait for it.
        Not if captures failed before.
        """
        try:
            for cache in caches:
                kind_of(cache)
        except NotReplayed as reason:
            self.reason = str(reason)
            return False
        own = self._own  # another thread may replace it meanwhile
        count = own.steps(caches, tokens) + 1
        own.count(caches, tokens, count)
        if self.failures[_kind(tokens, caches)] >= FAILURES:
            self.reason = self.reason or "capturing its steps failed too often"
            return False
        missing = self.captured * FEW_REPLAYS - self.replayed if self.captured >= FEW_REPLAYS else 0
        if count < missing and not at_once:  # as many as a new capture would have replayed
            self.reason = "its steps were captured often and launched rarely"
            return False
        nbytes = Session.nbytes_for(caches)  # what `make_room` will find of it
        if not has_room(nbytes):
            self.reason = "there is no memory for a second copy of its caches, which capturing a step takes"
            return False
        first = nbytes <= MEMORY_BESIDE_A_PROMPT * mx.get_memory_limit() and _after_a_prompt(caches)
        return at_once or count > 1 or first or (own.batches.records and own.batches.take(caches))

    def _record(
        self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], before: list[dict[str, Any]], stream: mx.Stream
    ) -> Any:
        """Run the step eagerly and capture it for later ones. ``before``: the former contents of the caches."""
        earlier = [kind_of(cache).before(cache) for cache in caches]
        twins = [twin(cache) for cache in caches] if several_processes() else None
        logits = function(model, tokens, cache=caches)
        self.notice()  # which that call may have changed
        if not all(_goes_on(cache, then) for cache, then in zip(caches, earlier, strict=True)):
            self.reason = "its cache is empty, or had arrays of other dtypes before its first step"
            return _begun_at_once(logits)
        self.captured += 1
        kept = isinstance(logits, mx.array) and self._keeps_arrays(tokens, [*before, *(vars(cache) for cache in caches)], logits, stream)
        watch, full = self._watched(model, stream), False  # before it is captured: what another thread changes meanwhile is noticed
        try:
            if not isinstance(logits, mx.array):
                raise NotReplayed("it returns something else than logits")
            if kept:
                raise NotReplayed(KEPT)
            logits = self._capture(Taken(model, function, tokens, caches, earlier, logits), twins, stream)
        except Exception as error:
            if not _costs_nothing(error, stream):
                raise
            if isinstance(error, NotReplayed):
                self.failures[_kind(tokens, caches)], self.reason = FAILURES, str(error)
            else:
                self.failures[_kind(tokens, caches)] += _weight(error)
                self._failed("capturing", error)
            self._own.weights, full = watch, is_full(error)  # changed, it may be captured
        else:
            self._own.weights, self.reason = watch, ""
        if full:
            mx.clear_cache()  # which has what the attempt had got, and the model's next arrays are of other sizes
        return logits

    def _capture(self, taken: Taken, twins: list[Any] | None, stream: mx.Stream) -> mx.array:
        """Return the step's result, captured paged or contiguous; an error leaves nothing behind."""
        if self.batches.take(taken.caches):
            paged = self._record_batch(taken, stream)
            if paged is not None:
                return paged
        session = Session(taken.tokens, taken.caches, stream)
        for cls in {type(cache) for cache in taken.caches}:
            adapt(cls)
        logits = session.record(taken, twins)
        self._add(session)
        return logits

    @staticmethod
    def _keeps_arrays(tokens: mx.array, content: list[dict[str, Any]], logits: mx.array, stream: mx.Stream) -> bool:
        """Return whether this step leaves arrays outside caches, such as with a hook that collects them.

        It is checked before the model's code runs again for the capture, so that the hook does not see that.
        """
        made = native.module(stream).lifetimes_between(tokens, logits)
        known = [logits, *arrays_in(content)]
        mx.eval(known)  # one that is not computed yet has what it is made of
        return are_kept(lambda: made.any_left(known))

    @staticmethod
    def _watched(model: Any, stream: mx.Stream) -> Watch | None:
        with contextlib.suppress(NotReplayed):  # nor is what cannot be watched captured
            return Watch(model, stream, notes_of(model))
        return None

    def _record_batch(self, taken: Taken, stream: mx.Stream) -> mx.array | None:
        """The same with a paged KV cache; None if that is not possible, and then it is not tried again."""
        own = self._own
        try:
            return own.batches.record(taken, stream)
        except NotReplayed:
            own.batches = Batches(refused=True)
            return None


def _begun_at_once(logits: Any) -> Any:
    """Start evaluating the result if there are other processes, as graph launches do, so that all-reduces have one order."""
    if several_processes() and isinstance(logits, mx.array):
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
    return logits


def _after_a_prompt(caches: list[Any]) -> bool:
    """Return whether caches with rows have tokens, and are not batch caches, which sequences join and leave."""
    rows = [cache for cache in caches if type(cache).__name__ != Replaced.name]  # a batch has rows of another kind beside these
    others = [cache for cache in rows if type(cache).__name__ in BATCHED_NAMES or getattr(cache, "offset", 0) == 0]
    return bool(rows) and not others  # no generator: an interrupt within one would be lost


def _hold_values(caches: list[Any]) -> bool:
    """Return whether the contents of caches are evaluated."""
    arrays = [array for cache in caches for array in kind_of(cache).arrays(cache) if isinstance(array, mx.array)]
    return bool(arrays) and are_evaluated(arrays)


def _goes_on(cache: Any, before: list[Any] | None) -> bool:
    """Return whether the arrays that a step has replaced have the form of the former ones."""
    if before is None:
        return True
    kind = kind_of(cache)
    after = kind.arrays(cache)
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(isinstance(a, mx.array) and isinstance(b, mx.array) and kind.fits(a, b) for a, b in pairs)


def _kind(tokens: mx.array, caches: list[Any]) -> tuple[object, ...]:
    return (*tokens.shape, *{type(cache): None for cache in caches})


def _costs_nothing(error: BaseException, stream: mx.Stream) -> bool:
    """Return whether the error is of a captured step only, so that the model can continue with the caller's arrays."""
    return isinstance(error, (NotReplayed, CaptureFailed, native.module(stream).CaptureError))


def _weight(error: BaseException) -> float:
    """Return how much an error counts against further captures; memory may be free next time."""
    return 0.1 if is_full(error) else 1.0


def decoding_of(model: Any) -> Decoding:
    """Return the captures of a model, not those of a copy."""
    state = vars(model).get(_STATE)
    if state is None or state.model() is not model:
        state = vars(model)[_STATE] = Decoding(model)
    return state  # type: ignore[no-any-return]


def is_step(tokens: Any, cache: Any) -> bool:
    """Return whether these arguments are a step of one token per sequence."""
    return _on_gpu(tokens) and tokens.ndim == 2 and tokens.shape[1] == 1 and isinstance(cache, list) and len(cache) > 0


def _on_gpu(tokens: Any) -> bool:
    """Return whether the call runs on a GPU and its arrays are not traced."""
    return (
        isinstance(tokens, mx.array)
        and native.loaded is not None
        and mx.default_device().type == mx.gpu
        and not native.loaded.traced([tokens])
    )


def step_of(
    model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], rest: dict[str, Any], *, at_once: bool
) -> tuple[Any, Decoding]:
    """Return the model's result of a step, and its captures. ``function``: its own ``__call__``; ``rest``: its other arguments."""
    state = decoding_of(model)

    def logits(model: Any, tokens: mx.array, cache: list[Any], **others: Any) -> Any:
        found, state.output = logits_of(function(model, tokens, cache=cache, **rest | others))
        return found

    if ASKING and package_of(type(model)) in ASKING and are_empty(caches):
        state.reason = "its token is the first of a sequence, whose position the model counts otherwise"
        return function(model, tokens, cache=caches, **rest), state
    if notes_of(model):
        result = _at_positions(state, model, logits, tokens, caches, rest, at_once=at_once)
    else:
        result = state.step(model, logits, tokens, caches, at_once=at_once, options=rest)
    return state.output(logits=result) if state.output is not None and isinstance(result, mx.array) else result, state


def _at_positions(
    state: Decoding, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], rest: dict[str, Any], *, at_once: bool
) -> Any:
    """The same for a model that counts positions itself."""
    given = rest.get(NAME)
    deltas = state.deltas_of(getattr(model, NOTE) if given is None else given, tokens.shape[0])
    if deltas is None:
        state.reason = "how far its positions are from places is not known"
        return function(model, tokens, cache=caches)

    def step(model: Any, tokens: mx.array, cache: list[Any]) -> Any:
        capture, note = current(), getattr(model, NOTE)
        if capture is None:
            return function(model, tokens, cache=cache)
        try:
            return function(model, tokens, cache=cache, **{NAME: capture.deltas()})
        finally:
            setattr(model, NOTE, note)

    try:
        now.deltas = deltas
        others = {name: value for name, value in rest.items() if name != NAME}
        result = state.step(model, step, tokens, caches, at_once=at_once, options=others)
    finally:
        now.deltas = None
    if given is not None:
        setattr(model, NOTE, given)  # as its own code does
    return result
