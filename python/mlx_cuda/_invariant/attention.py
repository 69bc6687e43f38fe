"""Batch-invariant attention, in the Hopper FlashAttention kernel: key tiles are counted from the first key of the sequence."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .._attention.attention import run
from .._attention.composed import upstream_attention
from .._attention.options import Options, operands
from .._common.arrays import StreamOrDevice, require_arrays, resolve, shape_text
from .._common.choice import HALF, Choice, dtype_name
from .._loader import native
from .masks import seen_by
from .state import NotInvariant, instead_of

MOST_HEADS = 65535  # blocks in a dimension of a grid
WIDEST, MULTIPLE = 256, 8  # of the head dimensions
FLASH = Choice("flash", "batch_invariant")


@instead_of(upstream_attention, "mx.fast.scaled_dot_product_attention")
def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | mx.array | None = None, sinks: mx.array | None = None,
    force_fused: bool = False, stream: StreamOrDevice = None,  # noqa: ARG001  (it is)
) -> mx.array:  # fmt: skip
    on = resolve(stream)
    with mx.stream(on):
        require_arrays("attention", q=q, k=k, v=v)
        arguments = operands(q, k, v, scale=scale, sinks=sinks, **_options(mask, q, k))
        if why := _why_not(arguments[0], arguments[2]):
            raise NotInvariant(f"mx.fast.scaled_dot_product_attention {why}")
        return flash(*arguments, on)


def flash(q: mx.array, k: mx.array, v: mx.array, options: Options, stream: mx.Stream) -> mx.array:
    if isinstance(found := native.engine(stream), str):
        raise NotInvariant(f"mx.fast.scaled_dot_product_attention has its kernel on the GPU alone, and {found}: leave its stream out.")
    return run(q, k, v, options, FLASH, force_fused=True, stream=stream)[0]


def _options(mask: str | mx.array | None, q: mx.array, k: mx.array) -> dict[str, Any]:
    """Return a mask as a causal one with a window and padding: an array would mask keys, but not say where their tiles begin."""
    if mask is None or isinstance(mask, str):
        return {"mask": mask}
    seen = seen_by(mask)
    if seen is None or (seen.queries, seen.offset + seen.queries) != (q.shape[2], k.shape[2]):
        raise NotInvariant(
            f"mx.fast.scaled_dot_product_attention takes no mask of one's own, got {shape_text(mask.shape)} of {dtype_name(mask.dtype)}: "
            "use None, 'causal', or an unchanged mask of mlx_lm.models.base.create_causal_mask without right_padding."
        )
    return seen.options()


def _why_not(q: mx.array, v: mx.array) -> str:
    """Return why the kernel does not support these operands."""
    widths = (q.shape[3], v.shape[3])
    if dtype_name(q.dtype) not in HALF:
        return f"has one kernel for all lengths in float16 and bfloat16, not in {dtype_name(q.dtype)}: convert the model."
    if max(widths) > WIDEST or any(width % MULTIPLE for width in widths):
        return f"has it for head dimensions that are multiples of {MULTIPLE} up to {WIDEST}, got {widths[0]} and {widths[1]}."
    if q.shape[1] > MOST_HEADS:
        return f"has it for up to {MOST_HEADS} heads, got {q.shape[1]}."
    return ""
