"""Whether a model holds what it held when its step was recorded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .._loader import native


class Weights:
    """A model's arrays, by identity, and what leads to them."""

    def __init__(self, model: Any, stream: mx.Stream) -> None:
        self._module = native.module(stream)
        self._held = self._module.Held(model)

    def same(self, model: Any) -> bool:
        """Whether they are the same ones, or others of equal values: some models write weights of theirs anew in each call.

        Never those of a transformation, as training is: they have no values.
        """
        if self._held.unchanged():
            return True
        replaced = self._held.replaced()
        if replaced is None or self._module.traced([new for _, new in replaced]) or not all(_equal(*pair) for pair in replaced):
            return False
        self._held = self._module.Held(model)
        return True


def _equal(one: mx.array, other: mx.array) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(mx.array_equal(one, other).item())
