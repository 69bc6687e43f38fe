"""Scaled dot-product attention, fused if a fused kernel supports the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import mlx.core as mx

from .._common.arrays import StreamOrDevice, require_arrays, resolve
from .._common.choice import Choice, EngineName, dtype_name
from .._loader import native
from .._operation import Call, operation
from .composed import compose, on_16_bytes, raised, upstream, with_upstream_gradients
from .options import AttentionKeywords, Options, Window, operands
from .rules import FEWEST_QUERIES, MOST_BLOCKS, WIDEST_UPSTREAM_HEAD, AttentionCase, choose_attention, equal_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack


OURS: tuple[EngineName, ...] = ("decode", "cudnn", "flash")
MOST_KEYS_OF_A_PASS = 1024  # of MLX's kernel for few queries
RESULTS = "mx.array | tuple[mx.array, mx.array]"


@dataclass(slots=True)
class AnyAttentionCall(Call[mx.array | tuple[mx.array, mx.array]]):
    """A call of one form of attention."""

    options: Options
    choice: Choice
    stream: mx.Stream
    force_fused: bool

    def result(self) -> mx.array | tuple[mx.array, mx.array]:
        with mx.stream(self.stream):
            results = self.results()
        return (results[0], results[1]) if self.options.lse else results[0]

    def results(self) -> list[mx.array]:
        """Return the result, and the log-sum-exp if the options include it."""
        raise NotImplementedError


@dataclass(slots=True)
class AttentionCall(AnyAttentionCall):
    """A call of :func:`attention`, in one dtype."""

    q: mx.array
    k: mx.array
    v: mx.array
    window_size: Window
    at_once: bool  # not in parts

    @property
    def sizes(self) -> tuple[int, int] | None:
        """A mask has as many columns as there are keys, and queries before the first key are computed separately."""
        engine, q_len, k_len, window = self.choice.engine, self.q.shape[2], self.k.shape[2], self.window_size
        one_node = engine in OURS or (engine == "mlx" and q_len <= k_len)
        if self.options.mask is not None or not one_node or not self.at_once:
            return None
        left = window[0] if isinstance(window, tuple) else window
        return equal_choice(q_len, k_len, left, asked=self.options.deterministic or engine == "cudnn")

    def results(self) -> list[mx.array]:
        q, k, v, options, engine = self.q, self.k, self.v, self.options, self.choice.engine
        if engine in OURS and self.at_once:
            return fused(engine, q, k, v, options, self.stream)
        return run(q, k, v, options, self.choice, force_fused=self.force_fused, stream=self.stream)

    def kernel(self) -> str:
        engine, q, k, options, on = self.choice.engine, self.q, self.k, self.options, self.stream
        if engine not in {"decode", "flash"}:
            return ""
        with mx.stream(on):
            return native.module(on).attention_kernel(engine, q, k, self.v, spread(q, k, options), on)


@overload
def attention(
    q: mx.array, k: mx.array, v: mx.array, *, return_lse: Literal[False] = False, **options: Unpack[AttentionKeywords]
) -> mx.array: ...


@overload
def attention(
    q: mx.array, k: mx.array, v: mx.array, *, return_lse: Literal[True], **options: Unpack[AttentionKeywords]
) -> tuple[mx.array, mx.array]: ...


@overload
def attention(
    q: mx.array, k: mx.array, v: mx.array, *, return_lse: bool, **options: Unpack[AttentionKeywords]
) -> mx.array | tuple[mx.array, mx.array]: ...


@operation(RESULTS, k=2, v=2)
def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    left_padding: mx.array | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    force_fused: bool = False,
    stream: StreamOrDevice = None,
) -> AttentionCall:
    """Compute ``softmax(scale * q @ k.T + mask) @ v`` per head, with grouped queries.

    Source: "Attention Is All You Need" (arXiv:1706.03762), "GQA" (arXiv:2305.13245).

    Args:
        q: Queries, ``[B, H, Tq, D]``.
        k: Keys, ``[B, Hkv, Tk, D]``, where H is a multiple of Hkv.
        v: Values, ``[B, Hkv, Tk, Dv]``.
        scale: Factor of the scores; default ``1 / sqrt(D)``.
        mask: None; ``"causal"``, aligned to the lower right: query i attends to the keys ``j <= i + Tk - Tq``; a bool array (True:
            attend); or an additive array of a type that promotes to that of the result. Arrays broadcast to ``[B, H, Tq, Tk]``.
        window_size: Sliding window: the number of keys before position ``i + Tk - Tq`` that query i attends to, or a pair: before and
            after it (None: all). With ``mask="causal"`` none after it. "Longformer" (arXiv:2004.05150).
        softcap: Logit softcapping: scores become ``softcap * tanh(scores / softcap)`` before masks. "Gemma 2" (arXiv:2408.00118).
        sinks: Attention sinks, ``[H]``: one more score per head in the softmax, without a value (gpt-oss; arXiv:2309.17453).
        lengths: int32 ``[B]``: only the first ``lengths[b]`` keys are valid, and the queries are the last Tq positions before that end.
        left_padding: int32 ``[B]``: the first ``left_padding[b]`` keys are padding.
        return_lse: Also return the log-sum-exp (natural logarithm) of each query's scores, sinks included, as float32 ``[B, H, Tq]``. It
            merges results over parts of the keys.
        deterministic: Compute bit-identical gradients in every run, which is slower. The forward result always is.
        force_fused: Raise an error instead of using an engine that writes the ``[Tq, Tk]`` scores to memory.
        stream: Stream or device to run on.

    Returns:
        An array ``[B, H, Tq, Dv]`` in the dtype that q, k and v promote to; with ``return_lse`` a pair of it and the log-sum-exp. A fully
        masked query returns zeros (log-sum-exp: minus infinity, or its sink), never NaN, and has zero gradients.

    Raises:
        ValueError: Shapes, dtypes or an option do not fit, or ``force_fused`` is set and no fused kernel supports the call.
        TypeError: An argument is not an MLX array, or an option is not of its type.

    On GPUs of compute capability 8.0 or newer, float16 and bfloat16 with D and Dv multiples of 8 up to 256 run fused: up to 32 queries
    in mlx-cuda's split-KV decode kernel; more in cuDNN, or in mlx-cuda's FlashAttention kernel with array masks, softcapping, ragged
    lengths or non-causal windows. :func:`explain` returns which, and why. Other calls run on MLX's operations.
    """
    on = resolve(stream)
    with mx.stream(on):
        require_arrays("attention", q=q, k=k, v=v)
        arrays = operands(
            q, k, v, scale=scale, mask=mask, window_size=window_size, softcap=softcap, sinks=sinks, lengths=lengths,
            left_padding=left_padding, return_lse=return_lse, deterministic=deterministic, force_fused=force_fused,
        )  # fmt: skip
        (q, k, v, options), choice = arrays, choose(*arrays, on)
        at_once = q.shape[1] <= MOST_BLOCKS and q.shape[0] <= most_batches(choice.engine, q, k, options)
        return AttentionCall(options, choice, on, force_fused, q, k, v, window_size, at_once)


prepare: Callable[..., AttentionCall] = vars(attention)["prepare"]  # which its overloads hide


def case_of(q: mx.array, v: mx.array, lengths: tuple[int, int], options: Options, engine: native.Engine, batch: int) -> AttentionCase:
    """Return the properties of a call that the rules use."""
    return AttentionCase(
        batch, q.shape[1], v.shape[1], *lengths, q.shape[-1], v.shape[-1], dtype_name(q.dtype), options.mask_kind, engine.capability,
        engine.cudnn, window=options.window_kind, softcap=options.softcap > 0, sinks=options.sinks is not None, ragged=options.ragged,
        lse=options.lse, deterministic=options.deterministic, tf32=native.tf32(),
    )  # fmt: skip


def choose(q: mx.array, k: mx.array, v: mx.array, options: Options, stream: mx.Stream) -> Choice:
    """Return the engine of the call."""
    engine = native.engine(stream)
    if isinstance(engine, str):
        return Choice("mlx" if options.plain else "fallback", engine)
    if max(q.shape[:2]) > MOST_BLOCKS:
        for axis in 1, 0:
            q, k, v, options = next(parts(q, k, v, options, axis, MOST_BLOCKS))
    case = case_of(q, v, (q.shape[2], k.shape[2]), options, engine, q.shape[0])
    choice = choose_attention(case)
    if choice.engine == "cudnn":
        refusal = engine.module.cudnn_refusal(q, k, v, options, stream)
        if refusal:
            choice = choose_attention(case._replace(refusal=refusal))
    return choice


def most_batches(engine: EngineName, q: mx.array, k: mx.array, options: Options) -> int:
    """Return how many batch entries an engine supports at once: they are blocks in the last dimension of a grid. MLX's kernel for one to
    three queries of many keys has 32 blocks per entry (0.32.4), and mlx-cuda's kernel that reads masks one per head.
    """
    if engine == "mlx" and q.shape[2] < FEWEST_QUERIES and k.shape[2] > MOST_KEYS_OF_A_PASS:
        return MOST_BLOCKS // 32
    return max(MOST_BLOCKS // q.shape[1], 1) if engine == "flash" and options.mask is not None else MOST_BLOCKS


def parts(
    q: mx.array, k: mx.array, v: mx.array, options: Options, axis: int, most: int
) -> Iterator[tuple[mx.array, mx.array, mx.array, Options]]:
    """Split a call into parts of some batch entries (axis 0) or heads (axis 1); heads that share a KV head stay together."""
    shared = q.shape[1] // k.shape[1] if axis else 1
    step = max(most // shared, 1)
    for at in range(0, k.shape[axis], step):
        own, of_keys = ((slice(None),) * axis + (slice(at * each, (at + step) * each),) for each in (shared, 1))
        yield q[own], k[of_keys], v[of_keys], options.part(axis, own)


def run(
    q: mx.array, k: mx.array, v: mx.array, options: Options, choice: Choice | None = None, *, force_fused: bool, stream: mx.Stream
) -> list[mx.array]:
    """Return the result of the chosen engine, and the log-sum-exp if the options include it."""
    shape = (*q.shape[:3], v.shape[3])
    if 0 in (*q.shape[:3], v.shape[2]) or (v.shape[3] == 0 and not options.lse):
        return _nothing(q, shape, options)
    again = partial(run, force_fused=force_fused, stream=stream)
    if min(q.shape[1] - MOST_BLOCKS, k.shape[1] - 1) > 0:
        return _joined((again(*part) for part in parts(q, k, v, options, 1, MOST_BLOCKS)), 1)
    choice = choice or choose(q, k, v, options, stream)
    most = most_batches(choice.engine, q, k, options)
    if q.shape[0] > most:
        return _joined((again(*part, choice) for part in parts(q, k, v, options, 0, most)), 0)
    blind = q.shape[2] - k.shape[2]  # queries before the first key: MLX's own kernels do not take them
    if choice.engine == "mlx" and options.causal and options.mask is None and blind > 0:
        seeing = again(q[:, :, blind:], k, v, options)
        return [mx.concatenate([mx.zeros((*shape[:2], blind, shape[3]), q.dtype), *seeing], axis=2)]
    if choice.engine in OURS:
        return fused(choice.engine, q, k, v, options, stream)
    refusal = f"[attention] force_fused is set, but no fused kernel supports this call: {choice.reason}"
    if choice.engine == "fallback":
        if force_fused:
            raise ValueError(refusal)
        return compose(q, k, v, options)
    try:
        return [upstream(q, k, v, options, force_fused=force_fused)]
    except ValueError as error:
        if force_fused:
            raise ValueError(refusal) from error
        raise


def fused(engine: EngineName, q: mx.array, k: mx.array, v: mx.array, options: Options, stream: mx.Stream) -> list[mx.array]:
    """Run the call on the fused engine that was chosen."""
    module = native.module(stream)
    if engine == "cudnn":
        return module.cudnn_attention(q, k, v, options, stream)
    mask = options.mask
    additive = mask is not None and mask.dtype != mx.bool_
    if mask is not None and additive and engine == "flash" and options.plain and max(q.shape[3], v.shape[3]) <= WIDEST_UPSTREAM_HEAD:

        def biased(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
            mask = mx.broadcast_to(on_16_bytes(mask), (*q.shape[:3], k.shape[2]))
            return module.flash_attention(q, k, v, options._replace(mask=mask), stream)[0]

        arrays = [q, k, v, mask]
        return [(with_upstream_gradients(biased, options) if module.traced(arrays) else biased)(*arrays)]
    if mask is not None:
        if engine == "decode" and additive and options.sinks is None and not options.lse:
            mask = raised(mask)  # sinks and logarithms would see it; the flash kernels do it themselves
        options = spread(q, k, options._replace(mask=mask))
    call = module.decode_attention if engine == "decode" else module.flash_attention
    return call(q, k, v, options, stream)


def spread(q: mx.array, k: mx.array, options: Options) -> Options:
    """Return the options with the mask broadcast to the shape of the scores."""
    return options if options.mask is None else options._replace(mask=mx.broadcast_to(options.mask, (*q.shape[:3], k.shape[2])))


def _joined(results: Iterable[list[mx.array]], axis: int) -> list[mx.array]:
    """Join the results of the parts of a call."""
    return [mx.concatenate(list(each), axis=axis) for each in zip(*results, strict=True)]


def _nothing(q: mx.array, shape: tuple[int, ...], options: Options) -> list[mx.array]:
    """Return the results without any keys or queries."""
    if not options.lse:
        return [mx.zeros(shape, q.dtype)]
    lse = mx.array(-mx.inf) if options.sinks is None else options.sinks.astype(mx.float32).reshape(1, -1, 1)
    return [mx.zeros(shape, q.dtype), mx.broadcast_to(lse, shape[:3])]
