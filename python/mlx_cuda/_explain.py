"""Who computes a call, and why, for all operations."""

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
RETIRED = {"mlx": "upstream", "fallback": "composed"}  # what engines were called before 0.32.4.1


class _Engine(str):
    """The name of an engine, which for one release also equals the name that it had."""

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
    """Which engine an operation would use for these arguments, and why.

    Args:
        *arguments: The operation and its arguments, ``explain(mlx_cuda.quantized_matmul, x, w, scales, biases)``; with arrays alone,
            the operation is :func:`attention`. Of :func:`decode_step` the model alone: ``explain(mlx_cuda.decode_step, model)``.
        **options: Its keyword arguments.

    Returns:
        ``engine`` names it and ``reason`` the rule: what speaks for the engine, or against those that come before it. Engines of attention:
        ``"decode"`` (our kernel for few queries), ``"cudnn"``, ``"flash"`` (our kernel for many). Of products: ``"skinny"`` (our kernels
        for few rows), ``"small"`` (MLX's kernel for one row, where that takes the layouts, else ours), ``"dequantize"`` (tiles of the
        weights, for a dense product), ``"grouped"`` (our kernel for experts), ``"cublaslt"``. Of :func:`swiglu`, :func:`quantize_fp8` and
        :func:`paged_cache_update`: ``"fused"`` (our kernel).
        Of linear attention: ``"recurrent"`` (our kernels that go from token to token) and ``"chunked"`` (those for prompts); of the
        convolution before it ``"direct"``. Of sums over GPUs: ``"peers"`` (our kernel, where they reach each other's memory). Of all:
        ``"mlx"`` (MLX's own function) and ``"fallback"`` (MLX's operations). Of decoding steps: ``"replay"`` (recorded, ``kernel``
        says what they are made of) and ``"mlx"`` (the model as it is). Elsewhere ``kernel`` names the source and the kernel of ours,
        as the arrays lie now, where the native module can tell; it is empty where a library or MLX computes the call.

    Raises:
        ValueError, TypeError: As the operation; and for a function that has no choice.
    """
    if not arguments or not callable(arguments[0]):
        arguments = (attention, *arguments)
    operation, *rest = arguments
    if operation not in EXPLAINED:
        known = ", ".join(f"mlx_cuda.{known.__name__}" for known in EXPLAINED)
        raise ValueError(f"[explain] The operation must be one of {known}, got {getattr(operation, '__name__', operation)}.")
    call: Call[Any] = operation.prepare(*rest, **options)
    return replace(call.choice, engine=cast("EngineName", _Engine(call.choice.engine)), kernel=call.kernel())
