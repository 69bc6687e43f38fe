"""The gated delta rule."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, require_arrays, resolve, shape_text
from .._common.errors import WrongValue
from .._operation import operation
from .fused import RESULTS, LinearAttentionCall
from .rules import Call, choose, floating, prepared


@operation(RESULTS)
def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, *, state: mx.array | None = None, mask: mx.array | None = None,
    cu_seqlens: mx.array | None = None, stream: StreamOrDevice = None,
) -> LinearAttentionCall:  # fmt: skip
    """Compute the gated delta rule, the linear attention of Qwen3-Next, Qwen3.5 and Kimi Linear::

        S = g[t] * S
        S = S + beta[t] * (v[t] - S @ k[t]) * k[t].T
        y[t] = S @ q[t]

    Source: "Gated Delta Networks" (arXiv:2412.06464), "Kimi Linear" (arXiv:2510.26692).

    Args:
        q: Queries, ``[B, T, Hk, Dk]``, already scaled.
        k: Keys, ``[B, T, Hk, Dk]``, normalized to length 1 for stability.
        v: Values, ``[B, T, Hv, Dv]``; Hv is a multiple of Hk, and adjacent value heads share a query and a key head.
        g: Decay between 0 and 1: ``[B, T, Hv]`` per head, or ``[B, T, Hv, Dk]`` per channel (Kimi Linear).
        beta: Write strength between 0 and 1, or up to 2: ``[B, T, Hv]``.
        state: Initial S, ``[B, Hv, Dv, Dk]``; default zeros. With ``cu_seqlens`` its first dimension is the number of sequences.
        mask: bool ``[B, T]``. A masked token leaves S unchanged, and its y is 0.
        cu_seqlens: int32 ``[sequences + 1]``, increasing from 0 to at most T: B is 1, and each range ``cu_seqlens[s]`` to
            ``cu_seqlens[s + 1]`` is a sequence of its own (varlen).
        stream: Stream or device to run on.

    Returns:
        y, ``[B, T, Hv, Dv]`` in the dtype that q, k and v promote to (float32 if that is not a floating point type), and the final S in
        float32. Tokens of no sequence return 0.

    Raises:
        ValueError: Shapes do not fit, or a dtype is complex.
        TypeError: An argument is not an MLX array.

    The conventions are those of :func:`mlx.core.fast.gated_delta_update`. On a CUDA GPU, S stays in registers in float32 and is read and
    written once. Few tokens run recurrently, 16-bit prompts in a chunked scan of 64 tokens on tensor cores, which stores the operands of
    matmuls with S in 16 bits and clamps decays to 1e-13. The chunked scan has gradient kernels; other gradients run on MLX's operations,
    64 tokens at a time, or with one decay per channel token by token.
    """
    on = resolve(stream)
    with mx.stream(on):
        require_arrays(
            "gated_delta", ("state", "mask", "cu_seqlens"), q=q, k=k, v=v, g=g, beta=beta, state=state, mask=mask, cu_seqlens=cu_seqlens
        )
        _check(q.shape, k.shape, v.shape, g.shape, beta.shape)
        dtype = floating("gated_delta", q.dtype, k.dtype, v.dtype)
        if cu_seqlens is not None:
            if q.shape[0] != 1 or cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
                raise WrongValue(
                    "[gated_delta] cu_seqlens must have the shape (sequences + 1,), and q a batch of 1, "
                    f"got {shape_text(cu_seqlens.shape, q.shape)}."
                )
            cu_seqlens = check_array("gated_delta", "cu_seqlens", cu_seqlens, cu_seqlens.shape, mx.int32)
        call = prepared("gated_delta", Call(q, k, v, g, beta, state, mask, cu_seqlens), dtype)
        return LinearAttentionCall(call, choose(call, on), on, delta=True)


@lru_cache(CACHED_SHAPES)
def _check(q: Shape, k: Shape, v: Shape, g: Shape, beta: Shape) -> None:
    if len(q) != 4 or len(v) != 4 or q != k or q[:2] != v[:2]:
        raise WrongValue(f"[gated_delta] q and k must be [B, T, Hk, Dk] and v [B, T, Hv, Dv], got {shape_text(q, k, v)}.")
    if q[2] == 0 or v[2] % q[2]:
        raise WrongValue(f"[gated_delta] The heads of v must be a multiple of those of q and k, got {shape_text(q, v)}.")
    if g not in (v[:3], (*v[:3], q[3])) or beta != v[:3]:
        raise WrongValue(f"[gated_delta] g must be [B, T, Hv] or [B, T, Hv, Dk] and beta [B, T, Hv], got {shape_text(g, beta)}.")
