"""Random calls of the functions that MLX has too, right ones and wrong ones: where MLX computes ours do the same, elsewhere both refuse."""

from __future__ import annotations

from typing import Any, get_args

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_cuda._common.choice import MatmulEngine

from tests.gpu.calls import Call, draw

from .references import error, host

pytestmark = pytest.mark.usefixtures("on_the_cpu")

OURS: Any = mlx_cuda
MLX: Any = mx
NATIVE_ONLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-2, mx.bfloat16: 8e-2}  # on the CPU MLX sums in 16 bits


def check(call: Call) -> str:
    """Returns what MLX did."""
    try:
        theirs = call.of(mx)
    except (IndexError, RuntimeError, TypeError, ValueError) as wrong:
        if "only supports float32" in str(wrong):  # of dense matrices on the CPU
            return "less"
        with pytest.raises((TypeError, ValueError)) as ours:
            call.of(OURS)
        assert isinstance(ours.value, TypeError) or str(ours.value).startswith("[")
        return "error"
    explained = OURS.explain(getattr(OURS, call.name), *call.arguments, **call.options)
    assert explained.engine in get_args(MatmulEngine)
    result = call.of(OURS)
    assert (result.shape, result.dtype) == (theirs.shape, theirs.dtype)
    assert error(result, host(theirs), np.full(theirs.shape, call.size())) <= TOLERANCE[theirs.dtype]
    return "result"


@given(seed=st.integers(0, 2**31))
@NATIVE_ONLY
def test_any_call(seed: int) -> None:
    check(draw(seed))


@given(seed=st.integers(0, 2**31))
@NATIVE_ONLY
@pytest.mark.usefixtures("matmuls")
def test_any_call_natively(seed: int) -> None:
    check(draw(seed))


def test_the_calls_reach_everything() -> None:
    done = [check(draw(seed)) for seed in range(300)]
    assert min(done.count(outcome) for outcome in ("result", "error")) > 100


def test_an_option_of_another_type_is_not_taken_for_an_equal_one() -> None:
    """Nor does it spoil the calls that come after it."""
    x, parts = mx.ones((3, 96)), mx.quantize(mx.ones((8, 96)), group_size=32)
    for size in 32.0, "32", [32]:
        with pytest.raises(TypeError, match=r"^\[quantized_matmul\] group_size must be an integer or None, got "):
            OURS.quantized_matmul(x, *parts, group_size=size)
    for size in np.int64(32), 32:
        assert OURS.quantized_matmul(x, *parts, group_size=size).shape == (3, 8)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] group_size must be an integer or None, got 32\.0\.$"):
        OURS.quantized_matmul(x, *parts, group_size=32.0)
    with pytest.raises(TypeError, match=r"^\[gather_qmm\] transpose must be True or False, got 1\.$"):
        OURS.gather_qmm(x, *parts, None, mx.array([0]), 1, 32)
    with pytest.raises(TypeError, match=r"^\[gather_qmm\] sorted_indices must be True or False, got None\.$"):
        OURS.gather_qmm(x, *parts, group_size=32, sorted_indices=None)
    with pytest.raises(TypeError, match=r"^\[gather_mm\] sorted_indices must be True or False, got 0\.$"):
        OURS.gather_mm(x, x.T, sorted_indices=0)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] mode must be a string, got None\.$"):
        OURS.quantized_matmul(x, *parts, group_size=32, mode=None)
    with pytest.raises(TypeError, match=r"^\[grouped_matmul\] transpose must be True or False, got 1\.$"):
        OURS.grouped_matmul(x, mx.ones((1, 8, 96)), mx.array([0, 3]), transpose=1)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] x must be an mlx\.core\.array, got ndarray\.$"):
        OURS.quantized_matmul(np.ones((3, 96), np.float32), *parts, group_size=32)
