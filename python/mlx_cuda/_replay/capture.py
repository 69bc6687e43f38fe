"""The model's arrays during a capture: attention is limited to the valid rows of its caches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from .._attention.attention import attention
from .._attention.paged import paged_attention
from .._attention.quantized import quantized_attention
from .._loader import native
from .._loader.replacing import alone

Result = TypeVar("Result")

_current = threading.local()


class StandIn:
    """The object that a model gets instead of a cache during a capture; a library's classes have what its models use."""

    has_row = True  # whether the token's row has been appended, where there are rows
    gives_masks = True  # whether the cache gives masks for one token, where there are rows

    @property
    def shown(self) -> Any:
        """Return the object that the model sees."""
        return self

    def replaced(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return the new arrays that the step replaces, and the memory for them."""
        return [], []


class Pages(NamedTuple):
    """The paged KV cache of a layer; quantized if a ``form`` is given."""

    memory: list[mx.array]
    form: tuple[int, int] | None
    window: int | None
    place: int


class Capture:
    """The known properties of arrays that the model passes on during a capture."""

    def __init__(self, step: Any, apart: int = 0, notes: tuple[str, ...] = ()) -> None:
        self.step = step
        self.apart = apart  # the place whose starts are how far positions are from places
        self.notes = notes  # attributes that the model may write
        self.more_masks = True  # than caches give: attention that a model writes out needs one
        self.places: dict[int, tuple[mx.array, int]] = {}  # of keys, by their identity
        self.pages: dict[int, Pages] = {}  # of paged keys, by their identity
        self.masks: dict[int, tuple[mx.array, int, dict[str, Any]]] = {}  # with their place, and what `attention` calls the same

    def deltas(self) -> mx.array:
        """Return the difference between each sequence's positions and its rows."""
        starts: mx.array = self.step.starts(self.apart)
        return starts[:, None]

    def forget(self) -> None:
        """Release the fakes, which refer to this and to the memory of caches, without Python's garbage collector."""
        self.places.clear()
        self.pages.clear()
        self.masks.clear()

    def attention(self, upstream: Callable[..., mx.array], q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        """Compute attention over the valid rows of a cache, whose number only the device knows."""
        seen = self.seen(q, k, options.get("mask"))
        if seen is None:
            return upstream(q, k, v, **options)
        if id(k) in self.pages:
            cache = self.pages[id(k)]
            memory, form, own = cache.memory, cache.form, None if cache.window is None else cache.window - 1
            rest: Any = {"scale": options["scale"], "sinks": options.get("sinks"), "window_size": seen.get("window_size", own)}
            if form is None:
                paged: mx.array = paged_attention(q, memory[0], memory[1], self.step.table(cache.place), seen["lengths"], **rest)
            else:
                rest |= {"group_size": form[0], "bits": form[1], "lengths": seen["lengths"], "block_table": self.step.table(cache.place)}
                paged = quantized_attention(q, tuple(memory[:3]), tuple(memory[3:]), **rest)
            return paged
        out: mx.array = attention(q, k, v, scale=options["scale"], sinks=options.get("sinks"), **seen)
        return out

    def seen(self, q: mx.array, k: mx.array, mask: Any) -> dict[str, Any] | None:
        """Return the keys of a cache that a query attends to, in the options of ``attention``; None for keys of no cache."""
        place = self.places.get(id(k), (k, None))[1]
        _, mask_place, seen = self.masks.get(id(mask)) or self._cut_from(mask)
        if place is None or q.shape[2] != 1 or (mask is not None and mask_place != place):
            return None
        return {"lengths": self.step.lengths(place)} if mask is None else seen

    def _cut_from(self, mask: Any) -> tuple[Any, int | None, dict[str, Any]]:
        """Return the properties of a mask that a model has sliced to the number of keys."""
        known = list(self.masks.values()) if isinstance(mask, mx.array) else []
        if known:
            same = native.module(mx.default_stream(mx.default_device())).same_arrays
            known = [each for each in known if same([mask], [each[0]])]
        return known[0] if known else (mask, None, {})


def _attention(upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention_of_step(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        capture = current()
        return upstream(q, k, v, **options) if capture is None else capture.attention(upstream, q, k, v, **options)

    return attention_of_step


def current() -> Capture | None:
    """Return the capture of this thread, if there is one."""
    return getattr(_current, "capture", None)


def while_captured(capture: Capture, record: Callable[[Capture], Result]) -> Result:
    """Route this thread's attention through the capture; one thread at a time captures.

    It is a function and not a context manager, because an interrupt between the latter's entry and its block would keep the lock.
    """
    try:
        alone.acquire()  # no with: of CPython 3.14 an interrupt may come between the lock's own beginning and its block
        upstream = mx.fast.scaled_dot_product_attention
        own = _attention(upstream)
        try:
            mx.fast.scaled_dot_product_attention = own
            _current.capture = capture
            return record(capture)
        finally:
            if mx.fast.scaled_dot_product_attention is own:  # the model may have patched or unpatched
                mx.fast.scaled_dot_product_attention = upstream
            _current.capture = None
            capture.forget()
    finally:
        try:  # noqa: SIM105  (suppress has frames of Python's own, in which a further interrupt may come)
            alone.release()
        except RuntimeError:  # an interrupt came before the lock
            pass
