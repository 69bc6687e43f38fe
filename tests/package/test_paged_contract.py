"""Keys in pages: what they mean and what is refused; all combinations are in test_random_calls.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda import attention, paged_attention, paged_cache_update

from .references import assert_close, host, random

NAN = float("nan")
ROWS, ENDS = [[4, 1, -1], [2, 0, 3]], [6, 11]
TABLE, LENGTHS = mx.array(ROWS), mx.array(ENDS)
Q = random((2, 4, 2, 8), seed=1)
KEYS, VALUES = random((2, 2, 12, 8), seed=2), random((2, 2, 12, 16), seed=3)


def pages(contiguous: mx.array, size: int = 4, count: int = 6) -> mx.array:
    """[B, Hkv, T, D] in pages as TABLE says; all else is NaN."""
    result = np.full((count, contiguous.shape[1], size, contiguous.shape[3]), NAN, np.float32)
    for row, length, values in zip(ROWS, ENDS, host(contiguous), strict=True):
        for place in range(length):
            result[row[place // size], :, place % size] = values[:, place]
    return mx.array(result)


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 3}, {"softcap": 2.0, "scale": -0.3}, {"sinks": mx.array([1.0, 0.0, -1.0, 2.0])}], ids=str
)
def test_pages_in_any_order_are_one_cache(options: dict[str, Any]) -> None:
    out, lse = paged_attention(Q, pages(KEYS), pages(VALUES), TABLE, LENGTHS, return_lse=True, **options)
    expected, lse_expected = attention(Q, KEYS, VALUES, mask="causal", lengths=LENGTHS, return_lse=True, **options)
    assert_close(out, host(expected))
    assert_close(lse, host(lse_expected))


def test_an_empty_sequence() -> None:
    out, lse = paged_attention(Q, pages(KEYS), pages(VALUES), TABLE, mx.array([0, 1]), return_lse=True)
    assert not host(out)[0].any()
    assert not host(out)[1, :, 0].any()  # the query before the only key
    assert (host(lse)[0] == -np.inf).all()
    np.testing.assert_allclose(host(out)[1, :, 1], np.repeat(host(VALUES)[1, :, 0], 2, axis=0), rtol=1e-6)


def test_no_pages_at_all() -> None:
    empty = mx.zeros((0, 2, 4, 8))
    assert not host(paged_attention(Q, empty, empty, TABLE, mx.array([0, 0]))).any()
    assert not host(paged_attention(Q, pages(KEYS), pages(VALUES), TABLE[:, :0], mx.array([0, 0]))).any()


def test_many_queries_and_other_dtypes() -> None:
    q = random((2, 4, 40, 8), seed=5)
    out = paged_attention(q.astype(mx.bfloat16), pages(KEYS).astype(mx.bfloat16), pages(VALUES), TABLE, LENGTHS)
    assert out.dtype == mx.float32
    q, keys = (each.astype(mx.bfloat16).astype(mx.float32) for each in (q, KEYS))
    assert_close(out, host(attention(q, keys, VALUES, mask="causal", lengths=LENGTHS)))


# -------------------------------------------------------------------------------------------------------------------------- update
@pytest.mark.parametrize("steps", [1, 3, 7, 12])
def test_new_keys_go_to_the_end(steps: int) -> None:
    """Places before the first, of 7 new keys of which a sequence has room for 6, are dropped."""
    k_pages, v_pages = pages(KEYS), pages(VALUES)
    new_keys, new_values = (random((2, 2, steps, size), seed=7) for size in (8, 16))
    before = [np.array(each) for each in (k_pages, v_pages)]
    k_pages, v_pages = paged_cache_update(k_pages, v_pages, new_keys, new_values, TABLE, LENGTHS)
    for updated, values, new in zip((k_pages, v_pages), before, (new_keys, new_values), strict=True):
        for row, length, rows in zip(ROWS, ENDS, host(new), strict=True):
            for step in range(steps):
                place = length - steps + step
                if place >= 0:
                    values[row[place // 4], :, place % 4] = rows[:, step]
        np.testing.assert_array_equal(np.array(updated), values)


def test_what_has_no_page_is_dropped() -> None:
    k_pages = mx.zeros((2, 1, 4, 8))
    new = mx.ones((1, 1, 3, 8))
    for table, length in ((mx.array([[-1]]), 3), (mx.array([[7]]), 3), (mx.array([[1]]), 9), (mx.array([[1]]), 0)):
        updated, _ = paged_cache_update(k_pages, k_pages, new, new, table, mx.array([length]))
        assert not host(updated).any()


def test_an_update_of_nothing() -> None:
    k_pages, nothing = pages(KEYS), mx.zeros((2, 2, 0, 8))
    updated, _ = paged_cache_update(k_pages, k_pages, nothing, nothing, TABLE, LENGTHS)
    assert updated.shape == k_pages.shape


def test_the_update_keeps_the_pages_dtype() -> None:
    k_pages = mx.zeros((6, 2, 4, 8), mx.float16)
    updated, values = paged_cache_update(k_pages, k_pages, KEYS[:, :, :3], KEYS[:, :, :3], TABLE, LENGTHS)
    assert updated.dtype == values.dtype == mx.float16


def test_step_by_step_as_with_a_plain_cache() -> None:
    k_pages, v_pages = mx.zeros((6, 2, 4, 8)), mx.zeros((6, 2, 4, 16))
    for length in range(1, 9):
        ends = mx.array([length, length])
        step = slice(length - 1, length)
        k_pages, v_pages = paged_cache_update(k_pages, v_pages, KEYS[:, :, step], VALUES[:, :, step], mx.array([[0, 3], [5, 1]]), ends)
        out = paged_attention(Q[:, :, :1], k_pages, v_pages, mx.array([[0, 3], [5, 1]]), ends)
        assert_close(out, host(attention(Q[:, :, :1], KEYS[:, :, :length], VALUES[:, :, :length])))


# ------------------------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": mx.ones((4, 2, 8))}, r"q must have the 4 dimensions \[B, H, T, D\], got \(4,2,8\)\."),
        ({"k_pages": mx.ones((6, 2, 8))}, r"k_pages must have the 4 dimensions \[pages, Hkv, page_size, D\], got \(6,2,8\)\."),
        ({"v_pages": mx.ones((5, 2, 4, 8))}, r"k_pages and v_pages must agree in number of pages, heads, page size, got"),
        ({"k_pages": mx.ones((6, 2, 0, 8)), "v_pages": mx.ones((6, 2, 0, 8))}, r"A page must hold a key, got \(6,2,0,8\)\."),
        ({"q": mx.ones((2, 4, 2, 6))}, r"q and k_pages must have the same last dimension, got \(2,4,2,6\) and \(6,2,4,8\)\."),
        ({"q": mx.ones((2, 3, 2, 8))}, r"The heads of q must be a multiple of those of k, got 3 and 2\."),
        ({"block_table": mx.array([0, 1])}, r"block_table must have the shape \(2, n\), got \(2,\)\."),
        ({"block_table": mx.array([[0, 1]])}, r"block_table must have the shape \(2,2\), got \(1,2\)\."),
        ({"block_table": mx.ones((2, 3))}, r"block_table must be of a type such as int32, got float32\."),
        ({"lengths": mx.array([1])}, r"lengths must have the shape \(2,\), got \(1,\)\."),
        ({"window_size": (3, 0)}, r"window_size must be a number of keys, not negative, got \(3, 0\)\."),
        ({"window_size": -3}, "window_size must be"),
        ({"softcap": 0.0}, "softcap must be positive and finite"),
        ({"sinks": mx.ones(2)}, r"sinks must have the shape \(4,\), got \(2,\)\."),
        ({"force_fused": True, "stream": mx.cpu}, "force_fused is set, but no fused kernel supports this call: the stream is on the CPU"),
    ],
    ids=str,
)
def test_attention_that_does_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k_pages": pages(KEYS), "v_pages": pages(VALUES), "block_table": TABLE, "lengths": LENGTHS}
    with pytest.raises(ValueError, match=rf"^\[paged_attention\] {message}"):
        paged_attention(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": mx.ones((2, 2, 1, 6))}, r"keys must be \[B, 2, T, 8\] as the pages are, got \(2,2,1,6\)\."),
        ({"values": mx.ones((2, 1, 1, 16))}, r"values must be \[B, 2, T, 16\] as the pages are, got \(2,1,1,16\)\."),
        ({"values": mx.ones((2, 2, 3, 16))}, r"keys and values must agree in batch, heads and length, got \(2,2,1,8\) and \(2,2,3,16\)\."),
        ({"v_pages": mx.ones((6, 2, 4, 16), mx.float16)}, r"k_pages and v_pages must be of one type, got float32 and float16\."),
        ({"block_table": mx.array([[1]])}, r"block_table must have the shape \(2,1\), got \(1,1\)\."),
        ({"lengths": mx.ones(2)}, r"lengths must be of a type such as int32, got float32\."),
    ],
    ids=str,
)
def test_updates_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k_pages": pages(KEYS),
        "v_pages": pages(VALUES),
        "keys": KEYS[:, :, :1],
        "values": VALUES[:, :, :1],
        "block_table": TABLE,
        "lengths": LENGTHS,
    }
    with pytest.raises(ValueError, match=rf"^\[paged_cache_update\] {message}"):
        paged_cache_update(**(arguments | changed))
    with pytest.raises(TypeError, match=r"^\[paged_cache_update\] keys must be an mlx\.core\.array, got NoneType\.$"):
        paged_cache_update(**(arguments | {"keys": None}))
