"""Functions with custom gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(forward: Callable[P, R], backward: Callable[..., Any], tangents: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Return the first function with gradients from the second, which gets its arguments, the cotangents and its results.

    ``tangents`` returns the tangents of the results for the arguments and their tangents (None: none). Without it MLX derives them.
    """
    function: Callable[..., Any] = forward
    call = mx.custom_function(function if tangents is None else lambda *arrays: function(*map(mx.stop_gradient, arrays)))
    call.vjp(backward)
    if tangents is not None:
        call.jvp(tangents)
    return cast("Callable[P, R]", call)
