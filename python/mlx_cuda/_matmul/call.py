"""Products whose calls can be prepared, which tells who computes them, without computing them."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, cast

from .._loader.graph_cache import cached

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import mlx.core as mx

    from .._common.arrays import Shape
    from .._common.choice import Choice

    Spec: TypeAlias = tuple[Shape, mx.Dtype]

P = ParamSpec("P")
C_co = TypeVar("C_co", bound="Call", covariant=True)


class Call(Protocol):
    """A call, checked, and who computes it."""

    choice: Choice

    def result(self) -> mx.array:
        """The result, by whoever is chosen."""

    def kernel(self) -> str:
        """The source and the kernel of ours that compute the call, where the native module can tell."""
        return ""


class Product(Protocol[P, C_co]):
    """An operation, and the function that prepares its calls."""

    @property
    def prepare(self) -> Callable[P, C_co]: ...

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> mx.array: ...


def product(prepare: Callable[P, C_co]) -> Product[P, C_co]:
    """The operation that gives the results of calls, of the name, parameters and documentation of the function that prepares them."""

    @wraps(prepare)
    def compute(*arguments: P.args, **options: P.kwargs) -> mx.array:
        return prepare(*arguments, **options).result()

    operation = cast("Product[P, C_co]", cached(compute))
    vars(operation).update(prepare=prepare, __signature__=inspect.signature(prepare).replace(return_annotation="mx.array"))
    return operation


def spec(array: mx.array | None) -> Spec | None:
    """What a plan needs to know of an array."""
    return None if array is None else (array.shape, array.dtype)
