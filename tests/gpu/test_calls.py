"""Random calls, right ones and wrong ones, of the functions that MLX has too: on the GPU what MLX computes on the CPU, and no call more.

Those that go to MLX's own CUDA kernels are left out, of which each is compiled first.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .calls import Call, draw
from .support import assert_close, host

pytestmark = pytest.mark.gpu

OURS: Any = mlx_cuda
TOLERANCE = {mx.float32: 4e-3, mx.float16: 2e-2, mx.bfloat16: 8e-2}  # of TF32; on the CPU MLX sums in 16 bits


def engine(call: Call) -> str:
    """Who computes it; MLX's function says what is wrong with a scale of all experts."""
    if call.options.get("global_scale") is not None:
        return "mlx"
    return str(OURS.explain(getattr(OURS, call.name), *call.arguments, **call.options).engine)


def check(call: Call) -> str:
    """Returns what MLX did on the CPU."""
    call.options.pop("stream", None)
    try:
        with mx.stream(mx.cpu):
            theirs = call.of(mx)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if "only supports float32" in str(error):  # of dense matrices
            return "less"
        try:
            chosen = engine(call)
        except (TypeError, ValueError):
            return "error"
        if chosen != "mlx":
            with pytest.raises((TypeError, ValueError)):
                call.of(OURS)
        return "error"
    if engine(call) != "mlx":
        result = call.of(OURS)
        assert (result.shape, result.dtype) == (theirs.shape, theirs.dtype)
        assert_close(result, host(theirs), size=np.full(theirs.shape, call.size()), tolerance=TOLERANCE[theirs.dtype])
    return "result"


@given(seed=st.integers(0, 2**31))
@example(seed=0)
@settings(max_examples=600)
def test_any_call(seed: int) -> None:
    check(draw(seed))
