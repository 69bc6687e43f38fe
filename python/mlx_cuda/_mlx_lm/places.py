"""Replacements of mlx-lm's functions: attention over a quantized KV cache, linear attention, and trimming of drafts.

Known copies in other packages, such as mlx-vlm and mlx-audio, are replaced too (`copies.py`).
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any, TypeAlias

import mlx.core as mx

from .._attention import quantized
from .._common.errors import Refused
from .._loader.graph_cache import cached
from .._loader.replacing import Prepared, in_place_of, in_shapeless_trace
from .._recurrence.gated_delta import gated_delta
from .._recurrence.ssd import ssd
from .._replay import capture
from . import drafts, stand_ins
from .copies import is_being_imported, known_as, package_of, variables_of


@cache  # of a function one that has a cache
def _gated_delta(theirs: Callable[..., Any], *, chunked: bool = False) -> Callable[..., Any]:
    """mlx-lm's loop over time, or mlx-vlm's chunked scan, whose state is float32."""

    @cached
    @in_place_of(theirs)
    def ops(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None, *more: Any, **named: Any) -> Any:
        if any(each is not None for each in (*more, *named.values())):  # states in between, or how long chunks are
            return None
        call = gated_delta.prepare(q, k, v, g, beta, state=state, mask=mask)
        if call.choice.engine == "mlx":
            return None

        def compute() -> Any:
            y, last = call.result()
            if chunked:
                return y.astype(v.dtype), last.astype(mx.float32)
            kept = last.dtype if state is None else mx.result_type(state.dtype, *(each.dtype for each in (k, v, g, beta)))
            return y.astype(q.dtype), last.astype(kept)

        return Prepared(compute)

    return ops


@cache
def _ssm(theirs: Callable[..., Any], *, masks: bool = True) -> Callable[..., Any]:
    """mlx-lm's scan of Mamba-2, 256 tokens at a time. ``masks``: whether masked tokens leave the state unchanged, as here."""

    @cached
    @in_place_of(theirs)
    def attn(
        x: Any,
        A_log: Any,  # noqa: N803
        B: Any,  # noqa: N803
        C: Any,  # noqa: N803
        D: Any,  # noqa: N803
        dt: Any,
        dt_bias: Any,
        state: Any = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: Any = None,
        lengths: Any = None,
        step: int = 256,  # noqa: ARG001  (theirs has it, for memory alone)
    ) -> Prepared | None:
        if not masks and (mask is not None or lengths is not None):
            return None
        lasting = theirs.__globals__["compute_dt"](dt, dt_bias, time_step_limit)
        decay, seen = -mx.exp(A_log).astype(lasting.dtype), mask
        if lengths is not None:
            within = mx.arange(x.shape[1]) < lengths[:, None]
            seen = within if mask is None else mx.logical_and(within, mask)
        call = ssd.prepare(x, lasting, decay, B, C, state=state, mask=seen)
        if call.choice.engine == "mlx":
            return None

        def compute() -> Any:
            y, last = call.result()
            return y.astype(x.dtype) + x * D.reshape(1, 1, x.shape[2], 1), last

        return Prepared(compute)

    return attn


