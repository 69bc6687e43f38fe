"""Calls of attention that are given the graph of one before for fewer or more keys: of a growing cache, in pages, and packed."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from .cached_calls import DIM, HEADS, KV_HEADS, OURS, Call, Watched, arrays, assert_cached, assert_right, assert_same, by_python, listed
from .support import normal

pytestmark = pytest.mark.gpu


GROWING: list[tuple[int, mx.Dtype, dict[str, Any], int]] = [  # queries, dtype, options, and how often Python may look
    (1, mx.bfloat16, {}, 2),
    (1, mx.bfloat16, {"softcap": 3.0}, 2),
    (1, mx.bfloat16, {"return_lse": True}, 2),
    (1, mx.bfloat16, {"scale": -0.3}, 2),
    (1, mx.bfloat16, {"mask": "causal", "window_size": 50}, 3),
    (1, mx.bfloat16, {"window_size": (300, 2)}, 3),
    (5, mx.float16, {"mask": "causal", "lengths": mx.array([1])}, 3),
    (40, mx.bfloat16, {"mask": "causal", "softcap": 2.0}, 3),
    (1, mx.float32, {}, 2),
]


@pytest.mark.parametrize(("q_len", "dtype", "given", "most"), GROWING, ids=str)
def test_a_growing_cache(rng: np.random.Generator, watched: Watched, q_len: int, dtype: mx.Dtype, given: dict[str, Any], most: int) -> None:
    """Python looks where a rule changes: at the first key, at as many as there are queries, at the window's end."""
    q, k, v = arrays(rng, q_len, 600, dtype, batch=1)
    sinks = {"sinks": normal(rng, (HEADS,), dtype)} if "softcap" in given else {}
    steps = [*range(1, 70), *range(240, 320), 599, 600]
    calls = [partial(OURS.attention, q, k[:, :, :n], v[:, :, :n], **given, **sinks) for n in steps]
    expected = [by_python(call) for call in calls]
    before = watched.looks
    for call, exact in zip(calls, expected, strict=True):
        assert_same(listed(call()), exact)
    assert watched.looks <= before + most


