"""``mlx_cuda.check`` on a GPU: a small model passes, its decode steps are captured, and what it says of itself is so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx_cuda
import pytest
from mlx_cuda._check import show

from .mlx_lm_parts import GROUP, SIZES, make_model, write_folder

if importlib.util.find_spec("mlx_lm") is None or importlib.util.find_spec("tokenizers") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

LONG: dict[str, Any] = {"vocab_size": 2048, "max_position_embeddings": 4096}


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_small_model(tmp_path: Path, bits: int | None) -> None:
    packed = {"quantization": {"group_size": GROUP, "bits": bits}} if bits else {}
    write_folder(tmp_path, make_model(3, bits, **LONG), {**SIZES, **LONG, **packed})
    found = mlx_cuda.check(tmp_path, quick=True)
    shown = show.render(found)
    assert found.ok, shown
    assert "kernels" not in {row.name for row in found.rows}, shown
    assert not [row for row in found.rows if row.float32 is None and row.name.startswith("perplexity")], shown
    cached = next(row for row in found.rows if row.name == "perplexity, 8-bit KV cache")
    assert cached.status == "ok", shown  # also where MLX has no kernel for such keys
    steps = {each["where"]: each for each in found.steps}
    assert set(steps) == {"one request", "8-bit KV cache", "8 requests at once"}
    assert all(each["replayed"] > 0.7 * each["taken"] for each in steps.values()), shown
    assert any(each["ours"] for each in found.calls), shown


def test_it_leaves_this_process_alone(tmp_path: Path) -> None:
    import mlx.core as mx

    write_folder(tmp_path, make_model(3), SIZES)
    before, memory = mx.quantized_matmul, mx.get_active_memory()
    mlx_cuda.check(tmp_path, quick=True)
    assert mx.quantized_matmul is before
    assert mx.get_active_memory() <= memory
