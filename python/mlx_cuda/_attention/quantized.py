"""Attention to keys and values in MLX's quantised formats."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import mlx.core as mx

from .._common.arrays import check_array, dtype_name, require_arrays, resolve, shape_text
from .._common.choice import OLDEST_GPU, Choice, native_elementwise
from .._common.errors import WrongType, WrongValue
from .._loader import native
from .._loader.graph_cache import cached, growing, valid_for
from .._matmul.formats import Format, weights
from .attention import case_of, run, spread
from .composed import raised
from .options import Options, attention_dtype, check_mask, check_vector, checked
from .paged import in_order
from .rules import choose_quantized_attention, equal_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._common.arrays import StreamOrDevice
    from .options import Keywords, Window

    class QuantizedKeywords(Keywords, total=False):
        window_size: Window
        mask: str | mx.array | None
        lengths: mx.array | None
        left_padding: mx.array | None
        group_size: int | None
        bits: int | None
        mode: str
        block_table: mx.array | None


Packed: TypeAlias = tuple[mx.array, mx.array, mx.array | None]


class Call(NamedTuple):
    """A call of ``quantized_attention``, checked."""

    q: mx.array
    k: Packed
    v: Packed
    form: Format
    table: mx.array | None
    options: Options
    dims: tuple[int, int]  # keys of a sequence, and of a value

    def values(self, of: Packed, stream: mx.Stream) -> mx.array:
        """What is packed, in the queries' dtype."""
        w, scales, biases = of
        if self.table is not None:
            w, scales = in_order(w, self.table), in_order(scales, self.table)
            biases = None if biases is None else in_order(biases, self.table)
        form, dtype, engine = self.form, self.q.dtype, native.engine(stream)
        ours = not isinstance(engine, str) and engine.capability >= OLDEST_GPU and native_elementwise(dtype_name(dtype), w.shape)
        if isinstance(engine, str) or not ours or (biases is not None and (scales.dtype, biases.dtype) != (dtype, dtype)):
            return mx.dequantize(w, scales, biases, form.group_size, form.bits, form.mode, dtype=dtype)
        return engine.module.dequantize(w, scales, biases, *form, dtype, stream)


@overload
def quantized_attention(
    q: mx.array,
    k: tuple[mx.array, ...],
    v: tuple[mx.array, ...],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[QuantizedKeywords],
) -> mx.array: ...


@overload
def quantized_attention(
    q: mx.array,
    k: tuple[mx.array, ...],
    v: tuple[mx.array, ...],
    *,
    return_lse: Literal[True],
    **options: Unpack[QuantizedKeywords],
) -> tuple[mx.array, mx.array]: ...


@overload
def quantized_attention(
    q: mx.array,
    k: tuple[mx.array, ...],
    v: tuple[mx.array, ...],
    *,
    return_lse: bool,
    **options: Unpack[QuantizedKeywords],
) -> mx.array | tuple[mx.array, mx.array]: ...


