"""Prefill: the GPU starts with the first layers while the CPU still builds the graph of the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .._all_sum import several_processes
from .._loader import native

FEWEST_TOKENS = 16  # fewer leave the device waiting for the host whichever way
LAYERS = 4  # what the device is given at a time
AHEAD = 2  # of these parts the device may have left: what is encoded holds its memory until it has run


def is_prompt(tokens: Any, cache: Any) -> bool:
    """Return whether a call of a model is large enough."""
    return isinstance(tokens, mx.array) and tokens.ndim == 2 and tokens.shape[1] >= FEWEST_TOKENS and isinstance(cache, list)


def is_evaluated(model: Any) -> bool:
    """Return whether all weights of a model are evaluated. Otherwise MLX must compute nothing yet."""
    if native.loaded is None:
        return True
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return are_evaluated(list(weights.values()))


def are_evaluated(arrays: list[mx.array]) -> bool:
    return native.loaded is None or bool(native.loaded.evaluated(arrays))


@contextlib.contextmanager
def begun_ahead(cache: list[Any]) -> Iterator[None]:
    """Have every few layers' keys and values evaluated as soon as their cache is given them, and with them all that leads there; and the
    host wait where it is too far ahead.
    """
    parts: deque[mx.array] = deque()
    groups = [cache[first : first + LAYERS] for first in range(1, len(cache), LAYERS)]
    changed = [first for group in groups if (first := next(filter(_takes, group), None)) is not None]
    try:
        for each in changed:
            each.update_and_fetch = _begun(each.update_and_fetch, parts)
        yield
    finally:
        for each in changed:
            vars(each).pop("update_and_fetch", None)


def _takes(cache: Any) -> bool:
    """Return whether a cache gets keys and values, and no outer model has handled it."""
    return hasattr(cache, "update_and_fetch") and hasattr(cache, "__dict__") and "update_and_fetch" not in vars(cache)


def _begun(update: Callable[..., Any], parts: deque[mx.array]) -> Callable[..., Any]:
    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        if native.loaded is None or not native.loaded.traced([keys, values]):
            if native.loaded is not None and several_processes():
                native.loaded.sum_with_residuals([keys, values])
            mx.async_eval(keys, values)  # type: ignore[no-untyped-call]
            parts.append(keys)
            if len(parts) > AHEAD:
                mx.eval(parts.popleft())
        return update(keys, values)

    return update_and_fetch
