"""Attention over a ragged batch (varlen): sequences packed one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, require_arrays, resolve, shape_text, value_text
from .._common.choice import Choice
from .._common.errors import WrongValue
from .._common.gradients import with_gradients
from .._loader import native
from .._loader.graph_cache import MOST
from .._operation import operation
from .attention import RESULTS, AnyAttentionCall, case_of, run
from .options import Keywords, Options, Window, checked, require_dimensions, require_floating, require_groups
from .rules import choose_varlen

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VarlenKeywords(Keywords, total=False):
    window_size: Window
    mask: str | None


class Packing(NamedTuple):
    """The offsets of the sequences, int32 ``[sequences + 1]`` each, and the most queries and keys of one."""

    cu_q: mx.array
    cu_k: mx.array
    max_q: int
    max_k: int

    @property
    def sequences(self) -> int:
        return self.cu_q.size - 1


@dataclass(slots=True)
class VarlenCall(AnyAttentionCall):
    """A call of :func:`attention_varlen`, in one dtype."""

    q: mx.array
    k: mx.array
    v: mx.array
    packing: Packing

    @property
    def empty(self) -> bool:
        return 0 in (*self.q.shape[:2], self.packing.sequences, self.packing.max_q)

    @property
    def sizes(self) -> tuple[int, int] | None:
        return (1, MOST) if self.choice.engine == "flash" and not self.empty else None

    def results(self) -> list[mx.array]:
        q, k, v, packing, options = self.q, self.k, self.v, self.packing, self.options
        if self.empty:
            zeros = mx.zeros((*q.shape[:2], v.shape[2]), q.dtype)
            return [zeros, mx.full((q.shape[1], q.shape[0]), -mx.inf, mx.float32)] if options.lse else [zeros]
        if self.choice.engine == "flash":
            return _fused(q, k, v, packing, options, self.stream)
        if self.force_fused:
            raise WrongValue(f"[attention_varlen] force_fused is set, but no fused kernel supports this call: {self.choice.reason}")
        return padded(q, k, v, packing, options, self.stream)


@overload
def attention_varlen(
    q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array, *, max_seqlen_q: int, max_seqlen_k: int,
    return_lse: Literal[False] = False, **options: Unpack[VarlenKeywords],
) -> mx.array: ...  # fmt: skip


@overload
def attention_varlen(
    q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array, *, max_seqlen_q: int, max_seqlen_k: int,
    return_lse: Literal[True], **options: Unpack[VarlenKeywords],
) -> tuple[mx.array, mx.array]: ...  # fmt: skip


@overload
def attention_varlen(
    q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array, *, max_seqlen_q: int, max_seqlen_k: int,
    return_lse: bool, **options: Unpack[VarlenKeywords],
) -> mx.array | tuple[mx.array, mx.array]: ...  # fmt: skip


@operation(RESULTS, k=0, v=0)
def attention_varlen(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cu_seqlens_q: mx.array,
    cu_seqlens_k: mx.array,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    mask: str | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
) -> VarlenCall:
    """Compute :func:`attention` within each sequence of a ragged batch (varlen), packed without padding.

    Source: "FlashAttention-2" (arXiv:2307.08691).

    Args:
        q: Queries, ``[total_q, H, D]``: sequence s is ``q[cu_seqlens_q[s]:cu_seqlens_q[s + 1]]``.
        k: Keys, ``[total_k, Hkv, D]``, split by ``cu_seqlens_k``.
        v: Values, ``[total_k, Hkv, Dv]``, split by ``cu_seqlens_k``.
        cu_seqlens_q: int32 ``[sequences + 1]``, increasing from 0 to at most total_q; sequences may be empty.
        cu_seqlens_k: int32 ``[sequences + 1]``, increasing from 0 to at most total_k.
        max_seqlen_q: The most queries of one sequence, or more.
        max_seqlen_k: The most keys of one sequence, or more.
        scale: Factor of the scores; default ``1 / sqrt(D)``.
        mask: None, or ``"causal"``, aligned to the end of each sequence: its last query attends to all its keys.
        window_size: As in :func:`attention`, by positions within a sequence.
        softcap: As in :func:`attention`.
        sinks: As in :func:`attention`.
        return_lse: Also return the log-sum-exp, as float32 ``[H, total_q]``.
        force_fused: Raise an error instead of using an engine that pads the sequences.
        stream: Stream or device to run on.

    Returns:
        An array ``[total_q, H, Dv]`` in the dtype that q, k and v promote to; with ``return_lse`` a pair. Queries of no sequence, and fully
        masked ones, are zeros (log-sum-exp: minus infinity).

    Raises:
        ValueError: Shapes, dtypes or an option do not fit, or ``force_fused`` is set and the FlashAttention kernel does not support the
            call.
        TypeError: An argument is not an MLX array, or an option is not of its type.

    On GPUs of compute capability 8.0 or newer, mlx-cuda's FlashAttention kernel reads the packed sequences in place. Calls that it does not
    support, and gradients, run :func:`attention` on padded sequences. No engine synchronizes with the CPU.
    """
    require_arrays("attention_varlen", q=q, k=k, v=v)
    dtype = _dtype(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if mask is not None and not (isinstance(mask, str) and mask == "causal"):
        raise WrongValue(f"[attention_varlen] mask must be None or 'causal', got {value_text(mask)}.")
    on = resolve(stream)
    with mx.stream(on):
        packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        q, k, v = (array.astype(dtype) for array in (q, k, v))
        q, options = checked(
            "attention_varlen", q, max_seqlen_k, scale=scale, mask=mask, window_size=window_size, softcap=softcap, sinks=sinks,
            return_lse=return_lse, force_fused=force_fused,
        )  # fmt: skip
        if isinstance(engine := native.engine(on), str):
            choice = Choice("fallback", engine)
        else:
            choice = choose_varlen(case_of(q, v, (max_seqlen_q, min(max_seqlen_k, v.shape[0])), options, engine, packing.sequences))
        return VarlenCall(options, choice, on, force_fused, q, k, v, packing)


@lru_cache(CACHED_SHAPES)
def _dtype(q: Shape, k: Shape, v: Shape, *dtypes: mx.Dtype) -> mx.Dtype:
    require_dimensions("attention_varlen", "[total, H, D]", q=q, k=k, v=v)
    if q[2] != k[2]:
        raise WrongValue(f"[attention_varlen] q and k must have the same last dimension, got {shape_text(q, k)}.")
    if k[:2] != v[:2]:
        raise WrongValue(f"[attention_varlen] k and v must agree in length and heads, got {shape_text(k, v)}.")
    require_groups("attention_varlen", q[1], k[1])
    return require_floating("attention_varlen", *dtypes)


def _packing(cu_q: mx.array, cu_k: mx.array, max_q: int, max_k: int) -> Packing:
    require_arrays("attention_varlen", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if cu_q.ndim != 1 or cu_q.size == 0:
        raise WrongValue(f"[attention_varlen] cu_seqlens_q must have the shape (sequences + 1,), got {shape_text(cu_q.shape)}.")
    for name, most in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if type(most) is not int or most < 0:
            raise WrongValue(f"[attention_varlen] {name} must be a number, not negative, got {value_text(most)}.")
    cu_q = check_array("attention_varlen", "cu_seqlens_q", cu_q, cu_q.shape, mx.int32)
    return Packing(cu_q, check_array("attention_varlen", "cu_seqlens_k", cu_k, cu_q.shape, mx.int32), max_q, max_k)


def _fused(q: mx.array, k: mx.array, v: mx.array, packing: Packing, options: Options, stream: mx.Stream) -> list[mx.array]:
    """Run the FlashAttention kernel; its gradients are those of padded sequences."""

    def forward(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> list[mx.array]:
        results = native.module(stream).flash_varlen(q, k, v, *packing, options._replace(sinks=sinks), stream)
        inside = mx.arange(q.shape[0]) < packing.cu_q[-1]  # the kernel writes no other rows
        results[0] = mx.where(inside[:, None, None], results[0], 0)
        if options.lse:
            results[1] = mx.where(inside, results[1], -mx.inf)
        return results

    def equal(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> list[mx.array]:
        return padded(q, k, v, packing, options._replace(sinks=sinks), stream)

    def backward(primals: tuple[mx.array, ...], cotangents: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        return mx.vjp(equal, list(primals), list(cotangents))[1]

    return with_gradients(forward, backward)(*(array for array in (q, k, v, options.sinks) if array is not None))


def padded(q: mx.array, k: mx.array, v: mx.array, packing: Packing, options: Options, stream: mx.Stream) -> list[mx.array]:
    """Run attention on padded sequences, whose lengths only the device knows.

    Queries are aligned to the padded end and keys to the beginning, as :func:`attention` expects ragged lengths.
    """
    cu_q, cu_k, max_q, max_k = packing
    place = mx.arange(max_q)
    rows = cu_q[1:, None] - max_q + place
    queries = _gather(q, rows, rows >= cu_q[:-1, None])
    rows = cu_k[:-1, None] + mx.arange(max_k)
    there = rows < cu_k[1:, None]
    keys, values = _gather(k, rows, there), _gather(v, rows, there)
    results = run(queries, keys, values, options._replace(ends=cu_k[1:] - cu_k[:-1]), force_fused=False, stream=stream)

    token = mx.arange(q.shape[0])
    sequence = (token[:, None] >= cu_q[1:]).sum(axis=1)
    inside = sequence < packing.sequences
    sequence = mx.minimum(sequence, packing.sequences - 1)
    padded_row = sequence * max_q + mx.maximum(token - cu_q[sequence + 1] + max_q, 0)
    padded_row = mx.where(inside, padded_row, 0)
    out = results[0].swapaxes(1, 2).reshape(-1, q.shape[1], v.shape[2])
    packed = [mx.where(inside[:, None, None], mx.take(out, padded_row, axis=0), 0)]
    if options.lse:
        lse = results[1].swapaxes(1, 2).reshape(-1, q.shape[1])
        packed.append(mx.where(inside[:, None], mx.take(lse, padded_row, axis=0), -mx.inf).swapaxes(0, 1))
    return packed


def _gather(packed: mx.array, rows: mx.array, there: mx.array) -> mx.array:
    """Gather the tokens ``[sequences, n]`` of ``[total, H, D]`` as ``[sequences, H, n, D]``, with zeros as padding."""
    total, heads, dim = packed.shape
    if total == 0:
        return mx.zeros((rows.shape[0], heads, rows.shape[1], dim), packed.dtype)
    found = mx.take(packed, mx.clip(rows, 0, total - 1), axis=0)
    return mx.where(there[:, :, None, None], found, 0).swapaxes(1, 2)
