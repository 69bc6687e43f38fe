"""What operations have the native module cache, and what they say of their growing axes. The cache itself: test_call_cache_on_cpu.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import graph_cache
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.native import Engine
from mlx_cuda._loader.replacing import Prepared
from mlx_cuda._matmul import batches
from mlx_cuda._mlx_lm import places as mlx_lm
from mlx_cuda._patch import ROUTES

from .references import random

MOST = graph_cache.MOST
OURS: Any = mlx_cuda  # overloads do not let options through


class Module:
    """A native module that caches nothing, and keeps what it is told."""

    def __init__(self) -> None:
        self.growing: dict[str, list[tuple[int, str, int]]] = {}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.said: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arrays: [arrays[0], arrays[0][..., 0]]  # any engine

    def in_shapeless_trace(self) -> bool:
        return False

    def cached(self, operation: Callable[..., Any], growing: list[tuple[int, str, int]], *others: Any) -> Callable[..., Any]:
        self.growing[operation.__name__] = growing

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((operation.__name__, arguments, options))
            prepared = others[2](*arguments, **options)
            if growing and prepared.sizes is not None:
                self.said.append(prepared.sizes)
            return prepared.result()

        return call

    def cudnn_refusal(self, *_: Any) -> str:
        return ""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    if mx.cuda.is_available():
        _native.load()  # or the first use would put the real one in its place
    module: Any = Module()
    monkeypatch.setattr(_native, "loaded", module)
    monkeypatch.setattr(_native, "engine", lambda _: Engine(module, (9, 0), (9, 28, 0)))
    return module  # type: ignore[no-any-return]


def attention(q_len: int = 1, k_len: int = 300, *, dim: int = 64, dtype: mx.Dtype = mx.float16, **options: Any) -> Any:
    q, k = random((1, 4, q_len, dim), dtype), random((1, 2, k_len, dim), dtype)
    return OURS.attention(q, k, k, **options)


def patched(*shape: int, **options: Any) -> Any:
    q_len, k_len = shape or (1, 300)
    q, k = random((1, 4, q_len, 64), mx.float16), random((1, 2, k_len, 64), mx.float16)
    with mlx_cuda.patch():
        return mx.fast.scaled_dot_product_attention(q, k, k, scale=0.5, **options)


def paged(pages: int = 3, *, dim: int = 64, **options: Any) -> Any:
    q, cache = random((1, 4, 1, dim), mx.float16), random((5, 2, 16, dim), mx.float16)
    return OURS.paged_attention(q, cache, cache, mx.zeros((1, pages), mx.int32), mx.array([17]), **options)


def varlen(*, dim: int = 64, **options: Any) -> Any:
    q, ends = random((30, 4, dim), mx.float16), mx.array([0, 10, 25])
    return OURS.attention_varlen(q, q, q, ends, ends, max_seqlen_q=15, max_seqlen_k=15, **options)


FORMS: dict[str, tuple[Callable[..., Any], list[tuple[int, str, int]]]] = {
    "attention": (attention, [(1, "k", 2), (2, "v", 2)]),
    "scaled_dot_product_attention": (patched, [(1, "k", 2), (2, "v", 2)]),
    "paged_attention": (paged, [(3, "block_table", 1)]),
    "attention_varlen": (varlen, [(1, "k", 0), (2, "v", 0)]),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_attention_are_cached_with_their_growing_axes(module: Module, name: str) -> None:
    call, growing = FORMS[name]
    call(sinks=mx.ones(4, mx.float16))
    assert [called for called, *_ in module.calls] == [name]
    assert module.growing[name] == growing
    with pytest.raises((ValueError, TypeError)):
        call(sinks=mx.ones(3, mx.float16))


MASK = mx.ones((300,), mx.bool_)
SAID: list[tuple[Callable[..., Any], tuple[int, ...], dict[str, Any], list[tuple[int, int]]]] = [
    (attention, (1, 300), {}, [(2, MOST)]),
    (attention, (3, 300), {"mask": "causal", "softcap": 2.0, "return_lse": True, "lengths": mx.array([7])}, [(4, MOST)]),
    (attention, (3, 3), {}, [(3, 3)]),
    (attention, (3, 2), {}, [(1, 2)]),
    (attention, (64, 300), {}, [(65, MOST)]),  # the flash kernel
    (attention, (300, 300), {}, [(300, 300)]),  # cuDNN
    (attention, (1, 300), {"deterministic": True}, [(300, 300)]),
    (attention, (1, 300), {"window_size": 300}, [(2, 300)]),
    (attention, (1, 300), {"window_size": 299}, [(300, MOST)]),
    (attention, (1, 300), {"window_size": (400, 3)}, [(2, 400)]),
    (attention, (1, 300), {"window_size": (None, 3)}, [(2, MOST)]),
    (attention, (1, 300), {"mask": MASK}, []),
    (attention, (1, 300), {"dtype": mx.float32}, [(2, MOST)]),  # MLX's own function
    (attention, (9, 2), {"dtype": mx.float32, "mask": "causal"}, []),  # for the last queries
    (attention, (1, 300), {"dim": 60, "softcap": 1.0}, []),  # composed
    (patched, (1, 300), {}, [(2, MOST)]),
    (patched, (1, 300), {"mask": MASK}, []),
    (paged, (3,), {}, [(1, MOST // 16)]),
    (paged, (3,), {"window_size": 48}, [(1, 3)]),
    (paged, (3,), {"window_size": 47}, [(3, MOST // 16)]),
    (paged, (3,), {"window_size": 70}, [(1, 4)]),
    (paged, (3,), {"dim": 60}, []),
    (varlen, (), {"window_size": 4}, [(1, MOST)]),
    (varlen, (), {"dim": 60}, []),
]


@pytest.mark.parametrize(("call", "sizes", "options", "said"), SAID)
def test_what_python_says_of_other_numbers_of_keys(
    module: Module, call: Callable[..., Any], sizes: tuple[int, ...], options: dict[str, Any], said: list[tuple[int, int]]
) -> None:
    call(*sizes, **options)
    assert module.said[: len(said) + 1] == said


@pytest.mark.parametrize("engine", ["fused", "upstream"])
@pytest.mark.parametrize("under_patch", [False, True])
def test_a_call_in_parts_has_a_graph_of_its_own(module: Module, monkeypatch: pytest.MonkeyPatch, under_patch: bool, engine: str) -> None:
    """One of more heads than a grid has blocks, by our kernels and by MLX's function."""
    parts: list[tuple[int, ...]] = []

    def computed(*arguments: Any, **_: Any) -> Any:
        q = next(each for each in arguments if isinstance(each, mx.array))
        parts.append(q.shape)
        return [q] if engine == "fused" else q

    monkeypatch.setattr("mlx_cuda._attention.attention.MOST_BLOCKS", 2)
    monkeypatch.setattr(f"mlx_cuda._attention.attention.{engine}", computed)
    q, k = (random((1, heads, 3, 64), mx.float16 if engine == "fused" else mx.float32) for heads in (4, 2))
    k = mx.concatenate([k] * 100, axis=2)
    with mlx_cuda.patch() if under_patch else nullcontext():
        found = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.5) if under_patch else mlx_cuda.attention(q, k, k, scale=0.5)
    assert mx.array_equal(found, q)
    assert parts == [(1, 2, 3, 64)] * 2
    assert module.said == []


