"""Fixtures of the GPU tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._common import limits
from mlx_cuda._common.choice import OLDEST_GPU, sm
from mlx_cuda._loader import native as _native

from ..conftest import handed_on
from .cached_calls import watched
from .decoding_checks import small_buckets

__all__ = ["rng", "small_buckets", "watched"]


@pytest.fixture(scope="session", autouse=True)
def _part_of_the_memory() -> None:
    """Workers of xdist share the GPU: all that they keep for their next calls is a quarter of its memory."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and mx.cuda.is_available():
        mx.set_cache_limit(mx.get_memory_limit() // 4 // workers)


@pytest.fixture(autouse=True)
def _compiled_for_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, as workers share out the tests of a file. MLX looks for a kernel's code, and then for the names in it."""
    yield from handed_on(request.config, "*/ptx/*.txt", "*/ptx/*.ptx")


@pytest.fixture(autouse=True)
def _on_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not mx.cuda.is_available():
        # not skipped, so the environment says that there has to be one
        pytest.fail("MLX_CUDA_REQUIRE_GPU=1 is set, but MLX sees no CUDA device")


@pytest.fixture(autouse=True)
def _on_this_gpu(request: pytest.FixtureRequest) -> None:
    """Most tests are of kernels that older GPUs have not."""
    older = mx.cuda.is_available() and _native.capability(mx.Device(mx.gpu, 0)) < OLDEST_GPU
    if older and not request.node.get_closest_marker("older_gpus"):
        pytest.skip(f"needs {sm(OLDEST_GPU)}")


@pytest.fixture(scope="session", autouse=True)
def _limits_of_the_family() -> None:
    """Whatever was measured on this machine."""
    if mx.cuda.is_available():
        _native.load()
        limits.put(_native.capability(mx.Device(mx.gpu, 0)), None)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name alone, whichever other tests run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