def quantized_attention(
    q: mx.array,
    k: tuple[mx.array, ...],
    v: tuple[mx.array, ...],
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    scale: float | None = None,
    mask: str | mx.array | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    left_padding: mx.array | None = None,
    block_table: mx.array | None = None,
    return_lse: bool = False,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """:func:`attention` to keys and values as :func:`mlx.core.quantize` gives them: "KIVI" (arXiv:2402.02750) is about what they lose.

    Args:
        q: Queries, ``[B, H, Tq, D]``.
        k: Keys ``[B, Hkv, Tk, D]`` as ``(packed, scales, biases)``, or without biases where the mode has none.
        v: Values ``[B, Hkv, Tk, Dv]`` likewise.
        group_size: Numbers that share a scale; default that of the mode.
        bits: Bits of a number; default that of the mode.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        scale: As in :func:`attention`.
        mask: As in :func:`attention`; with ``block_table`` only ``"causal"``, which is the default then.
        window_size: As in :func:`attention`.
        softcap: As in :func:`attention`.
        sinks: As in :func:`attention`.
        lengths: As in :func:`attention`; needed with ``block_table``.
        left_padding: As in :func:`attention`.
        block_table: int32 ``[B, n]``: k and v are pages ``[pages, Hkv, page_size, D]``, as those of :func:`paged_attention`.
        return_lse: As in :func:`attention`.
        force_fused: Raise instead of using a route that writes the ``[Tq, Tk]`` scores to memory.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` of q's dtype; with ``return_lse`` a pair, as :func:`attention` gives it.

    Raises:
        ValueError: The parts of k or v do not belong together; and as :func:`attention`.
        TypeError: An argument is no MLX array, or k or v no tuple.

    Few queries, up to 64 that share a kv head, read keys and values once, as they are packed: 4 and 8 bits, head_dims a multiple of 32 up
    to 256, pages of a multiple of 16 keys, on GPUs of compute capability 8.0 and newer. Others are :func:`attention` to the dequantised
    keys and values.
    """
    return attend(
        q, *_parts("k", k), *_parts("v", v), group_size=group_size, bits=bits, mode=mode, scale=scale, mask=mask, window_size=window_size,
        softcap=softcap, sinks=sinks, lengths=lengths, left_padding=left_padding, block_table=block_table, return_lse=return_lse,
        force_fused=force_fused, stream=stream,
    )  # fmt: skip


@cached
@growing(k=2, k_scales=2, k_biases=2, v=2, v_scales=2, v_biases=2)
def attend(
    q: mx.array,
    k: mx.array,
    k_scales: mx.array,
    k_biases: mx.array | None,
    v: mx.array,
    v_scales: mx.array,
    v_biases: mx.array | None,
    *,
    window_size: Window = None,
    return_lse: bool = False,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
    **options: Any,
) -> mx.array | tuple[mx.array, mx.array]:
    """:func:`quantized_attention` to keys and values in their parts."""
    on = resolve(stream)
    with mx.stream(on):
        keys, values = (k, k_scales, k_biases), (v, v_scales, v_biases)
        call = prepare(q, keys, values, window_size=window_size, return_lse=return_lse, **options)
        if choose(call, on).engine == "decode":
            if call.table is None and call.options.mask is None:
                left = window_size[0] if isinstance(window_size, tuple) else window_size
                valid_for(*equal_choice(q.shape[2], call.dims[0], left, asked=False))
            results = native.module(on).quantized_attention(*_operands(call), on, call.table)
        else:
            k, v = call.values(keys, on), call.values(values, on)
            results = run(call.q, k, v, call.options, force_fused=force_fused, stream=on)
    return (results[0], results[1]) if return_lse else results[0]


def explain(*arguments: Any, stream: StreamOrDevice = None, **options: Any) -> Choice:
    """Who computes :func:`quantized_attention` for these arguments."""
    on = resolve(stream)
    with mx.stream(on):
        call = prepare(*arguments, **options)
        choice = choose(call, on)
        if choice.engine != "decode":
            return choice
        return replace(choice, kernel=native.module(on).quantized_attention_kernel(*_operands(call), on, call.table))


def prepare(
    q: mx.array,
    k: Packed | tuple[mx.array, ...],
    v: Packed | tuple[mx.array, ...],
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    mask: str | mx.array | None = None,
    lengths: mx.array | None = None,
    left_padding: mx.array | None = None,
    block_table: mx.array | None = None,
    **options: Any,
) -> Call:
    """The arguments checked, with a positive scale."""
    operation = "quantized_attention"
    require_arrays(operation, q=q)
    keys, form, k_shape = _packed("k", k, group_size, bits, mode)
    values, _, v_shape = _packed("v", v, group_size, bits, mode)
    if mask is not None and not isinstance(mask, mx.array) and (not isinstance(mask, str) or mask != "causal"):
        raise WrongValue(f"[{operation}] mask must be None, 'causal' or an array, got {mask!r}.")
    table = None
    if block_table is not None:
        if lengths is None or isinstance(mask, mx.array) or left_padding is not None:
            raise WrongValue(f"[{operation}] With block_table there have to be lengths, and neither left_padding nor a mask of numbers.")
        if block_table.ndim != 2 or k_shape[2] == 0:
            raise WrongValue(f"[{operation}] block_table must be [B, n] of pages with keys, got {shape_text(block_table.shape, k_shape)}.")
        table = check_array(operation, "block_table", block_table, (q.shape[0], block_table.shape[1]), mx.int32)
        mask = "causal"
        k_shape, v_shape = ((q.shape[0], of[1], table.shape[1] * of[2], of[3]) for of in (k_shape, v_shape))
    attention_dtype(operation, q.shape, k_shape, v_shape, q.dtype)
    batch, heads, q_len, _ = q.shape
    q, common = checked(operation, q, k_shape[2], mask=mask, **options)
    own = common._replace(
        mask=check_mask(mask, (batch, heads, q_len, k_shape[2]), q.dtype) if isinstance(mask, mx.array) else None,
        starts=check_vector(operation, "left_padding", left_padding, batch, mx.int32),
        ends=check_vector(operation, "lengths", lengths, batch, mx.int32),
    )
    return Call(q, keys, values, form, table, own, (k_shape[2], v_shape[3]))


def _parts(name: str, of: Any) -> Packed:
    """The packed numbers of keys or values, their scales, and their biases where there are such."""
    if not isinstance(of, (tuple, list)) or len(of) not in {2, 3}:
        raise WrongType(f"[quantized_attention] {name} must be a tuple (packed, scales, biases), got {type(of).__name__}.")
    w, scales, biases = (*of, None)[:3]
    return w, scales, biases


def _packed(name: str, of: Any, group_size: int | None, bits: int | None, mode: str) -> tuple[Packed, Format, tuple[int, ...]]:
    """Keys or values in their parts, how they are quantised, and their shape."""
    operation = "quantized_attention"
    w, scales, biases = _parts(name, of)
    require_arrays(operation, ("biases",), **{name: w, "scales": scales, "biases": biases})
    shift = None if biases is None else (biases.shape, biases.dtype)
    form, rows, columns = weights(operation, (w.shape, w.dtype), (scales.shape, scales.dtype), shift, True, group_size, bits, mode)
    return (w, scales, biases), form, (*w.shape[:-2], rows, columns)


def choose(call: Call, stream: mx.Stream) -> Choice:
    """Who computes the call."""
    engine = native.engine(stream)
    if isinstance(engine, str):
        return Choice("composed", engine)
    q = call.q
    same = call.k[2] is None or all(part.dtype == q.dtype for of in (call.k, call.v) for part in of[1:] if part is not None)
    case = case_of(q, call.v[0], (q.shape[2], call.dims[0]), call.options, engine, q.shape[0])._replace(v_head_dim=call.dims[1])
    return choose_quantized_attention(case, call.form, page_size=0 if call.table is None else call.k[0].shape[2], same_dtype=same)


def _operands(call: Call) -> tuple[mx.array, Packed, Packed, Format, Options]:
    options = call.options
    if options.mask is not None:
        additive = options.mask.dtype != mx.bool_
        mask = raised(options.mask) if additive and options.sinks is None and not options.lse else options.mask
        options = spread(call.q, call.k[0], options._replace(mask=mask))
    return call.q, call.k, call.v, call.form, options
