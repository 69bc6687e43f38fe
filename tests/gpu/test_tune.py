"""Algorithms that are timed on the GPU, kept, and used again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._loader import tuned_file as _tuned_file

from . import reference
from .support import DTYPES, TOLERANCE, assert_close, host, normal

pytestmark = pytest.mark.gpu


def check(rng: np.random.Generator, m: int, n: int, k: int, dtype: mx.Dtype = mx.bfloat16) -> None:
    x, w, bias = normal(rng, (m, k), dtype), normal(rng, (n, k), dtype, k**-0.5), normal(rng, (n,), dtype)
    result = mlx_cuda.linear(x, w, bias, activation="gelu_approx")
    assert_close(result, reference.linear(host(x), host(w), host(bias), "gelu_approx"), tolerance=TOLERANCE[dtype])


def found(tuning: mlx_cuda.Tuning, sizes: str) -> list[str]:
    return [key for key in tuning.matmuls if f": {sizes} " in key]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_right_while_tuning_and_after(rng: np.random.Generator, tmp_path: Path, dtype: mx.Dtype) -> None:
    sizes = [(512, 768, 256), (1, 640, 384), (33, 65, 40), (2048, 1024, 512)]
    with mlx_cuda.tune(path=tmp_path / "tuned.json") as tuning:
        for m, n, k in sizes:
            check(rng, m, n, k, dtype)
            check(rng, m, n, k, dtype)  # with what was found
        for m, n, k in sizes:
            for key in found(tuning, f"{m}x{n}x{k}"):
                matmul = tuning.matmuls[key]
                assert 0 < matmul.microseconds <= matmul.first_microseconds < np.inf
        assert found(tuning, "2048x1024x512")
    kept = _tuned_file.read(tmp_path / "tuned.json")
    assert kept
    assert set(kept) >= set(found(tuning, "2048x1024x512"))
    for m, n, k in sizes:
        check(rng, m, n, k, dtype)


def test_what_was_met_before_is_tuned_too(rng: np.random.Generator, tmp_path: Path) -> None:
    check(rng, 768, 512, 320)
    with mlx_cuda.tune(path=tmp_path / "tuned.json") as tuning:
        assert not found(tuning, "768x512x320")
        check(rng, 768, 512, 320)
        assert found(tuning, "768x512x320")
    with mlx_cuda.tune(path=tmp_path / "other.json"):
        pass
    check(rng, 768, 512, 328)
    assert not found(tuning, "768x512x328")


def test_gradients_are_tuned(rng: np.random.Generator, tmp_path: Path) -> None:
    x, w, bias = normal(rng, (320, 256), mx.bfloat16), normal(rng, (192, 256), mx.bfloat16, 0.06), normal(rng, (192,), mx.bfloat16)
    with mlx_cuda.tune(path=tmp_path / "tuned.json") as tuning:
        _, gradients = mx.vjp(lambda *p: mlx_cuda.linear(*p, activation="gelu_approx"), [x, w, bias], [mx.ones((320, 192), mx.bfloat16)])
        mx.eval(gradients)
        assert all(found(tuning, sizes) for sizes in ("320x192x256", "320x256x192", "192x256x320"))
    exact = reference.linear_vjp(host(x), host(w), host(bias), "gelu_approx", np.ones((320, 192)))
    for gradient, one in zip(gradients, exact, strict=True):
        assert_close(gradient, one, tolerance=2 * TOLERANCE[mx.bfloat16])


def test_fp8_is_tuned(rng: np.random.Generator, tmp_path: Path) -> None:
    if _native.capability(mx.Device(mx.gpu, 0)) < (8, 9):
        pytest.skip("FP8 matmuls need sm_89")
    module: Any = _native.load()
    gpu = mx.default_stream(mx.Device(mx.gpu, 0))
    a, b = (mx.to_fp8(normal(rng, (size, 512), mx.float32)) for size in (256, 384))
    with mlx_cuda.tune(path=tmp_path / "tuned.json") as tuning:
        result = module.fp8_matmul(a, b, None, None, None, mx.bfloat16, gpu)
        exact = host(mx.from_fp8(a, mx.float32)) @ host(mx.from_fp8(b, mx.float32)).T
        assert_close(result, exact, tolerance=TOLERANCE[mx.bfloat16])
        assert found(tuning, "256x384x512")


PROGRAM = """
import sys
import mlx.core as mx
import mlx_cuda
x, w = mx.random.normal((512, 256)).astype(mx.bfloat16), mx.random.normal((640, 256)).astype(mx.bfloat16)
got, exact = mlx_cuda.linear(x, w).astype(mx.float32), x.astype(mx.float32) @ w.astype(mx.float32).T
assert (mx.linalg.norm(got - exact) / mx.linalg.norm(exact)).item() < 8e-3
print(len(mlx_cuda._loader.native.load().tuned()))
"""


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setenv("MLX_CUDA_TUNED", str(path))
    process = subprocess.run([sys.executable, *options], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_new_process_uses_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    shown = run(path, monkeypatch, "-m", "mlx_cuda", "tune", "512x640x256")
    assert ": 512x640x256 " in shown
    assert run(path, monkeypatch, "-m", "mlx_cuda", "tune", "--show").startswith(shown)
    assert run(path, monkeypatch, "-W", "error", "-c", PROGRAM) == "1\n"
    # An algorithm that is none for this matmul is not used: cuBLASLt looks at it first.
    content = json.loads(path.read_text())
    for matmul in content["matmuls"].values():
        matmul["algorithm"] = "f" * 128
    path.write_text(json.dumps(content))
    assert run(path, monkeypatch, "-W", "error", "-c", PROGRAM) == "1\n"
    path.write_text("something else")
    assert run(path, monkeypatch, "-c", PROGRAM) == "0\n"
    assert path.read_text() == "something else"
