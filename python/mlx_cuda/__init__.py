"""CUDA kernels for MLX on NVIDIA GPUs.

Attention (:func:`attention`, :func:`attention_varlen`, :func:`paged_attention`, :func:`paged_cache_update`, :func:`quantized_attention`),
matmul (:func:`linear`, :func:`quantized_matmul`, :func:`gather_mm`, :func:`gather_qmm`, :func:`grouped_matmul`, :func:`fp8_matmul`,
:func:`quantize_fp8`, :func:`swiglu`), linear attention (:func:`gated_delta`, :func:`ssd`, :func:`short_conv`) and all-reduce
(:func:`all_sum`). ``mlx_cuda.nn`` has layers.

:func:`patch` replaces MLX's functions with these, :func:`explain` returns the engine of a call, :func:`tune` and :func:`calibrate` measure
the fastest algorithms and thresholds, and :func:`check` compares a model with and without :func:`patch`.

Importing the package needs no GPU, driver or MLX backend. The first use of an operation imports ``mlx.core`` and raises
:class:`BackendError`, with a fix, if that fails. ``python -m mlx_cuda doctor`` checks an installation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._common.errors import BackendError
from ._version import __version__

if TYPE_CHECKING:
    from . import nn
    from ._all_sum import all_sum
    from ._attention.attention import attention
    from ._attention.paged import paged_attention, paged_cache_update
    from ._attention.quantized import quantized_attention
    from ._attention.varlen import attention_varlen
    from ._check.check import check
    from ._check.forms import ModelCheck
    from ._common.choice import Choice
    from ._decode_step import decode_step
    from ._explain import explain
    from ._matmul.fp8 import fp8_matmul, quantize_fp8
    from ._matmul.gather import gather_mm, gather_qmm
    from ._matmul.grouped import grouped_matmul
    from ._matmul.linear import linear
    from ._matmul.quantized import quantized_matmul
    from ._patch import Patched, patch, unpatch
    from ._recurrence.gated_delta import gated_delta
    from ._recurrence.short_conv import short_conv
    from ._recurrence.ssd import ssd
    from ._swiglu import swiglu
    from ._tuning.calibrate import Calibration, calibrate
    from ._tuning.tune import Tuning, tune

__all__ = [
    "BackendError", "Calibration", "Choice", "ModelCheck", "Patched", "Tuning", "__version__", "all_sum", "attention", "attention_varlen",
    "calibrate", "check", "decode_step", "explain", "fp8_matmul", "gated_delta", "gather_mm", "gather_qmm", "grouped_matmul", "linear",
    "nn", "paged_attention", "paged_cache_update", "patch", "quantize_fp8", "quantized_attention", "quantized_matmul", "short_conv",
    "ssd", "swiglu", "tune", "unpatch",
]  # fmt: skip

_MODULES = {
    "Calibration": "_tuning.calibrate",
    "Choice": "_common.choice",
    "ModelCheck": "_check.forms",
    "Patched": "_patch",
    "Tuning": "_tuning.tune",
    "all_sum": "_all_sum",
    "attention": "_attention.attention",
    "attention_varlen": "_attention.varlen",
    "calibrate": "_tuning.calibrate",
    "check": "_check.check",
    "decode_step": "_decode_step",
    "explain": "_explain",
    "fp8_matmul": "_matmul.fp8",
    "gated_delta": "_recurrence.gated_delta",
    "gather_mm": "_matmul.gather",
    "gather_qmm": "_matmul.gather",
    "grouped_matmul": "_matmul.grouped",
    "linear": "_matmul.linear",
    "nn": "nn",
    "paged_attention": "_attention.paged",
    "paged_cache_update": "_attention.paged",
    "patch": "_patch",
    "quantize_fp8": "_matmul.fp8",
    "quantized_attention": "_attention.quantized",
    "quantized_matmul": "_matmul.quantized",
    "short_conv": "_recurrence.short_conv",
    "ssd": "_recurrence.ssd",
    "swiglu": "_swiglu",
    "tune": "_tuning.tune",
    "unpatch": "_patch",
}


def _find(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        from ._loader.checks import explain
        from ._loader.environment import take

        raise explain(error, take(ask_driver=True)) from error
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return globals()[name]


if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted(__all__)
