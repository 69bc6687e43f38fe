"""Attention over a KV cache in MLX's quantized formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import mlx.core as mx

from .._common.arrays import StreamOrDevice, check_array, require_arrays, resolve, shape_text
from .._common.choice import OLDEST_GPU, Choice, against_native, dtype_name
from .._common.errors import WrongType, WrongValue
from .._loader import native
from .._matmul.formats import Format, weights
from .._operation import operation
from .attention import RESULTS, AnyAttentionCall, case_of, run, spread
from .composed import raised
from .options import MaskedKeywords, Options, Window, attention_dtype, checked
from .paged import in_order
from .rules import choose_quantized_attention, equal_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack


class QuantizedKeywords(MaskedKeywords, total=False):
    group_size: int | None
    bits: int | None
    mode: str
    block_table: mx.array | None


Packed: TypeAlias = tuple[mx.array, mx.array, mx.array | None]


@dataclass(slots=True)
class QuantizedAttentionCall(AnyAttentionCall):
    """A call of :func:`quantized_attention`."""

    q: mx.array
    k: Packed
    v: Packed
    form: Format
    table: mx.array | None
    keys: int  # of a sequence
    window_size: Window

    @property
    def sizes(self) -> tuple[int, int] | None:
        if self.choice.engine != "decode" or self.table is not None or self.options.mask is not None:
            return None
        left = self.window_size[0] if isinstance(self.window_size, tuple) else self.window_size
        return equal_choice(self.q.shape[2], self.keys, left, asked=False)

    def results(self) -> list[mx.array]:
        if self.choice.engine == "decode":
            return native.module(self.stream).quantized_attention(*self._operands(), self.stream, self.table)
        k, v = self._values(self.k), self._values(self.v)
        return run(self.q, k, v, self.options, force_fused=self.force_fused, stream=self.stream)

    def kernel(self) -> str:
        if self.choice.engine != "decode":
            return ""
        with mx.stream(self.stream):
            return native.module(self.stream).quantized_attention_kernel(*self._operands(), self.stream, self.table)

    def _values(self, of: Packed) -> mx.array:
        """Return the dequantized cache in the dtype of the queries."""
        w, scales, biases = of
        if self.table is not None:
            w, scales = in_order(w, self.table), in_order(scales, self.table)
            biases = None if biases is None else in_order(biases, self.table)
        form, dtype, engine = self.form, self.q.dtype, native.engine(self.stream)
        ours = not isinstance(engine, str) and engine.capability >= OLDEST_GPU and not against_native(dtype_name(dtype), w.shape)
        if isinstance(engine, str) or not ours or (biases is not None and (scales.dtype, biases.dtype) != (dtype, dtype)):
            return mx.dequantize(w, scales, biases, form.group_size, form.bits, form.mode, dtype=dtype)
        return engine.module.dequantize(w, scales, biases, *form, dtype, self.stream)

    def _operands(self) -> tuple[mx.array, Packed, Packed, Format, Options]:
        options = self.options
        if options.mask is not None:
            additive = options.mask.dtype != mx.bool_
            mask = raised(options.mask) if additive and options.sinks is None and not options.lse else options.mask
            options = spread(self.q, self.k[0], options._replace(mask=mask))
        return self.q, self.k, self.v, self.form, options


@overload
def quantized_attention(
    q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], *,
    return_lse: Literal[False] = False, **options: Unpack[QuantizedKeywords],
) -> mx.array: ...  # fmt: skip


@overload
def quantized_attention(
    q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], *,
    return_lse: Literal[True], **options: Unpack[QuantizedKeywords],
) -> tuple[mx.array, mx.array]: ...  # fmt: skip


@overload
def quantized_attention(
    q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], *,
    return_lse: bool, **options: Unpack[QuantizedKeywords],
) -> mx.array | tuple[mx.array, mx.array]: ...  # fmt: skip


def quantized_attention(
    q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], *, group_size: int | None = None, bits: int | None = None,
    mode: str = "affine", scale: float | None = None, mask: str | mx.array | None = None, window_size: Window = None,
    softcap: float | None = None, sinks: mx.array | None = None, lengths: mx.array | None = None, left_padding: mx.array | None = None,
    block_table: mx.array | None = None, return_lse: bool = False, force_fused: bool = False, stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:  # fmt: skip
    """Compute :func:`attention` over a quantized KV cache, as :func:`mlx.core.quantize` returns it.

    Source: "KIVI" (arXiv:2402.02750), on the loss of accuracy.

    Args:
        q: Queries, ``[B, H, Tq, D]``.
        k: Keys ``[B, Hkv, Tk, D]`` as ``(packed, scales, biases)``, or without biases if the mode has none.
        v: Values ``[B, Hkv, Tk, Dv]`` in the same form.
        group_size: Values that share a scale; default: that of the mode.
        bits: Bits of a value; default: that of the mode.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        scale: As in :func:`attention`.
        mask: As in :func:`attention`; with ``block_table`` only ``"causal"``, which is the default then.
        window_size: As in :func:`attention`.
        softcap: As in :func:`attention`.
        sinks: As in :func:`attention`.
        lengths: As in :func:`attention`; required with ``block_table``.
        left_padding: As in :func:`attention`.
        block_table: int32 ``[B, n]``: k and v are pages ``[pages, Hkv, page_size, D]``, as in :func:`paged_attention`.
        return_lse: As in :func:`attention`.
        force_fused: Raise an error instead of using an engine that writes the ``[Tq, Tk]`` scores to memory.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` of q's dtype; with ``return_lse`` a pair, as from :func:`attention`.

    Raises:
        ValueError: The parts of k or v do not match, or as :func:`attention`.
        TypeError: An argument is not an MLX array, k or v is not a tuple, or an option is not of its type.

    Up to 64 queries that share a KV head run in a kernel that reads the quantized cache: 4 and 8 bits, head sizes a multiple of 32 up to
    256, pages of a multiple of 16 keys, compute capability 8.0 or newer. Other calls dequantize the cache and run :func:`attention`.
    """
    (k_numbers, k_scales, k_biases), (v_numbers, v_scales, v_biases) = _parts("k", k), _parts("v", v)
    return attend(
        q, k_numbers, k_scales, v_numbers, v_scales, k_biases=k_biases, v_biases=v_biases, group_size=group_size, bits=bits, mode=mode,
        scale=scale, mask=mask, window_size=window_size, softcap=softcap, sinks=sinks, lengths=lengths, left_padding=left_padding,
        block_table=block_table, return_lse=return_lse, force_fused=force_fused, stream=stream,
    )  # fmt: skip


@operation(RESULTS, k=2, k_scales=2, k_biases=2, v=2, v_scales=2, v_biases=2)
def attend(
    q: mx.array, k: mx.array, k_scales: mx.array, v: mx.array, v_scales: mx.array, *, k_biases: mx.array | None,
    v_biases: mx.array | None, group_size: int | None = None, bits: int | None = None, mode: str = "affine", scale: float | None = None,
    mask: str | mx.array | None = None, window_size: Window = None, softcap: float | None = None, sinks: mx.array | None = None,
    lengths: mx.array | None = None, left_padding: mx.array | None = None, block_table: mx.array | None = None, return_lse: bool = False,
    force_fused: bool = False, stream: StreamOrDevice = None,
) -> QuantizedAttentionCall:  # fmt: skip
    """:func:`quantized_attention` with the parts of keys and values as separate arguments."""
    operation = "quantized_attention"
    on = resolve(stream)
    with mx.stream(on):
        require_arrays(operation, q=q)
        keys, values = (k, k_scales, k_biases), (v, v_scales, v_biases)
        form, k_shape = _packed("k", keys, group_size, bits, mode)
        _, v_shape = _packed("v", values, group_size, bits, mode)
        table = None
        if block_table is not None:
            if lengths is None or isinstance(mask, mx.array) or left_padding is not None:
                wants = "With block_table there have to be lengths, and neither left_padding nor a mask of numbers."
                raise WrongValue(f"[{operation}] {wants}")
            if block_table.ndim != 2 or k_shape[2] == 0:
                found = shape_text(block_table.shape, k_shape)
                raise WrongValue(f"[{operation}] block_table must be [B, n] of pages with keys, got {found}.")
            table = check_array(operation, "block_table", block_table, (q.shape[0], block_table.shape[1]), mx.int32)
            mask = "causal" if mask is None else mask
            k_shape, v_shape = ((q.shape[0], of[1], table.shape[1] * of[2], of[3]) for of in (k_shape, v_shape))
        attention_dtype(operation, q.shape, k_shape, v_shape, q.dtype)
        q, options = checked(
            operation, q, k_shape[2], scale=scale, mask=mask, window_size=window_size, softcap=softcap, sinks=sinks, lengths=lengths,
            left_padding=left_padding, return_lse=return_lse, force_fused=force_fused,
        )  # fmt: skip
        engine = native.engine(on)
        if isinstance(engine, str):
            choice = Choice("fallback", engine)
        else:
            same = k_biases is None or all(part.dtype == q.dtype for of in (keys, values) for part in of[1:] if part is not None)
            case = case_of(q, v, (q.shape[2], k_shape[2]), options, engine, q.shape[0])._replace(v_head_dim=v_shape[3])
            choice = choose_quantized_attention(case, form, page_size=0 if table is None else k.shape[2], same_dtype=same)
        return QuantizedAttentionCall(options, choice, on, force_fused, q, keys, values, form, table, k_shape[2], window_size)


def prepare(q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], **options: Any) -> QuantizedAttentionCall:
    """Prepare a call of :func:`quantized_attention`, which shares the dispatch cache of :func:`attend`."""
    (k_numbers, k_scales, k_biases), (v_numbers, v_scales, v_biases) = _parts("k", k), _parts("v", v)
    return attend.prepare(q, k_numbers, k_scales, v_numbers, v_scales, k_biases=k_biases, v_biases=v_biases, **options)


vars(quantized_attention).update(prepare=prepare)


def _parts(name: str, of: Any) -> Packed:
    """Split keys or values into packed values, scales and biases, if any."""
    if not isinstance(of, (tuple, list)) or len(of) not in {2, 3}:
        raise WrongType(f"[quantized_attention] {name} must be a tuple (packed, scales, biases), got {type(of).__name__}.")
    w, scales, biases = (*of, None)[:3]
    return w, scales, biases


def _packed(name: str, of: Packed, group_size: int | None, bits: int | None, mode: str) -> tuple[Format, tuple[int, ...]]:
    """Check the parts of keys or values, and return their quantization and their unpacked shape."""
    operation = "quantized_attention"
    w, scales, biases = of
    require_arrays(operation, ("biases",), **{name: w, "scales": scales, "biases": biases})
    shift = None if biases is None else (biases.shape, biases.dtype)
    form, rows, columns = weights(operation, ((w.shape, w.dtype), (scales.shape, scales.dtype), shift), True, group_size, bits, mode)
    return form, (*w.shape[:-2], rows, columns)
