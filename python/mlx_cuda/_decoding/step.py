"""A model's step for one cache: recorded, checked against the model itself, and replayed."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .._attention.attention import attention
from .._loader import native
from .caches import Growing, NotReplayed, Place, Rotating, StandIn, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

POISON = 3e4  # rows of a cache that nobody may see
# Of a recorded step's logits against the model's own, by relative norm: other kernels round otherwise, and now and then choose another
# expert; what reads a row that nobody may see is wrong by far more.
LARGEST_ERROR = 0.3

_lock = threading.Lock()
_current = threading.local()


class Recording:
    """What is known of arrays that the model passes on while it is recorded."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.places: dict[int, tuple[mx.array, int]] = {}  # of keys, by their identity
        self.masks: dict[int, tuple[mx.array, int, int | None]] = {}  # with their place and window

    def attention(self, upstream: Callable[..., mx.array], q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        """Attention to the rows of a cache that are there, which the device knows."""
        place = self.places.get(id(k), (k, None))[1]
        mask = options.get("mask")
        _, mask_place, window = self.masks.get(id(mask), (mask, None, None))
        if place is None or q.shape[2] != 1 or (mask is not None and mask_place != place):
            return upstream(q, k, v, **options)
        return attention(
            q, k, v, scale=options["scale"], sinks=options.get("sinks"), lengths=self.step.lengths(place),
            window_size=None if window is None else window - 1,
        )  # fmt: skip


def _attention(upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention_of_step(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        recording: Recording | None = getattr(_current, "recording", None)
        return upstream(q, k, v, **options) if recording is None else recording.attention(upstream, q, k, v, **options)

    return attention_of_step


class Session:
    """A recorded step, the memory of its caches, and the cache that has it at present."""

    def __init__(self, model: Any, tokens: mx.array, caches: list[Any], stream: mx.Stream) -> None:
        self.stream = stream
        self.kinds = [kind_of(cache) for cache in caches]
        if any(cache.keys is None for cache in caches):
            raise NotReplayed("its cache is empty")
        self.held = native.module(stream).Held(model)
        self.shape, self.dtype = tokens.shape, tokens.dtype
        self.capacities = [kind.capacity(cache) for kind, cache in zip(self.kinds, caches, strict=True)]
        groups: dict[tuple[Any, ...], int] = {}
        self.groups = [
            groups.setdefault((kind, capacity, kind.last(cache)), len(groups))
            for kind, capacity, cache in zip(self.kinds, self.capacities, caches, strict=True)
        ]
        self.step = native.module(stream).step(tokens, len(groups), stream)
        self.memory = [
            tuple(mx.full((*a.shape[:2], capacity, a.shape[3]), POISON, a.dtype) for a in (cache.keys, cache.values))
            for cache, capacity in zip(caches, self.capacities, strict=True)
        ]
        mx.eval(self.memory)
        self.owner: Callable[[], Any] = lambda: None

    def record(self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], expected: mx.array) -> None:
        """Record the step whose token is the caches' last, and compare its result."""
        places = self._places(caches, lambda kind, cache, _: kind.last(cache))
        assert places is not None  # noqa: S101  (groups are of caches at equal places)
        shared = self._fill(caches)
        recording = Recording(self.step)
        with _lock:
            upstream = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = _attention(upstream)
            _current.recording = recording
            try:
                stand_ins = [
                    StandIn(recording, kind, memory, group)
                    for kind, memory, group in zip(self.kinds, self.memory, self.groups, strict=True)
                ]
                result = function(model, self.step.tokens(), cache=stand_ins)
            finally:
                _current.recording = None
                mx.fast.scaled_dot_product_attention = upstream
        if not isinstance(result, mx.array) or result.shape != expected.shape:
            raise NotReplayed("it returns something else than logits")
        self.step.record(mx.contiguous(result), tokens, places)
        del result, stand_ins, recording
        replayed = self.step.replay(tokens, places, self.stream)
        error = mx.linalg.norm((replayed - expected).astype(mx.float32)) / mx.linalg.norm(expected.astype(mx.float32))
        if not error.item() < LARGEST_ERROR:
            raise NotReplayed(f"a recorded step gives other logits (relative error {error.item():.2g})")
        self._give(caches, shared)

    def take(self, caches: list[Any]) -> bool:
        """Give the memory to other caches that fit, with what they hold; False where they do not, or somebody else still has it."""
        shapes = [(a.shape[:2], a.shape[3], a.dtype) for c in caches for a in (c.keys, c.values)]
        own = [(a.shape[:2], a.shape[3], a.dtype) for pair in self.memory for a in pair]
        fits = [kind_of(c) for c in caches] == self.kinds and shapes == own
        if not fits or not self.step.free() or self._next(caches) is None:
            return False
        self._give(caches, self._fill(caches))
        return True

    def call(self, tokens: mx.array, caches: list[Any], stream: mx.Stream) -> mx.array | None:
        """The logits of the next step; None where the call does not fit what was recorded."""
        places = self._next(caches) if tokens.shape == self.shape else None
        if places is None or not self.step.owns([a for c in caches for a in (c.keys, c.values)]):
            return None
        logits: mx.array = self.step.replay(tokens.astype(self.dtype), places, stream)
        for kind, cache, group in zip(self.kinds, caches, self.groups, strict=True):
            kind.advance(cache, places[group])
        return logits

    def _next(self, caches: list[Any]) -> list[Place] | None:
        return self._places(caches, lambda kind, cache, capacity: kind.next(cache, capacity))

    def _places(self, caches: list[Any], place_of: Callable[[type[Growing | Rotating], Any, int], Place | None]) -> list[Place] | None:
        if len(caches) != len(self.kinds):
            return None
        places: dict[int, Place | None] = {}
        for kind, cache, capacity, group in zip(self.kinds, caches, self.capacities, self.groups, strict=True):
            place = place_of(kind, cache, capacity)
            if place is None or places.setdefault(group, place) != place:
                return None
        return [place for _, place in sorted(places.items()) if place is not None]

    def _fill(self, caches: list[Any]) -> list[mx.array]:
        content = [kind.content(cache, a) for kind, cache in zip(self.kinds, caches, strict=True) for a in (cache.keys, cache.values)]
        memory = [array for pair in self.memory for array in pair]
        return list(self.step.fill([mx.contiguous(array) for array in content], memory))

    def _give(self, caches: list[Any], shared: list[mx.array]) -> None:
        for index, (kind, cache) in enumerate(zip(self.kinds, caches, strict=True)):
            kind.settle(cache)
            cache.keys, cache.values = shared[2 * index : 2 * index + 2]
        self.owner = weakref.ref(caches[0])