@pytest.mark.parametrize("order", [1, -1], ids=("growing", "shrinking"))
@pytest.mark.parametrize(("window", "mask"), [(30, "causal"), ((30, 0), None), ((30, None), None), ((None, 3), None)], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_windows_at_the_ends_of_their_range(
    rng: np.random.Generator, watched: Watched, q_len: int, window: Any, mask: str | None, order: int
) -> None:
    """A window of no fewer keys than there are is none."""
    q, k, v = arrays(rng, q_len, 45, batch=2)
    sizes = [1, 2, q_len - 1, q_len, q_len + 1, 29, 30, 31, 32, 44, 45]
    calls = [partial(OURS.attention, q, k[:, :, :n], v[:, :, :n], window_size=window, mask=mask, scale=0.11) for n in sizes[::order] if n]
    assert_right(*calls)


def test_masks_of_a_growing_cache(rng: np.random.Generator, watched: Watched) -> None:
    """Each number of keys is a call of its own, which all layers of a step share."""
    for n in (300, 301, 302, 300):
        for _ in range(2):
            q, k, v = arrays(rng, 1, n)
            mask = mx.array(rng.random((3, 1, 1, n)) < 0.5)
            for given in (mask, mx.where(mask, 0.0, -mx.inf).astype(mx.bfloat16)):
                assert_cached(watched, partial(OURS.attention, q, k, v, mask=given))


def test_keys_by_name_and_of_another_dtype(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 1, 400)
    for n in (100, 101, 399, 100):
        assert_right(partial(OURS.attention, q, v=v[:, :, :n], k=k[:, :, :n]))
        assert_right(partial(OURS.attention, q, k[:, :, :n].astype(mx.float32), v[:, :, :n]))  # composed, or cast: one number each
        assert_right(partial(OURS.attention, q, k[:, :, :n].astype(mx.float16), v[:, :, :n].astype(mx.float16)))
    wrong: list[Call] = [lambda: OURS.attention(q, k, v[:, :, :99]), lambda: OURS.attention(q, k[:, :, :99], v)]
    for call in wrong:
        with pytest.raises(ValueError, match="k and v must agree"):
            call()


def test_growing_keys_under_transformations(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 1, 500, batch=1)

    def loss(*primals: mx.array) -> mx.array:
        result: mx.array = OURS.attention(*primals)
        return (result.astype(mx.float32) ** 2).sum()

    for n in (2, 130, 131, 500):
        inputs = q, k[:, :, :n], v[:, :, :n]
        assert_right(partial(mx.grad(loss, argnums=[0, 1, 2]), *inputs))
        assert_same(listed(mx.compile(OURS.attention)(*inputs)), by_python(partial(OURS.attention, *inputs)))


def test_pages(rng: np.random.Generator, watched: Watched) -> None:
    q = normal(rng, (3, HEADS, 2, DIM), mx.bfloat16)
    k, v = (normal(rng, (20, KV_HEADS, 16, DIM), mx.bfloat16) for _ in range(2))
    table, lengths = mx.array(rng.permutation(18).reshape(3, 6)), mx.array([90, 17, 0])
    sinks = normal(rng, (HEADS,), mx.bfloat16)
    table = table.astype(mx.int32)
    different: list[dict[str, Any]] = [
        {},
        {"scale": 0.5},
        {"softcap": 2.0},
        {"sinks": sinks},
        {"return_lse": True},
        *({"window_size": size} for size in (20, 21, 96)),
    ]
    for given in different:
        assert_cached(watched, partial(mlx_cuda.paged_attention, q, k, v, table, lengths, **given))
    calls: list[Call] = [
        lambda: mlx_cuda.paged_attention(q, k, v, table, lengths // 2),
        lambda: mlx_cuda.paged_attention(q, k, v, table[:, ::-1], lengths),
        lambda: mlx_cuda.paged_attention(q, k, v, table[:, :4], lengths // 2),
        lambda: mlx_cuda.paged_attention(q, k[:, :, ::2], v[:, :, ::2], table, lengths // 2),
        lambda: mlx_cuda.paged_attention(q, k, v[..., :32], table, lengths),
        lambda: mlx_cuda.paged_attention(q, k, v, table, lengths, sinks=sinks.astype(mx.float32)),
        lambda: mlx_cuda.paged_attention(q.astype(mx.float16), k, v, table, lengths),
    ]
    for call in calls:
        assert_right(call)
    for size in (20, 32, 64, 95, 96):  # where a window of no fewer keys than there are becomes one
        for columns in (1, 2, 3, 4, 5, 6, 1):
            assert_right(partial(mlx_cuda.paged_attention, q, k, v, table[:, :columns], lengths // 6, window_size=size))
    before = watched.looks
    for columns in range(1, 7):
        mlx_cuda.paged_attention(q, k, v, table[:, :columns], lengths // 6, scale=0.7)
    assert watched.looks == before + 1
    wrong: dict[str, Any] = {"window_size": (20, None)}
    with pytest.raises(ValueError, match="window_size"):
        mlx_cuda.paged_attention(q, k, v, table, lengths, **wrong)


def test_packed_sequences(rng: np.random.Generator, watched: Watched) -> None:
    q = normal(rng, (50, HEADS, DIM), mx.bfloat16)
    k, v = (normal(rng, (60, KV_HEADS, DIM), mx.bfloat16) for _ in range(2))
    cu_q, cu_k = mx.array([0, 20, 20, 45]), mx.array([0, 30, 31, 58])
    sinks = normal(rng, (HEADS,), mx.bfloat16)

    def call(*arrays: mx.array, **given: Any) -> Any:
        return mlx_cuda.attention_varlen(*(arrays or (q, k, v, cu_q, cu_k)), **{"max_seqlen_q": 25, "max_seqlen_k": 30} | given)

    different: list[dict[str, Any]] = [
        {}, {"mask": "causal"}, {"window_size": 4}, {"window_size": (4, 2)}, {"softcap": 2.0}, {"sinks": sinks}, {"return_lse": True},
        {"scale": 0.3}, {"max_seqlen_q": 31}, {"max_seqlen_k": 60},
    ]  # fmt: skip
    for given in different:
        assert_cached(watched, partial(call, **given))
    fewer = mx.array([0, 20, 25, 25])
    for others in ((q, k, v, fewer, cu_k), (q[:45], k, v, cu_q, cu_k), (q, k, v, cu_q[:3], cu_k[:3]), (q, k, v[..., :32], cu_q, cu_k)):
        assert_right(partial(call, *others))
    for rows, looks in ((58, 1), (59, 0), (60, 0)):
        before = watched.looks
        result = listed(call(q, k[:rows], v[:rows], cu_q, cu_k, scale=0.7))
        assert watched.looks == before + looks
        assert_same(result, by_python(partial(call, q, k[:rows], v[:rows], cu_q, cu_k, scale=0.7)))
    gradient = mx.grad(lambda *arrays: (call(*arrays, cu_q, cu_k).astype(mx.float32) ** 2).sum(), argnums=[0, 1, 2])
    assert_right(lambda: tuple(gradient(q, k, v)))
    with pytest.raises(ValueError, match="max_seqlen_q"):
        call(max_seqlen_q=True)
