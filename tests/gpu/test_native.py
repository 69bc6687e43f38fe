"""The native module as a whole: loaded, fused, sound on any stream and thread, and without leaks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import mlx_cuda
import mlx_cuda._loader.native
import numpy as np
import pytest

from . import reference
from .support import TOLERANCE, assert_close, host, normal, primitives

pytestmark = pytest.mark.gpu

OPERATIONS: dict[str, tuple[Callable[..., mx.array], Callable[..., reference.Array], list[tuple[int, ...]]]] = {
    "Linear": (
        lambda x, w, b, **options: mlx_cuda.linear(x, w, b, activation="gelu_approx", **options),
        lambda x, w, b: reference.linear(x, w, b, "gelu_approx"),
        [(96, 64), (80, 64), (80,)],
    ),
    "Attention": (
        lambda q, k, v, **options: mlx_cuda.attention(q, k, v, mask="causal", **options),
        lambda q, k, v: reference.attention(q, k, v, scale=0.125, causal=True),
        [(2, 4, 96, 64), (2, 2, 96, 64), (2, 2, 96, 64)],
    ),
    "SwiGLU": (mlx_cuda.swiglu, reference.swiglu, [(96, 130), (96, 130)]),
}

# Memory of the last call may be counted a moment longer; every result here is larger than a tenth of this.
SLACK = 100_000

operations = pytest.mark.parametrize("name", OPERATIONS)


def arrays(rng: np.random.Generator, name: str) -> list[mx.array]:
    return [normal(rng, shape, mx.float16, 0.5) for shape in OPERATIONS[name][2]]


def check(result: mx.array, name: str, inputs: list[mx.array]) -> None:
    assert_close(result, OPERATIONS[name][1](*map(host, inputs)), tolerance=2 * TOLERANCE[mx.float16])


def test_the_native_module_of_the_installed_backend_is_loaded() -> None:
    module = mlx_cuda._loader.native.load()
    assert not isinstance(module, Exception), module
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    major = "12" if "mlx-cuda-12" in installed else "13"
    assert module.__name__ == f"mlx_cuda._cu{major}"  # type: ignore[attr-defined]
    assert module.build_info()["package"] == f"mlx-cuda=={mlx_cuda.__version__}"
    assert module.build_info()["mlx"] == metadata.version("mlx")
    assert str(module.build_info()["cuda"]).split(".")[0] == major
    versions = module.library_versions()
    assert str(versions["cublaslt"]).split(".")[0] == major
    assert str(versions["cudnn"]).split(".")[0] == "9"


def test_it_is_the_installed_package() -> None:
    """Tests that import a source tree prove nothing about the wheel."""
    package = Path(mlx_cuda.__file__).parent
    assert Path(str(metadata.distribution("mlx-cuda").locate_file("mlx_cuda"))).resolve() == package.resolve()


@operations
def test_dispatch_is_fused(rng: np.random.Generator, name: str) -> None:
    assert primitives(OPERATIONS[name][0](*arrays(rng, name))) == {name}


@operations
def test_cpu_stream(rng: np.random.Generator, name: str) -> None:
    inputs = arrays(rng, name)
    for stream in mx.cpu, mx.new_stream(mx.cpu):
        result = OPERATIONS[name][0](*inputs, stream=stream)
        assert name not in primitives(result)
        check(result, name, inputs)


@operations
def test_streams(rng: np.random.Generator, name: str) -> None:
    """Work on several streams, each result the input of work on the next one."""
    operation, exact, _ = OPERATIONS[name]
    streams = [mx.new_stream(mx.gpu) for _ in range(3)]
    sets = [arrays(rng, name) for _ in range(6)]
    results = [operation(*inputs, stream=streams[i % 3]) for i, inputs in enumerate(sets)]
    sums = [mx.add(result, result, stream=streams[(i + 1) % 3]) for i, result in enumerate(results)]
    mx.eval(sums)
    for twice, inputs in zip(sums, sets, strict=True):
        assert_close(twice, 2 * exact(*map(host, inputs)), tolerance=2 * TOLERANCE[mx.float16])
    with mx.stream(streams[1]):
        check(operation(*sets[0]), name, sets[0])


@operations
def test_inputs_computed_in_the_same_graph(rng: np.random.Generator, name: str) -> None:
    """Inputs that are written just before, and overwritten memory just after, in one evaluation."""
    operation, exact, _ = OPERATIONS[name]
    inputs = arrays(rng, name)
    results = [operation(*((a * 2 - a) for a in inputs)) for _ in range(30)]
    total = results[0]
    for result in results[1:]:
        total = mx.maximum(total, result)
    assert_close(total, exact(*map(host, inputs)), tolerance=2 * TOLERANCE[mx.float16])


def growth(function: Callable[[], object], times: int) -> int:
    """Bytes of memory that so many calls leave, beyond what a few have."""

    def after(times: int) -> int:
        for _ in range(times):
            mx.eval(function())
        mx.synchronize()
        return mx.get_active_memory()

    before = after(5)
    return after(times) - before


@operations
def test_memory_does_not_grow(rng: np.random.Generator, name: str) -> None:
    operation, inputs = OPERATIONS[name][0], arrays(rng, name)
    assert growth(lambda: operation(*inputs), 200) < SLACK


@operations
def test_gradients_free_their_memory(rng: np.random.Generator, name: str) -> None:
    operation, inputs = OPERATIONS[name][0], arrays(rng, name)
    gradient = mx.grad(lambda *primals: operation(*primals).sum(), argnums=list(range(len(inputs))))
    assert growth(lambda: gradient(*inputs), 50) < SLACK


# Runs in a process of its own, because the settings are read once, and so that a crash is one failed test.
PROGRAM = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import mlx.core as mx, mlx_cuda

def gelu(x):
    return 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x**3)))

def check(seed):
    with mx.stream(mx.new_stream(mx.gpu)):
        x, w, q, k, v = (mx.random.normal(shape, key=mx.random.key(10 * seed + i))
                         for i, shape in enumerate([(96, 64), (80, 64), *3 * [(2, 4, 96, 64)]]))
        q, k, v = (a.astype(mx.float16) for a in (q, k, v))
        for _ in range(10):
            pairs = [
                (mlx_cuda.linear(x, w, x[:80, 0], activation="relu"), mx.maximum(mx.addmm(x[:80, 0], x, w.T), 0)),
                (mlx_cuda.linear(x, w, activation="gelu_approx"), gelu(x @ w.T)),
                (mlx_cuda.attention(q, k, v, mask="causal", force_fused=True),
                 mx.fast.scaled_dot_product_attention(*(a.astype(mx.float32) for a in (q, k, v)), scale=0.125, mask="causal")),
                (mlx_cuda.swiglu(x, x + 1), x * mx.sigmoid(x) * (x + 1)),
            ]
            for ours, theirs in pairs:
                assert (mx.linalg.norm((ours - theirs).reshape(-1)) <= 5e-3 * mx.linalg.norm(theirs.reshape(-1))).item()

with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    list(pool.map(check, range(int(sys.argv[1]))))
route = mlx_cuda._loader.native.load().allocation_route(mx.default_stream(mx.gpu))
assert route == os.environ.get("MLX_CUDA_ALLOCATION", "mlx"), route
print("right")
"""


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({}, "1"),
        ({"MLX_USE_CUDA_GRAPHS": "0"}, "1"),
        ({}, "4"),
        ({"MLX_CUDA_ALLOCATION": "pool"}, "1"),
        ({"MLX_CUDA_EPILOGUE": "separate"}, "1"),
    ],
    ids=["one thread", "no CUDA graphs", "four threads", "the driver's memory pool", "no fused epilogues"],
)
def test_in_a_process_of_its_own(settings: dict[str, str], threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-W", "error", "-c", PROGRAM, threads]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "right\n"), process.stderr
