"""Operations: a documented signature, and a function that prepares a call and its engine without computing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import mlx.core as mx

from ._common.choice import Choice
from ._loader import native
from ._loader.graph_cache import cached, growing

COMPOSED = ("fallback", "mlx")  # engines that are MLX's operations
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", bound="Call[Any]", covariant=True)


class Call(Protocol[R_co]):
    """A checked call and its engine."""

    choice: Choice

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Return the smallest and largest growing axes for which an otherwise equal call has the same graph; None: only its own."""
        return None

    def result(self) -> R_co:
        """Return the result of the chosen engine."""

    def kernel(self) -> str:
        """Return the source and name of the mlx-cuda kernel that computes the call, if the native module knows it."""
        return ""


class DirectCall(Call[R]):
    """A call of one function of the native module, or of MLX's operations if these are chosen or there is no module."""

    __slots__ = ("arguments", "choice", "composed", "native", "stream")

    def __init__(self, choice: Choice, name: str, composed: Callable[..., R], arguments: tuple[Any, ...], stream: mx.Stream) -> None:
        self.choice, self.composed, self.arguments, self.stream = choice, composed, arguments, stream
        self.native: Callable[..., R] | None = None
        if choice.engine not in COMPOSED:
            engine = native.engine(stream)
            if isinstance(engine, str):
                self.choice = Choice("fallback", engine)
            else:
                self.native = getattr(engine.module, name)

    def result(self) -> R:
        if self.native is not None:
            return self.native(*self.arguments, self.stream)
        with mx.stream(self.stream):
            return self.composed(*self.arguments)


class Operation(Protocol[P, C_co]):
    """A function that returns the results of calls, and the function that prepares them."""

    @property
    def prepare(self) -> Callable[P, C_co]: ...

    def __call__(self: Operation[P, Call[R]], *arguments: P.args, **options: P.kwargs) -> R: ...


def operation(returns: str = "mx.array", *, is_cached: bool = True, **axes: int) -> Callable[[Callable[P, C_co]], Operation[P, C_co]]:
    """Decorate a function that prepares calls: it becomes the operation with its name, parameters and documentation.

    ``returns`` is the return type in the signature, ``is_cached`` whether calls use the dispatch cache, and ``axes`` are those of
    :func:`growing`.
    """

    def made(prepare: Callable[P, C_co]) -> Operation[P, C_co]:
        @wraps(prepare)
        def compute(*arguments: P.args, **options: P.kwargs) -> Any:
            return prepare(*arguments, **options).result()

        compute.__annotations__ = {**prepare.__annotations__, "return": returns}
        vars(compute).update(prepare=prepare, __signature__=inspect.signature(prepare).replace(return_annotation=returns))
        return cast("Operation[P, C_co]", cached(growing(**axes)(compute)) if is_cached else compute)

    return made
