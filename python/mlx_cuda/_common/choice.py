"""Engines, and the parts of dispatch rules that all operations share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx

AttentionEngine = Literal["decode", "cudnn", "flash", "mlx", "fallback"]
MatmulEngine = Literal["small_m", "gemv", "dequantize", "grouped", "cublaslt", "mlx", "fallback"]
ElementwiseEngine = Literal["fused", "fallback"]
RecurrenceEngine = Literal["recurrent", "chunked", "direct", "mlx"]
StepEngine = Literal["replay", "mlx"]
SumEngine = Literal["peers", "mlx"]
EngineName = AttentionEngine | MatmulEngine | ElementwiseEngine | RecurrenceEngine | StepEngine | SumEngine

HALF = ("float16", "bfloat16")
NATIVE = (*HALF, "float32")
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # of 99 KiB for a block: too small for the widest heads
OLDEST_GPU = (8, 0)  # of cuDNN's fused attention, and of the tensor core instruction of mlx-cuda's kernels


class Gpu(NamedTuple):
    """The device of a call, for dispatch rules: a GPU with a native module, MLX's CUDA backend only, or (no capability) neither."""

    capability: tuple[int, int]
    absent: str = ""  # why there is no native module


@dataclass(frozen=True)
class Choice:
    """The engine of a call, as :func:`explain` returns it.

    ``reason`` is the rule that selected the engine, or that excluded the engines before it. ``kernel`` has the source and the name of the
    CUDA kernel; it is empty if a library or MLX computes the call.
    """

    engine: EngineName
    reason: str
    kernel: str = ""  # the device code's source and function, where a kernel of mlx-cuda runs


def first_reason(rules: tuple[tuple[bool, str], ...]) -> str:
    """Return the reason of the first rule that applies, or an empty string."""
    return next((reason for applies, reason in rules if applies), "")


def against_native(dtype: str, sizes: tuple[int, ...]) -> str:
    """Return the first rule that excludes the native kernels."""
    return first_reason((
        (0 in sizes, "a dimension is 0"),
        (dtype not in NATIVE, f"mlx-cuda's kernels compute {', '.join(NATIVE)}, not {dtype}"),
    ))  # fmt: skip


@cache
def dtype_name(dtype: mx.Dtype) -> str:
    """Return ``"float16"`` for ``mlx.core.float16``."""
    return str(dtype).rpartition(".")[2]


def sm(capability: tuple[int, int]) -> str:
    """Return a name such as sm_90."""
    return "sm_" + "".join(map(str, capability))
