"""The engines of prefill while MLX is patched, with the reasons."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import mlx.core as mx

from .._attention import attention, quantized
from .._common.choice import OLDEST_GPU, Choice, sm
from .._decode_step import StepCall
from .._loader import native
from .._matmul.gather import gather_mm, gather_qmm
from .._matmul.quantized import quantized_matmul
from .._mlx_lm.models import decoding_of
from .._operation import Call
from .._recurrence import short_conv
from .._recurrence.gated_delta import gated_delta
from .._recurrence.ssd import ssd
from .forms import Calls, Steps

MATMULS: tuple[Any, ...] = (quantized_matmul, gather_mm, gather_qmm)


class Watched(NamedTuple):
    """A function that :func:`mlx_cuda.patch` replaces, and how its engine is chosen."""

    owner: Any
    name: str
    chosen: Callable[..., Choice]


def _conv1d(x: Any, weight: Any, *arguments: Any, **options: Any) -> Choice:
    if short_conv.depthwise(x, weight, *arguments, **options) is not None:
        return Choice("direct", "each channel with its own taps, in one pass")
    return Choice("mlx", "not the convolution of a prompt that our kernel computes")


def _gated_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None, **options: Any) -> Choice:
    return gated_delta.prepare(q, k, v, g, beta, state=options.pop("initial_state", state), mask=mask, **options).choice


def _ssm(x: Any, a: Any, b: Any, c: Any, _: Any, dt: Any, dt_bias: Any, state: Any = None, *__: Any, **options: Any) -> Choice:
    lasting = dt + dt_bias  # of the dtype and the shape that mlx-lm gives it
    return ssd.prepare(x, lasting, a.astype(lasting.dtype), b, c, state=state, mask=options.get("mask")).choice


def _quantized(q: Any, k: Any, v: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8) -> Choice:
    return quantized.prepare(q, k, v, scale=scale, mask=mask, group_size=group_size, bits=bits).choice


def _prepared(owner: Any, name: str, prepare: Callable[..., Call[Any]]) -> Watched:
    return Watched(owner, name, lambda *arguments, **options: prepare(*arguments, **options).choice)


def watched() -> list[Watched]:
    """Return those of MLX, and of imported modules of mlx-lm."""
    of_mlx = [
        _prepared(mx.fast, "scaled_dot_product_attention", attention.prepare),
        Watched(mx.fast, "gated_delta_update", _gated_delta),
        Watched(mx, "conv1d", _conv1d),
        *(_prepared(mx, each.__name__, each.prepare) for each in MATMULS),
    ]
    of_mlx_lm: tuple[tuple[str, str, Callable[..., Choice]], ...] = (
        ("mlx_lm.models.base", "quantized_scaled_dot_product_attention", _quantized),
        ("mlx_lm.models.gated_delta", "gated_delta_ops", _gated_delta),
        ("mlx_lm.models.ssm", "ssm_attn", _ssm),
    )
    return of_mlx + [Watched(sys.modules[module], name, chosen) for module, name, chosen in of_mlx_lm if module in sys.modules]


def _chosen(of: Watched, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, str]:
    try:
        choice = of.chosen(*arguments, **options)
    except Exception as error:  # what ours does not take, MLX's function computes
        return "mlx", str(error)
    return choice.engine, choice.reason


@contextlib.contextmanager
def captured() -> Iterator[Callable[[], list[Calls]]]:
    """Count calls by engine and reason; the returned function lists them."""
    found: Counter[tuple[str, str, str]] = Counter()

    def counting(each: Watched, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            engine, reason = _chosen(each, arguments, options)
            found[each.name, engine, reason] += 1
            return function(*arguments, **options)

        return call

    with contextlib.ExitStack() as before:
        for each in watched():
            function = getattr(each.owner, each.name)
            before.callback(setattr, each.owner, each.name, function)
            setattr(each.owner, each.name, counting(each, function))
        yield lambda: [
            {"function": name, "engine": engine, "count": count, "ours": engine not in {"mlx", "fallback"}, "reason": reason}
            for (name, engine, reason), count in found.items()
        ]


def unpatched_call(model: Any) -> Callable[..., Any]:
    """Return a model's own code, which captures no step."""
    function = type(model).__call__
    own = getattr(function, "unpatched", function)
    return lambda *arguments, **options: own(model, *arguments, **options)


def unused() -> str:
    """Return why no kernel of mlx-cuda can run here, or an empty string."""
    if not native.on_cuda() or mx.default_device().type != mx.gpu:
        return "MLX offers no CUDA GPU here"
    engine = native.engine(mx.default_stream(mx.gpu))
    if isinstance(engine, str):
        return engine
    return "" if engine.capability >= OLDEST_GPU else f"the kernels run on {sm(OLDEST_GPU)} and newer, got {sm(engine.capability)}"


def is_broken() -> bool:
    """Return whether there is a GPU and the kernels could not be loaded."""
    return native.on_cuda() and isinstance(native.engine(mx.default_stream(mx.gpu)), str)


@contextlib.contextmanager
def counted_steps(model: Any, where: str, taken: int, steps: list[Steps]) -> Iterator[None]:
    """Count decode steps and graph launches, with what the graph consists of or why there is none; nothing without a model."""
    before = 0 if model is None else decoding_of(model).replayed
    yield
    if model is not None:
        state, step = decoding_of(model), StepCall(model)
        reason = unused() or state.reason or f"{step.choice.reason}: {step.kernel()}"
        steps.append({"where": where, "taken": taken, "replayed": state.replayed - before, "reason": reason})
