"""CUDA kernels for MLX on NVIDIA GPUs: :func:`linear`, :func:`attention` (:func:`attention_varlen`, :func:`paged_attention`,
:func:`paged_cache_update`), :func:`swiglu`.

:func:`patch` puts them in place of MLX's own, :func:`explain` says which engine a call of ``attention`` would use.

Importing the package needs neither a GPU nor a driver nor an MLX backend; the first use of an operation imports ``mlx.core`` and raises
:class:`BackendError`, with the cure, where that cannot be imported. ``python -m mlx_cuda doctor`` checks an installation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._errors import BackendError
from ._version import __version__

if TYPE_CHECKING:
    from ._attention import attention, explain
    from ._linear import linear
    from ._paged import paged_attention, paged_cache_update
    from ._patch import patch, unpatch
    from ._swiglu import swiglu
    from ._varlen import attention_varlen

__all__ = [
    "BackendError",
    "__version__",
    "attention",
    "attention_varlen",
    "explain",
    "linear",
    "paged_attention",
    "paged_cache_update",
    "patch",
    "swiglu",
    "unpatch",
]

_MODULES = {
    "attention": "_attention",
    "attention_varlen": "_varlen",
    "explain": "_attention",
    "linear": "_linear",
    "paged_attention": "_paged",
    "paged_cache_update": "_paged",
    "patch": "_patch",
    "swiglu": "_swiglu",
    "unpatch": "_patch",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        from . import _checks, _environment

        raise _checks.explain(error, _environment.take(ask_driver=True)) from error
    operation = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = operation
    return operation


def __dir__() -> list[str]:
    return sorted(__all__)
