"""Caches whose arrays a token's step replaces, as those of linear attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._mlx_lm.caches import Replaced, kind_of, put_back, standing
from mlx_cuda._mlx_lm.stand_ins import ReplacedStandIn
from mlx_cuda._replay.capture import Capture
from mlx_cuda._replay.errors import NotReplayed
from mlx_cuda._replay.kinds import Place


class ArraysCache:
    """As mlx-lm's, as far as it matters here."""

    lengths: Any = None
    left_padding: Any = None

    def __init__(self, *arrays: mx.array) -> None:
        self.cache = list(arrays)


ArraysCache.__module__ = "mlx_lm.models.cache"


def test_arrays_that_are_replaced_have_no_place() -> None:
    cache = ArraysCache(mx.zeros((1, 2)), mx.ones(3))
    assert kind_of(cache) is Replaced
    assert Replaced.next(cache, 0) == Replaced.last(cache) == Place(0, 0, 1)
    assert [Replaced.memory(array, 0).shape for array in Replaced.arrays(cache)] == [(1, 2), (3,)]
    assert Replaced.fits(cache.cache[0], mx.ones((1, 2)))
    assert not Replaced.fits(cache.cache[0], mx.ones((1, 2), mx.float16))
    for padding in ({"lengths": mx.array([1])}, {"left_padding": mx.array([0, 1])}):
        vars(cache).update(padding)
        assert Replaced.next(cache, 0) is None
        with pytest.raises(NotReplayed, match="padding"):
            Replaced.last(cache)
        vars(cache).update(dict.fromkeys(padding))
    cache.left_padding = mx.array([-3, 0])  # as mlx-lm leaves it after a prompt
    assert Replaced.next(cache, 0) == Place(0, 0, 1)
    assert cache.left_padding is None


def test_arrays_that_a_step_has_replaced_come_back() -> None:
    one, other = mx.zeros(2), mx.ones(2)
    cache = ArraysCache(one)
    before = standing([cache])
    earlier = Replaced.before(cache)
    cache.cache[0] = other
    assert earlier[0] is one
    put_back([cache], before)
    assert cache.cache[0] is one


def test_what_a_model_puts_in_place_of_arrays() -> None:
    memory = [mx.zeros((1, 2)), mx.zeros(3)]
    changes = [False, True]
    stand_in: Any = ReplacedStandIn(Capture(SimpleNamespace(content=lambda array: array + 1)), memory, ArraysCache, changes)
    shown = stand_in.shown
    assert type(shown) is ArraysCache  # whose methods models call
    first, second = shown.cache
    with pytest.raises(NotReplayed, match="other arrays"):  # than the model replaces
        stand_in.replaced()
    shown.cache[1] = new = second * 2
    assert [[id(array) for array in each] for each in stand_in.replaced()] == [[id(new)], [id(memory[1])]]
    wrong: Any
    for wrong in (first[0], first.astype(mx.float16), None):
        shown.cache[1] = wrong
        with pytest.raises(NotReplayed, match="another shape or dtype"):
            stand_in.replaced()
