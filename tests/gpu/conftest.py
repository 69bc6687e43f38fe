"""Without a GPU these tests are collected and skipped.

With MLX_CUDA_REQUIRE_GPU=1 they fail instead, so that a GPU machine whose MLX does not see its GPU cannot pass by skipping.
"""

from __future__ import annotations

import os

import mlx.core as mx
import numpy as np
import pytest

pytest.register_assert_rewrite(f"{__package__}.support")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if mx.cuda.is_available() or os.environ.get("MLX_CUDA_REQUIRE_GPU") == "1":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA backend of MLX: pip install 'mlx-cuda[cu13]'")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _on_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not mx.cuda.is_available():
        pytest.fail("MLX_CUDA_REQUIRE_GPU=1 is set, but MLX sees no CUDA device")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name alone, whichever other tests run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
