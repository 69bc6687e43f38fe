"""Who computes a call, and why, for all operations that have a choice."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

from . import _all_sum, _decode_step
from ._attention.attention import attention
from ._attention.paged import paged_attention
from ._attention.quantized import quantized_attention
from ._attention.varlen import attention_varlen
from ._matmul.fp8 import fp8_matmul
from ._matmul.gather import gather_mm, gather_qmm
from ._matmul.grouped import grouped_matmul
from ._matmul.linear import linear
from ._matmul.quantized import quantized_matmul
from ._recurrence.gated_delta import gated_delta
from ._recurrence.short_conv import short_conv
from ._recurrence.ssd import ssd
from ._swiglu import swiglu

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from ._common.choice import Choice, EngineName

OPERATIONS: tuple[Any, ...] = (
    attention, attention_varlen, paged_attention, quantized_attention, linear, swiglu, quantized_matmul, gather_mm, gather_qmm,
    grouped_matmul, fp8_matmul, gated_delta, ssd, short_conv,
)  # fmt: skip


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


def _prepared(operation: Any, *arguments: Any, **options: Any) -> Choice:
    call = operation.prepare(*arguments, **options)
    found: Choice = replace(call.choice, kernel=call.kernel())
    return found


RULES: dict[Callable[..., Any], Callable[..., Choice]] = {
    **{operation: partial(_prepared, operation) for operation in OPERATIONS},
    _decode_step.decode_step: _decode_step.explain,
    _all_sum.all_sum: _all_sum.explain,
}


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
        ``engine`` names it and ``reason`` the rule for it, or against the engines that come before it.
        Engines of attention: ``"decode"`` (our kernel for few queries), ``"cudnn"``, ``"flash"`` (our kernel for many). Of products:
        ``"skinny"`` (our kernels for few rows), ``"small"`` (MLX's kernel for one row, where that takes the layouts, else ours),
        ``"dequantize"`` (tiles of the weights, for a dense product), ``"grouped"`` (our kernel for experts), ``"cublaslt"``.
        Of :func:`swiglu`: ``"fused"`` (our kernel).
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
    if operation not in RULES:
        known = ", ".join(f"mlx_cuda.{known.__name__}" for known in RULES)
        raise ValueError(f"[explain] The operation must be one of {known}, got {getattr(operation, '__name__', operation)}.")
    choice = RULES[operation](*rest, **options)
    return replace(choice, engine=cast("EngineName", _Engine(choice.engine)))
