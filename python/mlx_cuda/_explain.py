"""The engine of a call and the reason, for all operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, overload

import mlx.core as mx

from ._attention.attention import attention
from ._common.choice import Choice, EngineName
from ._decode_step import decode_step
from ._operation import Call
from ._operations import OPERATIONS

EXPLAINED = (*OPERATIONS.values(), decode_step)
RETIRED = {"mlx": "upstream", "fallback": "composed", "small_m": "skinny", "gemv": "small"}  # what engines were called before 0.32.4.1


class _Engine(str):
    """The name of an engine, which for one release also equals its former name."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if former := isinstance(other, str) and str(other) == RETIRED.get(str(self)):
            warnings.warn(f'explain() calls the engine "{self}", no longer "{other}"', DeprecationWarning, stacklevel=2)
        return former or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


@overload
def explain(*arrays: mx.array, **options: Any) -> Choice: ...


@overload
def explain(operation: Callable[..., Any], /, *arguments: Any, **options: Any) -> Choice: ...


def explain(*arguments: Any, **options: Any) -> Choice:
    """Return the engine that an operation would use for these arguments, and why.

    Args:
        *arguments: The operation and its arguments, such as ``explain(mlx_cuda.quantized_matmul, x, w, scales, biases)``. Without an
            operation, it is :func:`attention`. For :func:`decode_step`, only the model: ``explain(mlx_cuda.decode_step, model)``.
        **options: The operation's keyword arguments.

    Returns:
        A :class:`Choice`: ``engine`` is its name, ``reason`` the rule that selected it, or excluded the engines before it, and ``kernel``
        the source and name of the CUDA kernel, or empty if a library or MLX computes the call.

        Attention: ``"decode"`` (split-KV kernel for few queries), ``"cudnn"``, ``"flash"`` (FlashAttention kernels for many). GEMMs:
        ``"small_m"`` (small-M GEMM), ``"gemv"`` (MLX's kernel for M = 1, or mlx-cuda's for layouts that it does not support),
        ``"dequantize"`` (dequantized tiles and a dense GEMM), ``"grouped"`` (MoE GEMM), ``"cublaslt"``. :func:`swiglu`,
        :func:`quantize_fp8` and :func:`paged_cache_update`: ``"fused"``. Linear attention: ``"recurrent"`` (token by token),
        ``"chunked"`` (prefill), ``"direct"`` (short convolution). All-reduce: ``"peers"`` (peer memory). Decode steps: ``"replay"``
        (captured; ``kernel`` lists its primitives) and ``"mlx"`` (the model runs eagerly). All: ``"mlx"`` (MLX's function) and
        ``"fallback"`` (MLX's operations).

    Raises:
        ValueError: The first argument is a function that is not an operation of mlx_cuda, or the operation raises it.
        TypeError: The operation raises it.
    """
    if not arguments or not callable(arguments[0]):
        arguments = (attention, *arguments)
    operation, *rest = arguments
    if operation not in EXPLAINED:
        known = ", ".join(f"mlx_cuda.{known.__name__}" for known in EXPLAINED)
        raise ValueError(f"[explain] The operation must be one of {known}, got {getattr(operation, '__name__', operation)}.")
    call: Call[Any] = operation.prepare(*rest, **options)
    return replace(call.choice, engine=cast("EngineName", _Engine(call.choice.engine)), kernel=call.kernel())
