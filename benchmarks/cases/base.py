"""What the cases share: their interface, random inputs, and the check that comes before the clock."""

from __future__ import annotations

import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx_cuda

from tests.gpu.support import host, relative_error
from tests.package import references

from ..timing import MlxEngine, Settings, Side, Timing, TorchEngine

Unit = Literal["TFLOP/s", "TB/s", "steps/s"]
DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}

ROTATED_BYTES = 256 << 20  # several times the largest L2 cache, so that inputs come from memory
MOST_SETS = 64


class WrongResultError(Exception):
    """A result is too far from the reference to be worth timing."""


class UnavailableError(Exception):
    """The installed package does not have the operation, or the option, that a case measures."""


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs in place, ours as the first side.

    ``error`` gives the relative error against float64 of what an MLX side returns for the first of its inputs. ``measure`` stands in for
    the usual timing, and may leave counts in ``numbers``.
    """

    sides: Sequence[Side]
    error: Callable[[Any], float]
    tolerance: float
    measure: Callable[[Settings], Mapping[str, Timing | Exception]] | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    unchecked: Collection[str] = ()  # sides that compute something else on purpose
    same_inputs: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)  # the error of sides of torch that get the same numbers


@dataclass(frozen=True)
class Case(ABC):
    """One row of the results. ``work`` is per call, in floating point operations or bytes as the unit says; ``primitive``
    is what has to be in the graph, so that no fallback is measured by mistake (None: whatever the dispatch chooses, which the row names).
    """

    @property
    @abstractmethod
    def name(self) -> str: ...
    @property
    @abstractmethod
    def unit(self) -> Unit: ...
    @property
    @abstractmethod
    def work(self) -> float: ...
    @property
    def primitive(self) -> str | None:
        return None

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    @abstractmethod
    def prepare(self, torch: TorchEngine | None) -> Prepared: ...


@dataclass(frozen=True, kw_only=True)
class AttentionHeads(Case):
    """Of attention of many queries, if nothing else is said."""

    heads: int = 16
    kv_heads: int = 16
    dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class DecodingHeads(AttentionHeads):
    """Of attention of few queries to a cache, if nothing else is said."""

    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def last_error(self, result: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> float:
        """Of the last batch entry, and there of the heads that share the last kv head."""
        group = self.heads // self.kv_heads
        parts = (host(each[-1:, -count:]) for each, count in ((q, group), (k, 1), (v, 1)))
        return relative_error(first(result)[-1:, -group:], references.attention(*parts, scale=self.scale, **options))


def input_sets(shapes: Sequence[tuple[int, ...]], scales: Sequence[float], dtype: str) -> list[tuple[mx.array, ...]]:
    """Normally distributed inputs, in as many sets as it takes to keep them out of the caches."""
    kind = DTYPES[dtype]
    sets = [
        tuple(mx.random.normal(shape, dtype=kind, scale=scale) for shape, scale in zip(shapes, scales, strict=True))
        for _ in range(rotation(kind.size * _elements(shapes)))
    ]
    mx.eval(sets)
    return sets


def torch_input_sets(engine: TorchEngine, shapes: Sequence[tuple[int, ...]], scales: Sequence[float], dtype: str) -> list[tuple[Any, ...]]:
    """The same distribution in torch's own arrays."""
    kind = getattr(engine.torch, dtype)
    return [
        tuple(engine.torch.randn(shape, dtype=kind, device="cuda") * scale for shape, scale in zip(shapes, scales, strict=True))
        for _ in range(rotation(kind.itemsize * _elements(shapes)))
    ]


def rotation(size: float) -> int:
    """How many sets of so many bytes keep the inputs out of the caches."""
    return min(max(1, math.ceil(ROTATED_BYTES / size)), MOST_SETS)


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def operation(name: str, **options: Any) -> partial[Any]:
    """One of the package's operations with the options that are not None; where it lacks one, calling it says so."""
    given = {option: value for option, value in options.items() if value is not None}
    function = getattr(mlx_cuda, name, None)
    if function is None:
        return partial(_unavailable, name)
    if missing := sorted(given.keys() - inspect.signature(function).parameters.keys()):
        return partial(_unavailable, f"{name}({', '.join(missing)})")
    return partial(function, **given)


def _unavailable(what: str, *_: Any, **__: Any) -> Any:
    raise UnavailableError(f"the installed mlx_cuda has no {what}")


def explanation(call: partial[Any]) -> partial[Any]:
    """What ``mlx_cuda.explain`` says of one of the package's operations, with all of the options that the call has."""
    return partial(mlx_cuda.explain, call.func, *call.args, **call.keywords)


def both_sides(
    ours: Callable[..., Any], upstream: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], explain: Callable[..., Any] | None = None
) -> list[Side]:
    """Ours and MLX's own."""
    return [Side("ours", MlxEngine(), ours, inputs, explain=explain), Side("upstream", MlxEngine(), upstream, inputs)]


def torch_sdpa(
    torch: TorchEngine,
    backends: Mapping[str, str],
    inputs: Sequence[tuple[Any, ...]],
    wrap: Callable[..., Any] | None = None,
    **options: Any,
) -> list[Side]:
    """torch's scaled_dot_product_attention, restricted to one backend for each of the names. ``wrap`` makes a call of another one."""
    module = torch.torch.nn.attention
    call = partial(torch.torch.nn.functional.scaled_dot_product_attention, **options)
    return [
        Side(name, torch, wrap(call) if wrap else call, inputs, partial(module.sdpa_kernel, getattr(module.SDPBackend, backend)))
        for name, backend in backends.items()
    ]


def torch_flex(
    torch: TorchEngine, length: int, *, window: int | None, softcap: float | None, scale: float, grouped: bool
) -> Callable[..., Any]:
    """FlexAttention, causal, compiled at the first call: that needs triton, and nothing else is to fail without it."""
    compiled: list[Callable[..., Any]] = []

    def compile_it() -> Callable[..., Any]:
        module = importlib.import_module("torch.nn.attention.flex_attention")

        def score(value: Any, *_: Any) -> Any:
            return softcap * torch.torch.tanh(value / softcap)

        def mask(_b: Any, _h: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (query - key < window) if window else query >= key

        torch.torch._dynamo.reset()  # it stops compiling anew after a number of different functions
        blocks = module.create_block_mask(mask, None, None, length, length, device="cuda")
        function = torch.torch.compile(module.flex_attention, dynamic=False)
        return partial(function, score_mod=score if softcap else None, block_mask=blocks, scale=scale, enable_gqa=grouped)

    def call(q: Any, k: Any, v: Any) -> Any:
        if not compiled:
            compiled.append(compile_it())
        return compiled[0](q, k, v)

    return call


def first(result: Any) -> Any:
    """The attention itself where a call returns more."""
    return result[0] if isinstance(result, (tuple, list)) else result


def arrays_of(result: Any) -> list[mx.array]:
    """Every array in what a call returns."""
    if isinstance(result, (tuple, list)):
        return [array for each in result for array in arrays_of(each)]
    return [result]


def tolerance(dtype: str) -> float:
    """Two roundings of the result's dtype; TF32's for a float32 matmul."""
    return {"bfloat16": 8e-3, "float32": 2e-3}[dtype]
