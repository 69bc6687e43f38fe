"""Calls of attention that are answered without Python: the same bits as with it, and never those of another call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import native as _native

from .support import normal

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Results = list[mx.array]
    Call = Callable[[], Any]

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 64


class Watched:
    """The native module, and how many calls it answered before Python looked at them."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.answered = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if not name.endswith("_again"):
            return function

        def watch(*arguments: Any) -> Any:
            result = function(*arguments)
            self.answered += result is not None
            return result

        return watch


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    module = Watched(_native.load())
    monkeypatch.setattr(_native, "loaded", module)
    return module


def listed(results: Any) -> Results:
    return list(results) if isinstance(results, tuple) else [results]


def by_python(call: Call) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "loaded", None)
        return listed(call())


def assert_same(actual: Results, expected: Results) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert mx.array_equal(one, other).item()  # no NaN equals itself


def assert_answered(watched: Watched, call: Call, times: int = 1) -> None:
    """The call is answered natively at the latest when it comes again, with the bits that Python's way gives."""
    expected = by_python(call)
    assert_same(listed(call()), expected)
    before = watched.answered
    for _ in range(times):
        assert_same(listed(call()), expected)
    assert watched.answered == before + times


def assert_right(call: Call) -> None:
    """Whoever answers."""
    expected = by_python(call)
    for _ in range(2):
        assert_same(listed(call()), expected)


def error_of(call: Call) -> tuple[type[BaseException], str]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return caught.type, str(caught.value)


def arrays(rng: np.random.Generator, q_len: int, k_len: int, dtype: mx.Dtype = mx.bfloat16, batch: int = 3) -> Results:
    shapes = [(batch, HEADS, q_len, DIM), *2 * [(batch, KV_HEADS, k_len, DIM)]]
    return [normal(rng, shape, dtype) for shape in shapes]


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
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 40), (1, 700), (3, 130), (64, 64), (70, 100)])
def test_every_option_is_answered_with_the_same_bits(
    rng: np.random.Generator, watched: Watched, q_len: int, k_len: int, dtype: mx.Dtype
) -> None:
    q, k, v = arrays(rng, q_len, k_len, dtype)
    for name, given in options(rng, q_len, k_len, dtype).items():
        call = partial(mlx_cuda.attention, q, k, v, **given)
        if name == "force_fused":
            try:
                call()
            except ValueError:
                continue
        engine = mlx_cuda.explain(q, k, v, **{key: value for key, value in given.items() if key != "force_fused"}).engine
        masked = isinstance(given.get("mask"), mx.array)
        if engine == "composed" or (engine == "upstream" and (masked or name == "force_fused")):
            assert_right(call)
        else:
            assert_answered(watched, call)


@pytest.mark.parametrize("stream", [mx.gpu, mx.Device(mx.gpu, 0), mx.Device(mx.cpu), None], ids=str)
def test_a_device_stands_for_its_stream(rng: np.random.Generator, watched: Watched, stream: Any) -> None:
    q, k, v = arrays(rng, 1, 300, mx.float32)
    call = partial(mlx_cuda.attention, q, k, v, stream=stream)
    assert_answered(watched, call)
    with mx.stream(mx.new_stream(mx.gpu)):
        assert_right(call)


def test_another_call_is_not_taken_for_one_before(rng: np.random.Generator, watched: Watched) -> None:
    """Each differs in one thing, and comes while all others are remembered."""
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
    expected = [by_python(call) for call in calls]
    for _ in range(2):
        for call, exact in zip(calls, expected, strict=True):
            assert_same(listed(call()), exact)


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


@pytest.mark.parametrize("given", [{}, {"softcap": 3.0}, {"window_size": 50, "mask": "causal"}], ids=str)
def test_a_growing_cache_is_answered(rng: np.random.Generator, watched: Watched, given: dict[str, Any]) -> None:
    """Python looks at a few steps of all, wherever the cache is short."""
    q, k, v = arrays(rng, 1, 600, batch=1)
    steps = [*range(1, 70), *range(240, 320), 599, 600]
    calls = [partial(mlx_cuda.attention, q, k[:, :, :n], v[:, :, :n], **given) for n in steps]
    expected = [by_python(call) for call in calls]
    for call, exact in zip(calls, expected, strict=True):
        assert_same(listed(call()), exact)
    assert watched.answered >= len(steps) - 5


@pytest.mark.parametrize(
    ("q_len", "k_len", "given"),
    [
        (1, 300, {}),
        (64, 64, {"mask": "causal", "deterministic": True}),
        (64, 64, {"softcap": 2.0}),
        (2, 40, {"window_size": 9}),
    ],
)
def test_gradients_vmap_and_compile(rng: np.random.Generator, watched: Watched, q_len: int, k_len: int, given: dict[str, Any]) -> None:
    inputs = arrays(rng, q_len, k_len, batch=2)
    call = partial(mlx_cuda.attention, **given)

    def loss(*primals: mx.array) -> mx.array:
        return (call(*primals).astype(mx.float32) ** 2).sum()

    def gradients() -> tuple[mx.array, ...]:
        return tuple(mx.grad(loss, argnums=[0, 1, 2])(*inputs))

    assert_answered(watched, partial(call, *inputs))
    assert_right(gradients)
    assert_right(lambda: mx.vmap(call)(*(mx.stack([each, each * 0.5]) for each in inputs)))
    assert_same([mx.compile(call)(*inputs)], by_python(partial(call, *inputs)))


def test_the_patched_function_is_answered(rng: np.random.Generator, watched: Watched) -> None:
    mask = mx.array(rng.random((1, 1, 1, 300)) < 0.5)
    sinks = normal(rng, (HEADS,), mx.bfloat16)
    cases: list[tuple[int, dict[str, Any]]] = [
        (300, {}),
        (300, {"mask": mask}),
        (300, {"sinks": sinks}),
        (40, {}),
        (40, {"mask": "causal"}),
    ]
    with mlx_cuda.patch():
        for k_len, given in cases:
            call = partial(mx.fast.scaled_dot_product_attention, *arrays(rng, 1, k_len), scale=0.1)
            assert_answered(watched, partial(call, **given))
        with pytest.raises(ValueError, match="mask"):
            call(mask="full")


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
        assert_answered(watched, partial(mlx_cuda.paged_attention, q, k, v, table, lengths, **given))
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
        assert_answered(watched, partial(call, **given))
    fewer = mx.array([0, 20, 25, 25])
    for arrays in ((q, k, v, fewer, cu_k), (q[:45], k, v, cu_q, cu_k), (q, k, v, cu_q[:3], cu_k[:3]), (q, k, v[..., :32], cu_q, cu_k)):
        assert_right(partial(call, *arrays))
    gradient = mx.grad(lambda *arrays: (call(*arrays, cu_q, cu_k).astype(mx.float32) ** 2).sum(), argnums=[0, 1, 2])
    assert_right(lambda: tuple(gradient(q, k, v)))
    with pytest.raises(ValueError, match="max_seqlen_q"):
        call(max_seqlen_q=True)