def _quantized_attention(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's attention over a quantized KV cache: two matmuls, with the scores between them."""

    @wraps(theirs)
    def attention(queries: Any, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8) -> Any:
        step = capture.current()
        seen = None if step is None else step.seen(queries, q_keys[0], mask)
        if isinstance(scale, (int, float)) and not in_shapeless_trace():
            with contextlib.suppress(Refused):  # mlx-lm says itself what is wrong with the arguments
                (k, k_scales, k_biases), (v, v_scales, v_biases) = q_keys, q_values
                options = {"k_biases": k_biases, "v_biases": v_biases, "group_size": group_size, "bits": bits, "scale": scale}
                y: Any = quantized.attend(queries, k, k_scales, v, v_scales, **options, **({"mask": mask} if seen is None else seen))
                dtype = mx.result_type(queries.dtype, q_keys[1].dtype, q_values[1].dtype)
                return y if y.dtype == dtype else y.astype(dtype)
        return theirs(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits)

    return attention


Function: TypeAlias = "tuple[dict[str, Any], str, Any]"  # in the variables of a module, by its name there
PLACES: dict[tuple[str, str], Callable[..., Callable[..., Any]]] = {
    ("mlx_lm.models.base", "quantized_scaled_dot_product_attention"): _quantized_attention,
    ("mlx_lm.models.gated_delta", "gated_delta_ops"): _gated_delta,
    ("mlx_lm.models.ssm", "ssm_attn"): _ssm,
    ("mlx_lm.generate", "trim_prompt_cache"): drafts.taking_back,
}
COPIES: dict[str, Callable[..., Callable[..., Any]]] = {  # by what they are known as
    "quantized_scaled_dot_product_attention": _quantized_attention,
    "gated_delta_ops": _gated_delta,
    "gated_delta_chunked": partial(_gated_delta, chunked=True),
    "ssm_attn": _ssm,
    "ssm_attn of 0.31": partial(_ssm, masks=False),
    "cache_position_offset": stand_ins.position_of,
}
NAMES = {name.partition(" ")[0] for name in COPIES}  # by which modules have them
_looked_into: dict[str, int] = {}  # modules, and their identities
_places: dict[tuple[str, str], None] = {}  # names of modules and of what they have


def put() -> bool:
    """Replace what has been imported so far; return whether there was anything."""
    found = list(replacements())
    for variables, name, function in found:
        variables[name] = function
    return bool(found)


def replacements() -> Iterator[Function]:
    """Return what is to replace what has been imported so far."""
    made: dict[Any, Any] = {}
    for variables, name, theirs in _there():
        ours = PLACES.get((variables["__name__"], name)) or _in_place_of_a_copy(variables, theirs)
        if ours is not None and not hasattr(theirs, "unpatched"):
            if theirs not in made:
                made[theirs] = ours(theirs)
                vars(made[theirs])["unpatched"] = theirs
            yield variables, name, made[theirs]


def take_away() -> None:
    """Restore the functions."""
    for variables, name, function in originals():
        variables[name] = function


def originals() -> Iterator[Function]:
    """Return what is replaced."""
    for variables, name, function in _there():
        if hasattr(function, "unpatched"):
            yield variables, name, function.unpatched


def left_alone(package: str) -> list[str]:
    """Return functions of a package with the names of mlx-lm's, but unknown code."""
    found = ((variables, name, getattr(theirs, "unpatched", theirs)) for variables, name, theirs in _there())
    return [
        f"{theirs.__module__}.{name}"
        for variables, name, theirs in found
        if package_of(theirs) == package != "mlx_lm" and theirs.__module__ == variables["__name__"] and not known_as(theirs)
    ]


def _in_place_of_a_copy(variables: dict[str, Any], theirs: Any) -> Callable[..., Any] | None:
    """Replace a function in its own package only: others that imported it keep the original."""
    return COPIES.get(known_as(theirs)) if variables["__name__"].partition(".")[0] == package_of(theirs) else None


def _there() -> Iterator[Function]:
    """Return replaceable functions in the variables of their modules and of modules that import them."""
    for module_name, module in list(sys.modules.items()):
        if _looked_into.get(module_name) != id(module) and isinstance(module, types.ModuleType):
            if not is_being_imported(module):
                _looked_into[module_name] = id(module)
            _places.update(dict.fromkeys((module_name, name) for name in NAMES & variables_of(module).keys()))
    for module_name, name in dict.fromkeys([*PLACES, *_places]):
        variables = getattr(sys.modules.get(module_name), "__dict__", {})
        if callable(variables.get(name)) and "__name__" in variables:
            yield variables, name, variables[name]
