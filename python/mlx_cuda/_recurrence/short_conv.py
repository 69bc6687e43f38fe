"""The short causal convolution before linear attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, Shape, StreamOrDevice, check_array, require_arrays, resolve, shape_text, value_text
from .._common.choice import HALF, OLDEST_GPU, Choice, dtype_name, first_reason, sm
from .._common.errors import WrongValue
from .._loader import native
from .._loader.replacing import Prepared
from .._operation import DirectCall, operation
from .fused import RESULTS
from .rules import floating

MOST_TAPS = 8  # of one token
TAPS = (3, 4)  # of several
FEWEST_NUMBERS = 1 << 24  # of x, from which on MLX's own kernel is known to be slower
LARGEST_BATCH = 65535  # as many blocks as a grid's last dimensions have
MOST_CHANNELS = 65535 * 128 * 2

Activation: TypeAlias = Literal["silu"]

upstream_conv1d = mx.conv1d


class Call(NamedTuple):
    """The arrays of a call, as the kernel and MLX expect them."""

    x: mx.array
    weight: mx.array  # [C, K, 1]
    bias: mx.array | None
    state: mx.array | None
    silu: bool
    padded: bool  # otherwise the rows before are the first of x, which has those of several tokens


class ConvCase(NamedTuple):
    """The properties of a call that determine its engine."""

    shape: Shape  # of x
    taps: int
    dtype: str
    capability: tuple[int, int]


@operation(RESULTS)
def short_conv(
    x: mx.array,
    weight: mx.array,
    *,
    bias: mx.array | None = None,
    state: mx.array | None = None,
    activation: Activation | None = None,
    stream: StreamOrDevice = None,
) -> DirectCall[tuple[mx.array, mx.array]]:
    """Compute a causal depthwise convolution with few taps, and its state for the next tokens::

        inputs = concatenate([state, x], axis=1)
        y[:, t] = activation(sum over k of weight[:, k] * inputs[:, t + k] + bias)

    Source: Mamba (arXiv:2312.00752); Qwen3-Next and Kimi Linear have it before linear attention.

    Args:
        x: Inputs, ``[B, T, C]``.
        weight: ``[C, K]``, or ``[C, K, 1]`` as :class:`mlx.nn.Conv1d` with ``groups=C`` has it.
        bias: ``[C]``; default none.
        state: The K - 1 inputs before the first, ``[B, K - 1, C]``; default zeros.
        activation: ``"silu"`` or None.
        stream: Stream or device to run on.

    Returns:
        y, ``[B, T, C]`` in the dtype that x and weight promote to (float32 if that is not a floating point type), and the last K - 1 inputs
        in the same dtype: the state for the next tokens.

    Raises:
        ValueError: Shapes do not fit, a dtype is complex, or the activation is unknown.
        TypeError: An argument is not an MLX array.

    On a CUDA GPU, float16 and bfloat16 with a multiple of eight channels and three or four taps run in one kernel, which computes in
    float32 and rounds once; single tokens also with other sizes. Other calls, and gradients, run on MLX's operations.
    """
    on = resolve(stream)
    with mx.stream(on):
        require_arrays("short_conv", ("bias", "state"), x=x, weight=weight, bias=bias, state=state)
        _check(x.shape, weight.shape)
        if activation is not None and not (isinstance(activation, str) and activation == "silu"):
            raise WrongValue(f"[short_conv] activation must be 'silu' or None, got {value_text(activation)}.")
        dtype = floating("short_conv", x.dtype, weight.dtype)
        channels, taps = weight.shape[:2]
        if bias is not None:
            bias = check_array("short_conv", "bias", bias, (channels,), dtype)
        if state is not None:
            state = check_array("short_conv", "state", state, (x.shape[0], taps - 1, channels), dtype)
        weight = weight.astype(dtype).reshape(channels, taps, 1)
        call = Call(x.astype(dtype), weight, bias, state, silu=activation is not None, padded=True)
        return DirectCall(choose(call, on), "short_conv", _composed, call, on)


@lru_cache(CACHED_SHAPES)
def _check(x: Shape, weight: Shape) -> None:
    if len(x) != 3 or len(weight) not in (2, 3) or weight[0] != x[2] or weight[2:] not in ((), (1,)) or weight[1] == 0:
        raise WrongValue(f"[short_conv] x must be [B, T, C] and weight [C, K] or [C, K, 1], got {shape_text(x, weight)}.")


def choose(call: Call, stream: mx.Stream) -> Choice:
    """Return the engine of a call."""
    engine = native.engine(stream)
    if isinstance(engine, str):
        return Choice("mlx", engine)
    return choose_conv(ConvCase(call.x.shape, call.weight.shape[1], dtype_name(call.x.dtype), engine.capability))


@lru_cache(1024)
def choose_conv(case: ConvCase) -> Choice:
    """Choose mlx-cuda's kernel, else MLX's operations."""
    (batch, tokens, channels), taps = case.shape, case.taps
    one = tokens == 1
    against = first_reason((
        (case.capability < OLDEST_GPU, f"mlx-cuda's kernel runs on {sm(OLDEST_GPU)} and newer"),
        (0 in case.shape, "there is nothing to compute"),
        (case.dtype not in HALF, f"mlx-cuda's kernel supports {' and '.join(HALF)}"),
        (channels % 2 != 0, "mlx-cuda's kernel supports an even number of channels"),
        (not 2 <= taps <= MOST_TAPS, f"mlx-cuda's kernel supports 2 to {MOST_TAPS} taps"),
        (not one and channels % 8 != 0, "mlx-cuda's kernel for several tokens supports a multiple of 8 channels"),
        (not one and taps not in TAPS, f"mlx-cuda's kernel for several tokens supports {' or '.join(map(str, TAPS))} taps"),
        (batch > LARGEST_BATCH, f"mlx-cuda's kernel supports {LARGEST_BATCH} sequences at most"),
        (channels > MOST_CHANNELS, f"mlx-cuda's kernel supports {MOST_CHANNELS} channels at most"),
    ))  # fmt: skip
    return Choice("mlx", against) if against else Choice("direct", "each channel with its own taps, in one pass")


def _composed(
    x: mx.array, weight: mx.array, bias: mx.array | None, state: mx.array | None, silu: bool, _: bool
) -> tuple[mx.array, mx.array]:
    kept, channels = weight.shape[1] - 1, x.shape[2]
    rows = mx.concatenate([mx.zeros((x.shape[0], kept, channels), x.dtype) if state is None else state, x], axis=1)
    y = upstream_conv1d(rows, weight, groups=channels) if x.size else x
    if bias is not None:
        y = y + bias
    return (y * mx.sigmoid(y) if silu else y), rows[:, x.shape[1] :]


def depthwise(
    x: mx.array, weight: mx.array, /, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1, *,
    stream: StreamOrDevice = None,
) -> Prepared | None:  # fmt: skip
    """Return mlx-cuda's call for these arguments of :func:`mlx.core.conv1d`, if it is a convolution that the kernel computes faster.

    That of one token is left to MLX: a captured step has a kernel for it and for what comes after.
    """
    if x.size < FEWEST_NUMBERS or x.ndim != 3 or weight.ndim != 3 or x.dtype != weight.dtype:
        return None
    sizes, channels, taps = (stride, padding, dilation, groups), x.shape[2], weight.shape[1]
    if sizes != (1, 0, 1, channels) or not all(isinstance(each, int) for each in sizes):
        return None
    if weight.shape != (channels, taps, 1) or x.shape[1] <= taps:
        return None
    on = resolve(stream)
    call = Call(x, weight, None, None, silu=False, padded=False)
    return Prepared(lambda: native.module(on).short_conv(*call, on)[0]) if choose(call, on).engine == "direct" else None
