"""Linear attention against float64: what the tests of ``gated_delta`` and of ``ssd`` share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np

from . import reference
from .reference import Array
from .support import TOLERANCE, assert_close, host, primitives

ROUNDINGS = 2e-5  # of the state token by token, some thousands in float32
IN_TYPE_OF: Any = {mlx_cuda.gated_delta: 2, mlx_cuda.ssd: 0}  # which argument's the results have


def exact(operation: Any, arrays: list[mx.array], state: mx.array | None = None, mask: mx.array | None = None) -> tuple[Array, Array]:
    """Of q, k, v, g and beta, or of ssd's x, dt, a, b and c."""
    values = [host(each) for each in arrays]
    if operation is mlx_cuda.ssd:
        x, dt, a, b, c = values
        values = [c, b, x, np.exp(dt * a), dt]
    given, seen = None if state is None else host(state), None if mask is None else np.array(mask)
    return reference.linear_attention(values, given, seen, delta=operation is mlx_cuda.gated_delta)


def packed(arrays: list[mx.array], cuts: list[int], state: mx.array | None = None, mask: mx.array | None = None) -> tuple[Array, Array]:
    """Each sequence by itself, of gated_delta."""
    y, states = np.zeros(arrays[2].shape), []
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        given, seen = None if state is None else state[i : i + 1], None if mask is None else mask[:, begin:end]
        y[:, begin:end], last = exact(mlx_cuda.gated_delta, [each[:, begin:end] for each in arrays], given, seen)
        states.append(last)
    return y, np.concatenate(states)


def state_tolerance(operation: Any, arrays: list[mx.array], **options: Any) -> float:
    """Chunks round what is multiplied with the state, and nothing else does."""
    return (
        TOLERANCE[arrays[IN_TYPE_OF[operation]].dtype] if mlx_cuda.explain(operation, *arrays, **options).engine == "chunked" else ROUNDINGS
    )


def check(operation: Any, arrays: list[mx.array], *, fused: bool = True, slack: float = 1, about: object = None, **options: Any) -> None:
    y, state = operation(*arrays, **options)
    if fused:
        assert "LinearAttention" in primitives(y)
    expected = exact(operation, arrays, **options)
    assert y.dtype == arrays[IN_TYPE_OF[operation]].dtype
    assert state.dtype == mx.float32
    assert_close(y, expected[0], tolerance=slack * (ROUNDINGS if y.dtype == mx.float32 else TOLERANCE[y.dtype]), about=about)
    assert_close(state, expected[1], tolerance=slack * state_tolerance(operation, arrays, **options), about=about)


def check_all(operation: Any, arrays: list[mx.array], state: mx.array, mask: mx.array, *, fused: bool = True) -> None:
    """With a state and a mask, and without either."""
    for given, seen in itertools.product((None, state), (None, mask)):
        check(operation, arrays, fused=fused, state=given, mask=seen)


def check_gradients(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    arrays: list[mx.array],
    cotangents: list[mx.array],
    tolerance: float,
    about: object = None,
) -> None:
    """Of all arrays, against those of a composition, in float32 on the CPU."""
    found = mx.vjp(ours, arrays, cotangents)[1]
    with mx.stream(mx.cpu):
        expected = mx.vjp(theirs, *([each.astype(mx.float32) for each in own] for own in (arrays, cotangents)))[1]
    for at, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, host(other), tolerance=tolerance, about=(at, about))
