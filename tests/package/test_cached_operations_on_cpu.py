"""Operations whose calls the real cache of calls keeps, compiled for MLX's CPU backend, where every call is one of MLX's operations."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._operations import OPERATIONS

from .compiled import compiles
from .references import random
from .test_call_cache_on_cpu import assert_same, listed
from .test_operations import UNCACHED
from .test_wrong_options import CALLS

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]

LONG = {"attention_varlen", "paged_attention", "quantized_attention", "gated_delta", "ssd"}  # of more steps than are kept, without kernels


def test_attention_is_given_cached_graphs(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All options on the CPU, where every call is composed: the same bits as without the cache, and Python does not look at them again."""
    q, k, v = random((2, 4, 3, 8)), random((2, 2, 6, 8), seed=1), random((2, 2, 6, 8), seed=2)
    options: list[dict[str, Any]] = [
        {}, {"mask": "causal"}, {"window_size": 2}, {"window_size": (2, None)}, {"window_size": (1, 1)}, {"scale": -0.5}, {"softcap": 2.0},
        {"sinks": mx.ones(4)}, {"lengths": mx.array([4, 2])}, {"left_padding": mx.array([1, 0])}, {"return_lse": True},
        {"mask": mx.ones((3, 6), mx.bool_)}, {"mask": mx.zeros((3, 6))}, {"stream": mx.cpu}, {"deterministic": True},
    ]  # fmt: skip
    attention: Any = mlx_cuda.attention
    expected = [[attention(each, k, v, **one) for one in options] for each in (q, -q)]
    monkeypatch.setattr(_native, "loaded", native)
    for one in options:
        attention(q, k, v, **one)
    monkeypatch.setattr("mlx_cuda._attention.attention.operands", None)
    for each, all_results in zip((q, -q), expected, strict=True):
        for one, results in zip(options, all_results, strict=True):
            assert_same(attention(each, k, v, **one), results)


@pytest.mark.parametrize("under_patch", [False, True])
def test_a_scale_in_an_array_is_that_of_its_call(native: Any, monkeypatch: pytest.MonkeyPatch, under_patch: bool) -> None:
    """MLX's function takes it as a number, and ours does not."""
    q, upstream = random((1, 2, 3, 8)), mx.fast.scaled_dot_product_attention
    options: list[dict[str, Any]] = [{"scale": mx.array(each)} for each in (0.5, 2.0)]
    monkeypatch.setattr(_native, "loaded", native)
    if under_patch:
        expected = [upstream(q, q, q, **each) for each in options]
        with mlx_cuda.patch():
            assert_same([mx.fast.scaled_dot_product_attention(q, q, q, **each) for each in options], expected)
        return
    for each in options:
        with pytest.raises(TypeError, match=r"^\[attention\] scale must be a number, got array\.$"):
            mlx_cuda.attention(q, q, q, **each)


def primitives(results: Any) -> list[str]:
    """Those of the graph, without those that only define gradients."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *listed(results))
    names = re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue())
    return sorted(name for name in names if name not in {"CustomTransforms", "StopGradient"})


@pytest.mark.parametrize("name", sorted({*CALLS} - UNCACHED - LONG))
def test_what_mlx_computes_is_cached_too(native: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A call that comes again adds the same primitives, and no rule of Python is asked."""
    (given, options), operation = CALLS[name], OPERATIONS[name]
    expected = primitives(operation(*given, **options))
    monkeypatch.setattr(_native, "loaded", native)
    operation(*given, **options)
    frames: list[str] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = operation(*given, **options)
    finally:
        sys.setprofile(None)
    assert primitives(found) == expected
    assert frames == ["by_way"]
