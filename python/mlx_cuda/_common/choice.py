"""What the rules of all operations say, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
OLDEST_GPU = (8, 0)  # of cuDNN's fused attention, and of the tensor core instruction of our own kernels


class Gpu(NamedTuple):
    """Where a call runs, as far as rules ask: a GPU with a native module, MLX's CUDA backend alone, or (no capability) neither."""

    capability: tuple[int, int]
    absent: str = ""  # why there is no native module


@dataclass(frozen=True)
class Choice:
    """Who computes the call, and the rule that says so: what speaks for the engine, or against those before it."""

    engine: EngineName
    reason: str
    kernel: str = ""  # the device code's source and function, where a kernel of ours runs


def first_reason(rules: tuple[tuple[bool, str], ...]) -> str:
    """The reason of the first rule that applies, or none."""
    return next((reason for applies, reason in rules if applies), "")


def native_elementwise(dtype: str, sizes: tuple[int, ...]) -> bool:
    """Whether the native kernels take this dtype and these sizes."""
    return not against_native(dtype, sizes)


def against_native(dtype: str, sizes: tuple[int, ...]) -> str:
    """The first rule that speaks against that."""
    return first_reason((
        (0 in sizes, "a dimension is 0"),
        (dtype not in NATIVE, f"our kernels compute {', '.join(NATIVE)}, not {dtype}"),
    ))  # fmt: skip


def sm(capability: tuple[int, int]) -> str:
    """Such as sm_90."""
    return "sm_" + "".join(map(str, capability))
