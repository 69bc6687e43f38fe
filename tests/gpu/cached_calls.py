"""How often Python looks at calls of attention, and whether they have the bits that they have by its rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention import attention as _attention
from mlx_cuda._attention import paged as _paged
from mlx_cuda._attention import varlen as _varlen
from mlx_cuda._loader import native as _native

from .support import normal

Results = list[mx.array]
Call = Callable[[], Any]

HEADS, KV_HEADS, DIM = 8, 2, 64
OURS: Any = mlx_cuda  # overloads do not let options through


class Watched:
    """How often Python looked at a call."""

    def __init__(self) -> None:
        self.looks = 0

    def watch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.looks += 1
        return function(*arguments, **options)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    _native.load()
    watched, modules = Watched(), ((_attention, "operands"), (_paged, "_placement"), (_varlen, "_packing"))
    for module, name in modules:
        monkeypatch.setattr(module, name, partial(watched.watch, getattr(module, name)))
    return watched


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


def assert_cached(watched: Watched, call: Call, times: int = 1) -> None:
    """Python does not look at the call when it comes again, and it has the bits that it has by Python's rules."""
    expected = by_python(call)
    assert_same(listed(call()), expected)
    before = watched.looks
    for _ in range(times):
        assert_same(listed(call()), expected)
    assert watched.looks == before


def assert_right(*calls: Call) -> None:
    """In turn, whoever looks at them."""
    expected = [by_python(call) for call in calls]
    for _ in range(2):
        for call, exact in zip(calls, expected, strict=True):
            assert_same(listed(call()), exact)


def arrays(rng: np.random.Generator, q_len: int, k_len: int, dtype: mx.Dtype = mx.bfloat16, batch: int = 3) -> Results:
    shapes = [(batch, HEADS, q_len, DIM), *2 * [(batch, KV_HEADS, k_len, DIM)]]
    return [normal(rng, shape, dtype) for shape in shapes]
