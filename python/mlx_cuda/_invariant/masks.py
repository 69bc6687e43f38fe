"""The keys that a row sees by mlx-lm's masks, counted from its sequence's first; attention uses them instead of the masks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import mlx.core as mx

from .._loader import native


class Seen(NamedTuple):
    """A causal mask of so many queries, which stand after so many keys; of no more keys than ``window``, none of them padding."""

    queries: int
    offset: int
    window: int | None
    left_padding: mx.array | None

    def options(self) -> dict[str, Any]:
        """The same as arguments of ``mlx_cuda.attention``."""
        window = None if self.window is None else self.window - 1  # besides its own place
        return {"mask": "causal", "window_size": window, "left_padding": self.left_padding}


# By identity: the mask, what it was when it was made, and what it says.
_known: dict[int, tuple[weakref.ref[mx.array], mx.array, Seen]] = {}


def remembering(create_causal_mask: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's function, whose masks are known afterwards."""

    @wraps(create_causal_mask)
    def create(
        N: int,  # noqa: N803
        offset: int = 0,
        window_size: int | None = None,
        right_padding: mx.array | None = None,
        left_padding: mx.array | None = None,
    ) -> mx.array:
        mask = create_causal_mask(N, offset, window_size, right_padding, left_padding)
        counts = isinstance(offset, int) and (window_size is None or (isinstance(window_size, int) and window_size > 0))
        if right_padding is None and counts:
            # Copies of the arrays: an addition in place would change them.
            padding = None if left_padding is None else left_padding.astype(mx.int32)
            _remember(mask, Seen(N, offset, window_size, padding))
        return mask

    return create


def _remember(mask: mx.array, seen: Seen) -> None:
    key = id(mask)
    _known[key] = (weakref.ref(mask, lambda _: _known.pop(key, None)), mask.astype(mx.bool_), seen)


def seen_by(mask: mx.array) -> Seen | None:
    """The keys of a mask, if it is one of those and was not written to since."""
    reference, made, seen = _known.get(id(mask), (None, mask, None))
    if reference is None or reference() is not mask:
        return None
    same = native.loaded is None or native.loaded.same_arrays([mask], [made])
    return seen if same else None
