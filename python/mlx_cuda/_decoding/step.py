"""A model's step for one cache: recorded, checked against the model itself, and replayed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .._loader import native
from .caches import NotReplayed, Place, kind_of
from .recording import Recording, StandIn, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from .caches import Growing, Rotating

POISON = 3e4  # rows of a cache that nobody may see
# Of a recorded step's logits against the model's own, by relative norm: other kernels round otherwise, and now and then choose another
# expert; what reads a row that nobody may see is wrong by far more.
LARGEST_ERROR = 0.3


def _poisoned(like: mx.array, capacity: int) -> mx.array:
    """Memory for a cache, all of it rows that nobody may see."""
    return mx.full((*like.shape[:2], capacity, like.shape[3]), POISON, like.dtype)


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
            (_poisoned(cache.keys, capacity), _poisoned(cache.values, capacity))
            for cache, capacity in zip(caches, self.capacities, strict=True)
        ]
        mx.eval(self.memory)
        self.owner: Callable[[], Any] = lambda: None

    def record(self, model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any], expected: mx.array) -> None:
        """Record the step whose token is the caches' last, and compare its result."""
        places = self._places(caches, lambda kind, cache, _: kind.last(cache))
        assert places is not None  # noqa: S101  (groups are of caches at equal places)
        recording = Recording(self.step)
        random: Any = mx.random.state
        drawn = random[0]
        with recorded(recording):
            stand_ins = [
                StandIn(recording, kind, memory, group) for kind, memory, group in zip(self.kinds, self.memory, self.groups, strict=True)
            ]
            result = function(model, self.step.tokens(), cache=stand_ins)
            if not isinstance(result, mx.array) or result.shape != expected.shape:
                raise NotReplayed("it returns something else than logits")
            if random[0] is not drawn:
                raise NotReplayed("it draws random numbers")
            # For another token at another place: what is not in the graph does not have the right value by chance.
            other = mx.where(tokens == 0, 1, 0).astype(tokens.dtype)
            self.step.record(mx.contiguous(result), other, [Place(0, 0, 1)] * len(places))
        del result, stand_ins, recording
        if self.step.nodes == 0:
            raise NotReplayed("MLX_USE_CUDA_GRAPHS=0 is set")
        shared = self._fill(caches)
        replayed = self.step.replay(tokens, places, self.stream)
        error = mx.linalg.norm((replayed - expected).astype(mx.float32)) / mx.linalg.norm(expected.astype(mx.float32))
        size = float(error.item())  # type: ignore[arg-type]
        if not size < LARGEST_ERROR:
            raise NotReplayed(f"a recorded step gives other logits (relative error {size:.2g})")
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