def test_an_operation_goes_by_way_of_the_module_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def operation(*_: Any, **__: Any) -> Any:
        """What it does."""

    def prepare(*arguments: Any, **options: Any) -> Prepared:
        return Prepared(lambda: calls.append((arguments, options)))

    vars(operation).update(prepare=prepare)

    class Loaded:
        def cached(self, function: Callable[..., mx.array], growing: list[Any], *others: Any) -> Callable[..., mx.array]:
            assert function is operation
            assert growing == []
            assert others == (None, None, prepare)
            return lambda *arguments, **options: calls.append((self, arguments, options))  # type: ignore[return-value]

    monkeypatch.setattr(_native, "loaded", None)
    call: Any = graph_cache.cached(operation)
    assert (call.__name__, call.__doc__) == ("operation", "What it does.")
    assert graph_cache.natively(operation) is operation
    call(1, two=2)
    for module in (Loaded(), Loaded()):
        monkeypatch.setattr(_native, "loaded", module)
        call(3)
        call(four=4)
        assert calls[-2:] == [(module, (3,), {}), (module, (), {"four": 4})]
        assert graph_cache.natively(operation) is graph_cache.natively(operation)
    monkeypatch.setattr(_native, "loaded", None)
    call()
    assert calls[0] == ((1,), {"two": 2})
    assert calls[-1] == ((), {})


def test_patch_puts_the_modules_functions_in_place(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, object] = {}
    of_mlx = {route.name: batches.batched_quantized_matmul if route.name == "quantized_matmul" else route.upstream for route in ROUTES}

    def cached(operation: Any, _: Any, of_batches: Any, upstream: Any, prepare: Any) -> Any:
        assert prepare is not None
        assert of_batches is (batches.batched_quantized_matmul if operation.__name__ == "quantized_matmul" else None)
        assert upstream is of_mlx[operation.__name__]
        return lambda *_, **__: answers.setdefault(operation.__name__, object())

    monkeypatch.setattr(module, "cached", cached)
    with mlx_cuda.patch():
        for name in ("quantized_matmul", "gather_mm", "gather_qmm"):
            assert getattr(mx, name)(1) is answers[name]
        function: Any = mx.fast.scaled_dot_product_attention
        assert function(1) is answers["scaled_dot_product_attention"]


def test_linear_attention_in_the_places_of_others_is_cached(module: Module) -> None:
    """Each of these functions has one stand-in, whose cache outlives ``unpatch``; MLX's gives a list, and an unknown option is theirs."""
    q, v, g = random((1, 3, 2, 64), mx.float16), random((1, 3, 4, 64), mx.float16), mx.ones((1, 3, 4))

    def gated_delta_ops(*_: Any, **__: Any) -> str:
        return "theirs"

    def by_kernel(*arguments: Any) -> tuple[mx.array, mx.array]:
        return arguments[2] * 1, mx.ones((1, 4, 64, 64)) * 2

    module.linear_attention, module.traced = by_kernel, lambda _: False  # type: ignore[attr-defined]
    ours = mlx_lm._gated_delta(gated_delta_ops)
    assert mlx_lm._gated_delta(gated_delta_ops) is ours is not mlx_lm._gated_delta(gated_delta_ops, chunked=True)
    y, state = ours(q, q, v, g, g)
    assert (y.dtype, state.dtype) == (mx.float16, mx.float32)
    assert ours(q, q, v, g, g, lengths=3) == "theirs"
    with mlx_cuda.patch():
        found = mx.fast.gated_delta_update(q, q, v, g, g)
    assert isinstance(found, list)
    assert [name for name, *_ in module.calls] == ["gated_delta_ops", "gated_delta_ops", "gated_delta_update"]
