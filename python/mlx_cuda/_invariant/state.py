"""Whether batch invariance is on, why it is not available, and the replacements of MLX's functions meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import mlx.core as mx

from .._common.choice import sm
from .._loader import native
from .._loader.replacing import in_shapeless_trace

R = TypeVar("R")

GPU = (9, 0)  # whose attention has a kernel in which rows know nothing of each other
ADVICE = "patch(batch_invariant=False) computes it as ever."


class NotInvariant(ValueError):
    """Raised if a result would depend on what is computed beside it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"[batch_invariant] {what} {ADVICE}")


class Setting:
    """The setting of ``patch``: whether it is on, and what replaces functions of other packages."""

    on = False
    put: Callable[[], None]
    modules = 0  # how many there were the last time

    def look(self) -> None:
        """Replace what has been imported since: a layer's first matmul comes before it writes to its cache."""
        if self.on and self.modules != len(sys.modules):
            self.modules = len(sys.modules)
            self.put()


setting = Setting()
_inside = threading.local()


def refusal() -> str:
    """Return why it is not available on this machine, or an empty string."""
    if not mx.cuda.is_available():
        return "MLX offers no CUDA GPU here"
    found = native.engine(mx.default_stream(mx.gpu))
    if isinstance(found, str):
        return found
    return "" if found.capability == GPU else f"its kernel of attention runs on {sm(GPU)} alone, and this GPU is {sm(found.capability)}"


def instead_of(upstream: Callable[..., R], name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a replacement of MLX's function; MLX reports what is wrong with arguments that it does not accept."""

    def decorate(ours: Callable[..., R]) -> Callable[..., R]:
        @wraps(upstream)
        def function(*arguments: Any, **options: Any) -> R:
            setting.look()
            try:
                if getattr(_inside, "vmap", False):
                    raise NotInvariant(f"{name} under mx.vmap is a matmul whose shape depends on the number of mapped elements.")
                if in_shapeless_trace():
                    raise NotInvariant(f"{name} cannot be compiled with shapeless=True: its calls are made for the sizes at hand.")
                return ours(*arguments, **options)
            except Exception:
                upstream(*arguments, **options)
                raise

        return function

    return decorate


def marking(upstream_vmap: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``mx.vmap``, in whose functions no matmul is batch-invariant."""

    @wraps(upstream_vmap)
    def vmap(fun: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        @wraps(fun)
        def marked(*inner: Any, **named: Any) -> Any:
            before, _inside.vmap = getattr(_inside, "vmap", False), True
            try:
                return fun(*inner, **named)
            finally:
                _inside.vmap = before

        return upstream_vmap(marked, *arguments, **options)

    return vmap


def refusing(upstream: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a replacement of a function that cannot be batch-invariant."""

    @wraps(upstream)
    def refused(*_: Any, **__: Any) -> Any:
        raise NotInvariant(what)

    return refused
