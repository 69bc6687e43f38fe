"""What is put in the places of mlx-lm's own: attention to quantised keys, linear attention, and what takes drafts back."""

from __future__ import annotations

import contextlib
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ._attention import quantized
from ._common.arrays import promoted, resolve
from ._common.errors import Refused
from ._decoding import drafts, recording
from ._loader.replacing import in_place_of, in_shapeless_trace
from ._recurrence.gated_delta import gated_delta, prepare
from ._recurrence.rules import choose
from ._recurrence.ssd import explain as explain_ssd
from ._recurrence.ssd import ssd

if TYPE_CHECKING:
    from collections.abc import Callable


def _gated_delta(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's loop over time."""

    @in_place_of(theirs)
    def ops(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None) -> Callable[[], Any] | None:
        if choose(prepare(q, k, v, g, beta, state=state, mask=mask), resolve(None)).engine == "upstream":
            return None

        def compute() -> Any:
            y, last = gated_delta(q, k, v, g, beta, state=state, mask=mask)
            kept = last.dtype if state is None else promoted(state.dtype, *(each.dtype for each in (k, v, g, beta)))
            return y.astype(q.dtype), last.astype(kept)

        return compute

    return ops


def _ssm(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's scan of Mamba-2, 256 tokens at a time."""

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
    ) -> Callable[[], Any] | None:
        lasting = theirs.__globals__["compute_dt"](dt, dt_bias, time_step_limit)
        decay, seen = -mx.exp(A_log).astype(lasting.dtype), mask
        if lengths is not None:
            within = mx.arange(x.shape[1]) < lengths[:, None]
            seen = within if mask is None else mx.logical_and(within, mask)
        if explain_ssd(x, lasting, decay, B, C, state=state, mask=seen).engine == "upstream":
            return None

        def compute() -> Any:
            y, last = ssd(x, lasting, decay, B, C, state=state, mask=seen)
            return y.astype(x.dtype) + x * D.reshape(1, 1, x.shape[2], 1), last

        return compute

    return attn


def _quantized_attention(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's attention to a quantised cache: two products, with the scores between them."""

    @wraps(theirs)
    def attention(queries: Any, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8) -> Any:
        step = recording.current()
        seen = None if step is None else step.seen(queries, q_keys[0], mask)
        if isinstance(scale, (int, float)) and not in_shapeless_trace():
            with contextlib.suppress(Refused):  # mlx-lm says itself what is wrong with the arguments
                options = {"mask": mask} if seen is None else seen
                y: Any = quantized.attend(queries, *q_keys, *q_values, group_size=group_size, bits=bits, scale=scale, **options)
                dtype = promoted(queries.dtype, q_keys[1].dtype, q_values[1].dtype)
                return y if y.dtype == dtype else y.astype(dtype)
        return theirs(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits)

    return attention


PLACES = {
    ("mlx_lm.models.base", "quantized_scaled_dot_product_attention"): _quantized_attention,
    ("mlx_lm.models.gated_delta", "gated_delta_ops"): _gated_delta,
    ("mlx_lm.models.ssm", "ssm_attn"): _ssm,
    ("mlx_lm.generate", "trim_prompt_cache"): drafts.taking_back,
}


def put() -> bool:
    """Replace what has been imported by now; whether that was there."""
    found = False
    for (module, name), ours in PLACES.items():
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None and not hasattr(theirs, "unpatched"):
            replaced = ours(theirs)
            vars(replaced)["unpatched"] = theirs
            setattr(sys.modules[module], name, replaced)
            found = True
    return found


def take_away() -> None:
    """Bring mlx-lm's own functions back."""
    for module, name in PLACES:
        theirs = getattr(getattr(sys.modules.get(module), name, None), "unpatched", None)
        if theirs is not None:
            setattr(sys.modules[module], name, theirs)
