"""``calibrate`` on the GPU: what it measures is in force, kept, and used by the next process; results stay right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._common import limits as known
from mlx_cuda._loader import native as _native
from mlx_cuda._loader.environment import CAPABILITY
from mlx_cuda._tuning.calibrate import COMPILING
from mlx_cuda._tuning.rules import rules

from . import quantized_cases as cases
from .formats import Form
from .support import TOLERANCE, assert_close, host, normal, primitives

pytestmark = pytest.mark.gpu

NEXT = """\
import json, mlx.core as mx
from mlx_cuda._common import limits
from mlx_cuda._loader import native
native.load()
found = limits.limits(native.capability(mx.Device(mx.gpu, 0)))
print(json.dumps([found.source, limits.as_json(found)]))
"""


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    known.put(_native.capability(mx.Device(mx.gpu, 0)), None)


@pytest.mark.skipif(bool(os.environ.get(CAPABILITY)), reason="the GPU takes itself for another one, which is not measured")
def test_what_is_measured_holds(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CUDA_TUNED", str(tmp_path / "tuned.json"))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = mlx_cuda.calibrate(seconds=COMPILING - 1)
    assert mx.get_peak_memory() - before < 2 * 2**30
    until = time.monotonic() + 10  # MLX lets go of what has run in a thread of its own
    while mx.get_active_memory() - before >= 64 * 2**20 and time.monotonic() < until:
        time.sleep(0.1)
    assert mx.get_active_memory() - before < 64 * 2**20
    assert {rule.name for rule in rules() if rule.compiles} <= set(found.unmeasured)
    assert "attention: growing" not in found.unmeasured
    assert known.limits(_native.capability(mx.Device(mx.gpu, 0))) is found.limits
    assert all(each.gain > 1 for each in found.changes)
    printed = subprocess.run([sys.executable, "-c", NEXT], capture_output=True, text=True, check=True).stdout
    source, content = json.loads(printed.splitlines()[-1])
    assert source == f"measured here on {found.gpu}"
    assert content == known.as_json(found.limits)
    form = Form("affine", 4, 64)
    weights = cases.draw(rng, (512, 1024), form, mx.bfloat16)
    for rows in 1, 20, 100, 700:
        x = normal(rng, (rows, 1024), mx.bfloat16)
        result = mlx_cuda.quantized_matmul(x, *weights.arrays, **weights.options)
        assert_close(result, cases.matmul(host(x), weights, transpose=True), tolerance=2 * TOLERANCE[mx.bfloat16])


def test_calls_that_are_kept_are_forgotten(rng: np.random.Generator) -> None:
    """Their graphs are those of the engine that was chosen before."""
    gpu = _native.capability(mx.Device(mx.gpu, 0))
    x, w = normal(rng, (8, 1024), mx.bfloat16), mx.quantize(normal(rng, (256, 1024), mx.bfloat16))
    names = []
    for rows in (512, 4, 512):
        of = known.limits(gpu)
        known.put(gpu, of._replace(matmul={kind: each._replace(half_precision=rows) for kind, each in of.matmul.items()}))
        for _ in range(3):
            result = mlx_cuda.quantized_matmul(x, *w)
            names.append("DequantizeThenGemm" in primitives(result))
            mx.eval(result)
    assert names == [False] * 3 + [True] * 3 + [False] * 3
