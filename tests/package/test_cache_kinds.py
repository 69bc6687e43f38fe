"""Where tokens go in a cache."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_cuda._mlx_lm.caches import Batched, Growing, Replaced, Rotating, kind_of
from mlx_cuda._replay.errors import NotReplayed
from mlx_cuda._replay.kinds import Place


def test_growing() -> None:
    cache = SimpleNamespace(offset=1000)
    assert Growing.capacity(cache) == 2048
    assert Growing.next(cache, 1001) == Place(1000, 1000, 1001)
    assert Growing.next(cache, 1000) is None
    assert Growing.last(cache) == Place(999, 999, 1000)
    Growing.advance(cache, Place(1000, 1000, 1001))
    assert cache.offset == 1001
    assert Growing.window(5, 9) == 5


@pytest.mark.parametrize(("rows", "capacity"), [(0, 1024), (768, 1024), (769, 2048), (3841, 8192), (7937, 12288), (30000, 32768)])
def test_capacities_grow_by_as_much_as_there_is_but_by_few_rows(rows: int, capacity: int) -> None:
    assert Growing.capacity(SimpleNamespace(offset=rows)) == Batched.capacity(SimpleNamespace(_idx=rows)) == capacity


@pytest.mark.parametrize(("offset", "row", "place"), [
    (7, 7, Place(7, 7, 8)), (8, 8, Place(8, 2, 8)), (21, 5, Place(21, 5, 8)),
])  # fmt: skip
def test_rotating(offset: int, row: int, place: Place) -> None:
    cache = SimpleNamespace(offset=offset, _idx=row, max_size=8, keep=2)
    assert Rotating.capacity(cache) == 8
    assert Rotating.next(cache, 8) == place
    assert Rotating.next(cache, 16) is None
    Rotating.advance(cache, place)
    assert Rotating.last(cache) == place
    assert Rotating.window(None, 8) is Rotating.window(8, 8) is None
    with pytest.raises(NotReplayed, match="window"):
        Rotating.window(4, 8)


def test_a_rotating_cache_after_a_long_prompt() -> None:
    rows = mx.arange(11).reshape(1, 1, 11, 1)
    cache = SimpleNamespace(offset=11, _idx=11, max_size=8, keep=2)
    content, count = Rotating.content(cache, rows)
    assert content.flatten().tolist() == [0, 1, 5, 6, 7, 8, 9, 10]
    assert count == 8
    Rotating.settle(cache)
    assert cache._idx == 8


def test_how_many_rows_there_are() -> None:
    rows = mx.zeros((2, 1, 9, 4))
    assert Growing.content(SimpleNamespace(offset=5), rows) == (rows, 5)
    assert Batched.content(SimpleNamespace(_idx=7), rows) == (rows, 7)
    assert Rotating.content(SimpleNamespace(offset=5, max_size=9, keep=0), rows) == (rows, 5)
    assert Rotating.content(SimpleNamespace(offset=21, max_size=9, keep=0), rows) == (rows, 9)
    assert Replaced.content(None, rows) == (rows, None)


def test_caches_that_are_not_known() -> None:
    cache = type("KVCache", (), {"__module__": "mlx_lm.models.cache"})()
    assert kind_of(cache) is Growing
    with pytest.raises(NotReplayed, match="its cache is a dict"):
        kind_of({})
