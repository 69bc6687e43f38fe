"""What all tests share: GPU tests are skipped, and say why, where MLX sees no GPU; hypothesis is repeatable and without deadlines."""

from __future__ import annotations

import os

import hypothesis
import pytest

pytest.register_assert_rewrite(f"{__package__}.gpu.support")  # tests of the package share it, and may be collected first

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("repeatable")


def _why_no_gpu() -> str:
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"mlx.core cannot be imported: {error}"
    return "" if mx.cuda.is_available() else "MLX sees no CUDA GPU (with one: pip install 'mlx-cuda[cu13]')"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, unless MLX_CUDA_REQUIRE_GPU=1 says that there has to be one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("MLX_CUDA_REQUIRE_GPU") == "1":
        return
    if reason := _why_no_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
