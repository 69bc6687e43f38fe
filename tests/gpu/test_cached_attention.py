"""Calls of attention that are given the graph of one before: the same bits as by Python's rules, and never those of another call."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import _patch

from tests.package.threads import in_threads

from .cached_calls import HEADS, OURS, Call, Watched, arrays, assert_cached, assert_right, assert_same, by_python, listed
from .support import normal, primitives

pytestmark = pytest.mark.gpu


def error_of(call: Call) -> tuple[type[BaseException], str]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return caught.type, str(caught.value)


def options(rng: np.random.Generator, q_len: int, k_len: int, dtype: mx.Dtype) -> dict[str, dict[str, Any]]:
    """What a call may be given, by name."""
    seen = mx.array(rng.random((3, 1, q_len, k_len)) < 0.5)
    return {
        "nothing": {},
        "causal": {"mask": "causal"},
        "scale": {"scale": 0.3},
        "window": {"mask": "causal", "window_size": 5},
        "window sides": {"window_size": (9, 4)},
        "window of all": {"window_size": (k_len, None)},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": normal(rng, (HEADS,), dtype)},
        "strided sinks": {"sinks": normal(rng, (2 * HEADS,), dtype)[::2]},
        "lengths": {"lengths": mx.array([k_len, 7, 0])},
        "left_padding": {"left_padding": mx.array([0, 3, k_len - 1])},
        "ragged": {"mask": "causal", "lengths": mx.array([k_len, 7, 0]), "left_padding": mx.array([0, 3, 0])},
        "lse": {"return_lse": True},
        "deterministic": {"deterministic": True},
        "force_fused": {"force_fused": True},
        "mask": {"mask": seen},
        "mask of 2 dimensions": {"mask": seen[0, 0]},
        "mask of 1 number": {"mask": mx.array([[[True]]])},
        "strided mask": {"mask": seen.swapaxes(2, 3).reshape(3, 1, k_len, q_len).swapaxes(2, 3)},
        "mask and window": {"mask": seen, "window_size": (5, 0)},
        "additive mask and lse": {"mask": mx.where(seen, 0.5, -mx.inf).astype(dtype), "return_lse": True},
        "all": {
            "mask": seen,
            "window_size": (20, 3),
            "softcap": 2.0,
            "sinks": normal(rng, (HEADS,), dtype),
            "lengths": mx.array([k_len, 9, 1]),
            "left_padding": mx.array([1, 0, 0]),
            "return_lse": True,
        },
    }


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=("bfloat16", "float32"))
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 40), (1, 700), (3, 130), (64, 64), (70, 100), (70, 64)])
def test_every_option_is_cached_with_the_same_bits(
    rng: np.random.Generator, watched: Watched, q_len: int, k_len: int, dtype: mx.Dtype
) -> None:
    q, k, v = arrays(rng, q_len, k_len, dtype)
    for name, given in options(rng, q_len, k_len, dtype).items():
        call = partial(OURS.attention, q, k, v, **given)
        if name == "force_fused":
            try:
                call()
            except ValueError:
                continue
        engine = mlx_cuda.explain(q, k, v, **{key: value for key, value in given.items() if key != "force_fused"}).engine
        if engine == "fallback":  # perhaps of more steps than are kept
            assert_right(call)
        else:
            assert_cached(watched, call)
            others = [each[::-1] * 0.5 for each in (q, k, v)]  # equal but for values and strides
            before = watched.looks
            results = listed(OURS.attention(*others, **given))
            assert watched.looks == before
            assert_same(results, by_python(partial(OURS.attention, *others, **given)))


def test_an_equal_call_of_other_arrays_is_cached_at_once(rng: np.random.Generator, watched: Watched) -> None:
    for given in ({}, {"return_lse": True}, {"softcap": 3.0}, {"mask": "causal", "scale": -0.4}):
        OURS.attention(*arrays(rng, 2, 90), **given)
        before = watched.looks
        for _ in range(3):
            q, k, v = arrays(rng, 2, 90)
            call = partial(OURS.attention, q, mx.broadcast_to(k[:1], k.shape), v.swapaxes(1, 2).swapaxes(1, 2), **given)
            result = listed(call())
            assert watched.looks == before
            assert_same(result, by_python(call))
            before = watched.looks


def test_one_array_twice(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 64, 64)
    k, v = mx.repeat(k, 4, axis=1), mx.repeat(v, 4, axis=1)
    calls = [partial(OURS.attention, *each) for each in ((q, k, v), (q, k, k), (q, q, v), (q, q, q), (k, q, k))]
    for call in calls:
        assert_cached(watched, call)
    for call in calls:
        assert_right(call)


@pytest.mark.parametrize("stream", [mx.gpu, mx.Device(mx.gpu, 0), mx.Device(mx.cpu), None], ids=str)
def test_a_device_stands_for_its_stream(rng: np.random.Generator, watched: Watched, stream: Any) -> None:
    q, k, v = arrays(rng, 1, 300, mx.float32)
    call = partial(mlx_cuda.attention, q, k, v, stream=stream)
    assert_cached(watched, call)
    with mx.stream(mx.new_stream(mx.gpu)):
        assert_right(call)


def test_another_call_is_not_taken_for_one_before(rng: np.random.Generator, watched: Watched) -> None:
    """Each differs in one thing, and comes while all others are cached."""
    q, k, v = arrays(rng, 1, 300)
    mask = mx.where(mx.array(rng.random((1, 300)) < 0.5), 0.0, -3.0)
    lengths, sinks = mx.array([300, 7, 100]), normal(rng, (HEADS,), mx.float32)
    values: dict[str, list[Any]] = {
        "window_size": [4, 6, (6, None), (6, 0), (None, 6), (300, None), (299, None), (None, None)],
        "sinks": [sinks.astype(dtype) for dtype in (mx.bfloat16, mx.float32, mx.float16)],
        "mask": [mask.astype(mx.bfloat16), mask > -1, mx.broadcast_to(mask > -1, (3, 8, 1, 300)), (mask > -1)[:, ::-1]],
        "lengths": [lengths, lengths.astype(mx.int16), lengths[::-1], lengths // 2],
        "left_padding": [lengths // 2, lengths // 3],
        "scale": [1, 0.5, -0.5, 0.0],
        "softcap": [1, 2.0, 50.0],
        "stream": [mx.gpu, mx.new_stream(mx.gpu)],
    }
    ours = partial(mlx_cuda.attention, q, k, v)
    calls: list[Call] = [partial(ours, **given) for given in options(rng, 1, 300, mx.bfloat16).values()]
    calls += [partial(ours, **{name: value}) for name, each in values.items() for value in each]
    calls += [
        lambda: mlx_cuda.attention(q.astype(mx.float16), k, v),
        lambda: mlx_cuda.attention(*(each.astype(mx.float16) for each in (q, k, v))),
        lambda: mlx_cuda.attention(q, k, v[..., :32]),
        lambda: mlx_cuda.attention(q[:, :4], k, v),
        lambda: mlx_cuda.attention(q, k[:, :1], v[:, :1]),
        lambda: mlx_cuda.attention(q, mx.broadcast_to(k[:, :, :1], k.shape), v[:, :, ::-1]),
        lambda: mlx_cuda.attention(*(each.astype(mx.float32) for each in (q, k, v)), stream=mx.cpu),
        lambda: mlx_cuda.attention(q[:0], k[:0], v[:0]),
    ]
    assert_right(*calls)


def test_errors_are_those_of_python(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 1, 300)
    sinks, lengths, mask = normal(rng, (HEADS,), mx.bfloat16), mx.array([300, 7, 0]), mx.ones((300,), mx.bool_)
    good: dict[str, Any] = {"window_size": 1, "softcap": 1.0, "sinks": sinks, "lengths": lengths, "mask": mask, "scale": 1.0}
    for name, value in good.items():
        for _ in range(2):
            mlx_cuda.attention(q, k, v, **{name: value})
    bad: list[dict[str, Any]] = [
        *({"window_size": size} for size in (True, [1, None], (1,), (1, 2, 3), -1, 1.0, "1")),
        *({"softcap": cap} for cap in (0.0, -1.0, float("inf"), float("nan"), "1")),
        *({"sinks": vector} for vector in (sinks[:4], sinks[None], sinks.tolist(), lengths, 1.0)),
        *({"lengths": vector} for vector in (lengths[:2], lengths[None], lengths.tolist(), lengths.astype(mx.float32))),
        *({"mask": value} for value in ("full", "", mask[:200], mask.tolist(), True, mx.ones((1,) * 5, mx.bool_), mask.astype(mx.float32))),
        {"scale": "one"},
        {"stream": "gpu"},
    ]
    for given in bad:
        call = partial(mlx_cuda.attention, q, k, v, **given)
        assert error_of(call) == error_of(partial(by_python, call))


TRANSFORMED: list[tuple[int, int, dict[str, Any]]] = [  # whose gradients have the same bits each time
    (1, 300, {}),
    (64, 64, {"mask": "causal", "deterministic": True}),  # cuDNN, with a backward
    (64, 64, {"return_lse": True, "deterministic": True}),
    (64, 64, {"softcap": 2.0}),
    (70, 100, {"mask": "causal", "softcap": 2.0}),
    (2, 40, {"window_size": 9}),
    (2, 40, {"return_lse": True}),
]


@pytest.mark.parametrize(("q_len", "k_len", "given"), TRANSFORMED, ids=str)
def test_gradients_vmap_and_compile(rng: np.random.Generator, watched: Watched, q_len: int, k_len: int, given: dict[str, Any]) -> None:
    inputs = arrays(rng, q_len, k_len, batch=2)
    call = partial(OURS.attention, **given)

    def loss(*primals: mx.array) -> mx.array:
        return sum(((each.astype(mx.float32) ** 2).sum() for each in listed(call(*primals))), start=mx.array(0.0))

    def gradients() -> tuple[mx.array, ...]:
        return tuple(mx.grad(loss, argnums=[0, 1, 2])(*inputs))

    assert_cached(watched, partial(call, *inputs))
    assert_right(gradients)
    for which in range(3):  # the others are plain

        def one(t: mx.array, which: int = which) -> mx.array:
            return loss(*inputs[:which], t, *inputs[which + 1 :])

        assert_right(partial(mx.grad(one), inputs[which]))
    assert_right(lambda: tuple(listed(mx.vmap(call)(*(mx.stack([each, each * 0.5]) for each in inputs)))))
    assert_same(listed(mx.compile(call)(*inputs)), by_python(partial(call, *inputs)))
    assert_right(lambda: tuple(mx.compile(mx.grad(loss, argnums=[0, 1, 2]))(*inputs)))
    assert_cached(watched, partial(call, *inputs))


def test_gradients_with_masks_and_sinks(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 64, 64, batch=2)
    sinks, mask = normal(rng, (HEADS,), mx.bfloat16), normal(rng, (1, 1, 64, 64), mx.bfloat16)
    cases: list[tuple[dict[str, mx.array], dict[str, Any]]] = [
        ({"sinks": sinks}, {}),
        ({"mask": mask}, {}),
        ({}, {"mask": mask > 0}),
        ({"sinks": sinks}, {"lengths": mx.array([64, 9])}),
    ]
    for traced, rest in cases:

        def loss(*inputs: mx.array, traced: Any = traced, rest: Any = rest) -> mx.array:
            options = dict(zip(traced, inputs[3:], strict=True))
            result: mx.array = OURS.attention(*inputs[:3], **options, **rest, deterministic=True)
            return (result.astype(mx.float32) ** 2).sum()

        inputs = (q, k, v, *traced.values())
        loss(*inputs)  # cached without what says how derivatives are taken
        assert_right(partial(mx.grad(loss, argnums=list(range(len(inputs)))), *inputs))


def test_the_stream_is_that_of_the_call(rng: np.random.Generator, watched: Watched) -> None:
    q, k, v = arrays(rng, 1, 300)
    call = partial(OURS.attention, q, k, v)
    stream = mx.new_stream(mx.gpu)
    for _ in range(3):
        assert primitives(call()) == {"DecodeAttention"}
        assert_right(partial(call, stream=stream))
        with mx.stream(stream):
            assert_right(call)
        assert "DecodeAttention" not in primitives(call(stream=mx.cpu))
        with mx.stream(mx.cpu):
            assert "DecodeAttention" not in primitives(call())
            assert primitives(call(stream=mx.gpu)) == {"DecodeAttention"}


def test_threads_cache_for_themselves(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 1, 400, batch=1)
    sizes = range(100, 400, 17)
    calls = [partial(OURS.attention, q, k[:, :, :n], v[:, :, :n], return_lse=True) for n in sizes]
    expected = [[np.array(each.astype(mx.float32)) for each in by_python(call)] for call in calls]

    def work() -> None:
        with mx.stream(mx.new_stream(mx.gpu)):
            for _ in range(20):
                for call, exact in zip(calls, expected, strict=True):
                    for one, other in zip(call(), exact, strict=True):
                        np.testing.assert_array_equal(np.array(one.astype(mx.float32)), other)

    in_threads(4, work)


def test_the_patched_function_is_cached(rng: np.random.Generator, watched: Watched) -> None:
    mask = mx.array(rng.random((1, 1, 1, 300)) < 0.5)
    sinks = normal(rng, (HEADS,), mx.bfloat16)
    cases: list[tuple[int, mx.Dtype, dict[str, Any]]] = [
        (300, mx.bfloat16, {}),
        (301, mx.bfloat16, {}),
        (300, mx.bfloat16, {"mask": mask}),
        (300, mx.bfloat16, {"sinks": sinks}),
        (40, mx.bfloat16, {}),
        (40, mx.bfloat16, {"mask": "causal"}),
        (40, mx.float32, {}),
        (41, mx.float32, {"mask": "causal"}),
    ]
    with mlx_cuda.patch():
        for k_len, dtype, given in cases:
            inputs = arrays(rng, 1, k_len, dtype)
            patched, plain = (partial(f, *inputs, scale=0.1, **given) for f in (mx.fast.scaled_dot_product_attention, _patch._attention))
            expected = listed(plain())
            assert_same(listed(patched()), expected)
            before = watched.looks
            assert_same(listed(patched()), expected)
            assert watched.looks == before
        q, k, v = arrays(rng, 1, 300)
        before = watched.looks
        for n in range(2, 300):
            mx.fast.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], scale=0.25)
        assert watched.looks == before + 1
        with pytest.raises(ValueError, match="mask"):
            mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask="full")
