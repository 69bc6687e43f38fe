"""Functions whose gradients are given by another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(forward: Callable[P, R], backward: Callable[..., Any], tangents: Callable[..., Any] | None = None) -> Callable[P, R]:
    """The first function, with the gradients that the second gives for its arguments, the cotangents and its results.

    ``tangents`` gives those of its results for its arguments and their tangents, None where there are none. Without it MLX derives them.
    """
    function: Callable[..., Any] = forward
    call = mx.custom_function(function if tangents is None else lambda *arrays: function(*map(mx.stop_gradient, arrays)))
    call.vjp(backward)
    if tangents is not None:
        call.jvp(tangents)
    return cast("Callable[P, R]", call)
