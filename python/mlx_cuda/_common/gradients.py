"""Functions whose gradients are given by another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(forward: Callable[P, R], backward: Callable[..., Any]) -> Callable[P, R]:
    """The first function, with the gradients that the second gives for its arguments, the cotangents and its results."""
    call = mx.custom_function(forward)
    call.vjp(backward)
    return cast("Callable[P, R]", call)
