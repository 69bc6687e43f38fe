"""Fixtures of the GPU tests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _on_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not mx.cuda.is_available():
        # not skipped, so the environment says that there has to be one
        pytest.fail("MLX_CUDA_REQUIRE_GPU=1 is set, but MLX sees no CUDA device")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name alone, whichever other tests run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
