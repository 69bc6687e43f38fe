"""Fixtures of the package's tests: with a GPU, too, those of what calls mean ask MLX's CPU kernels, and Python's rules each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from mlx_cuda import _native

from .products import products

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["forgetful", "on_the_cpu", "products"]


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """Everything without a stream of its own: MLX's CUDA kernels for quantised weights compile for a minute, and round otherwise."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is answered by the native module's memory of an equal one."""
    if mx.cuda.is_available():
        _native.load()  # which would bring it back
    monkeypatch.setattr(_native, "loaded", None)
