"""Who computes a call, and why, for all operations that have a choice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from . import _all_sum, _decode_step
from ._attention import attention as _attention
from ._attention import quantized as _quantized_attention
from ._matmul.fp8 import fp8_matmul
from ._matmul.gather import gather_mm, gather_qmm
from ._matmul.grouped import grouped_matmul
from ._matmul.quantized import quantized_matmul
from ._recurrence import gated_delta as _gated_delta
from ._recurrence import short_conv as _short_conv
from ._recurrence import ssd as _ssd

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from ._common.choice import Choice
    from ._matmul.call import Call, Product


PRODUCTS: tuple[Product[..., Call], ...] = (quantized_matmul, gather_mm, gather_qmm, grouped_matmul, fp8_matmul)


def _product(operation: Product[..., Call], *arguments: Any, **options: Any) -> Choice:
    call = operation.prepare(*arguments, **options)
    return replace(call.choice, kernel=call.kernel())


RULES: dict[Callable[..., Any], Callable[..., Choice]] = {
    _attention.attention: _attention.explain,
    _quantized_attention.quantized_attention: _quantized_attention.explain,
    _decode_step.decode_step: _decode_step.explain,
    _gated_delta.gated_delta: _gated_delta.explain,
    _ssd.ssd: _ssd.explain,
    _short_conv.short_conv: _short_conv.explain,
    **{operation: partial(_product, operation) for operation in PRODUCTS},
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
        ``engine`` names it and ``reason`` the rule: what speaks for the engine, or against those that come before it. Engines of attention:
        ``"decode"`` (our kernel for few queries), ``"cudnn"``, ``"flash"`` (our kernel for many). Of products: ``"skinny"`` (our kernels
        for few rows), ``"small"`` (MLX's kernel for one row, where that takes the layouts, else ours), ``"dequantize"`` (tiles of the
        weights, for a dense product), ``"grouped"`` (our kernel for experts), ``"cublaslt"``. Of linear attention: ``"recurrent"`` (our
        kernels that go from token to token) and ``"chunked"`` (those for prompts); of the convolution before it ``"direct"``. Of sums over
        GPUs: ``"peers"`` (our kernel, where they reach each other's memory). Of all: ``"upstream"`` (MLX's own function) and ``"composed"``
        (MLX's operations). Of decoding steps: ``"replay"`` (recorded, ``kernel`` says what they are made of) and ``"upstream"`` (the model
        as it is). Elsewhere ``kernel`` names the source and the kernel of ours, as the arrays lie now, where the native module can tell; it
        is empty where a library or MLX computes the call.

    Raises:
        ValueError, TypeError: As the operation; and for a function that has no choice.
    """
    if not arguments or not callable(arguments[0]):
        return _attention.explain(*arguments, **options)
    operation, *rest = arguments
    if operation not in RULES:
        known = ", ".join(f"mlx_cuda.{known.__name__}" for known in RULES)
        raise ValueError(f"[explain] The operation must be one of {known}, got {getattr(operation, '__name__', operation)}.")
    return RULES[operation](*rest, **options)
