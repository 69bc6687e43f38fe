"""Captures of steps: what they rest on in MLX is tried first, what fails consumes nothing, and MLX keeps no graph of them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm.models import decoding_of

from .decoding_checks import PROMPT, TOLERANCE, as_it_is, fresh, make, replayed, run, words
from .support import host, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_buckets")]


@pytest.fixture
def module() -> Iterator[Any]:
    module: Any = native.load()
    yield module
    for where in ("internals", "commit", "memory"):  # what did not come to pass
        module.inject_fault(where, -2)


def test_mlx_is_inside_what_captures_take_it_for(module: Any) -> None:
    refusals = [module.capture_refusal(mx.default_stream(mx.gpu)), module.capture_refusal(mx.new_stream(mx.gpu))]

    def ask() -> None:
        with mx.stream(mx.new_stream(mx.gpu)):
            refusals.append(module.capture_refusal(mx.default_stream(mx.gpu)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert refusals == ["", "", ""]


PROGRAM = """
import sys, warnings
import mlx.core as mx, mlx_cuda, numpy as np
from mlx_cuda._loader import native
from tests.gpu.decoding_checks import as_it_is, fresh, make, replayed, run, words
from tests.gpu.support import host, relative_error

def checked(model, tokens, expected, step):
    error = relative_error(run(model, fresh(model), tokens, step), expected)
    assert error < 5e-3, error
"""


def run_program(program: str, *arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2], env=os.environ | environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


REFUSED = """
rng = np.random.default_rng(0)
model, tokens = make(rng, mx.float32), words(rng, 1, 30)
expected = host(run(model, fresh(model), tokens, as_it_is(model)))
native.load().inject_fault("internals", -1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        run(model, fresh(model), tokens, replayed(model))
    except ValueError as error:
        print("raised:", error)
    with mlx_cuda.patch():
        for _ in range(3):
            checked(model, tokens, expected, as_it_is(model))
for each in caught:
    print("warned:", each.category.__name__, each.message)
print(mlx_cuda.explain(mlx_cuda.decode_step, model))
native.load().inject_fault("internals", -2)
other = make(rng, mx.float32)
checked(other, tokens, host(run(other, fresh(other), tokens, as_it_is(other))), replayed(other))
print(mlx_cuda.explain(mlx_cuda.decode_step, other).engine)
"""


def test_another_mlx_inside_turns_captures_off() -> None:
    said = run_program(REFUSED)
    assert re.search(r"raised: \[decode_step\] .*this build was made for: a test says so", said), said
    (warning,) = re.findall(r"warned: RuntimeWarning (.*(?:\n  fix: .*)?)", said)
    assert "a test says so" in warning
    assert "doctor" in warning
    assert said.count("a test says so") == 3, said  # and explain says so
    assert said.splitlines()[-1] == "replay"


# MLX writes each graph that it launches, and launches none of more than about a hundred nodes by itself.
LAUNCHED = """
rng = np.random.default_rng(0)
model, tokens = make(rng, mx.bfloat16, layers=60), words(rng, 1, 16)
run(model, fresh(model), tokens, replayed(model))
print(mlx_cuda.explain(mlx_cuda.decode_step, model).reason)
"""


def test_mlx_launches_no_graph_of_a_capture(tmp_path: Path) -> None:
    said = run_program(LAUNCHED, MLX_SAVE_CUDA_GRAPHS_DOT_FILE=str(tmp_path / "graph"))
    nodes = int(re.search(r"(\d+) nodes in one launch", said)[1])  # type: ignore[index]
    launched = [len(set(re.findall(r"graph_\d+_node_\d+", path.read_text("utf-8")))) for path in tmp_path.iterdir()]
    assert nodes > 250
    assert 20 < max(launched) < 200


@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_a_primitive_that_launches_kernels_is_not_captured(rng: np.random.Generator, module: Any, after: int) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 30)
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    cache = fresh(model)
    model(tokens[:, :PROMPT], cache=cache)
    module.inject_fault("commit", after)
    with pytest.raises(ValueError, match="launches kernels while it is captured"):
        mlx_cuda.decode_step(model, tokens[:, PROMPT : PROMPT + 1], cache)
    assert not module.inject_fault("commit", -2)
    logits = [mlx_cuda.decode_step(model, tokens[:, i : i + 1], cache) for i in range(PROMPT, 30)]  # with the same cache
    assert relative_error(mx.concatenate(logits, axis=1), expected) < TOLERANCE[mx.float32]
    assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "replay"


def test_the_model_goes_on_where_a_capture_is_refused(rng: np.random.Generator, module: Any) -> None:
    model, tokens = make(rng, mx.float32), words(rng, 1, 30)
    model_class: Any = type(model)
    assert model_class.__module__.startswith("mlx_lm.models.")
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    module.inject_fault("commit", 3)
    with mlx_cuda.patch():
        first = run(model, fresh(model), tokens, as_it_is(model))
        assert not module.inject_fault("commit", -2)
        again = run(model, fresh(model), tokens, as_it_is(model))
        assert decoding_of(model).replayed > 0
    for logits in (first, again):
        assert relative_error(logits, expected) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_capture_without_memory_consumes_nothing(rng: np.random.Generator, module: Any, after: int) -> None:
    """And leaves nothing of what was encoded to whatever comes next."""
    model, tokens = make(rng, mx.float32), words(rng, 1, 30)
    step = module.step(tokens[:, :1], 1, mx.default_stream(mx.gpu))
    x = step.tokens().astype(mx.float32)
    for _ in range(16):
        x = mlx_cuda.swiglu(x + 1, x)
    given = tokens[:, :1] + 0
    module.inject_fault("memory", after)
    with pytest.raises(module.CaptureError, match="no memory left"):
        step.record(mx.contiguous(x), given, [(0, 0, 1, 0)])
    assert not module.inject_fault("memory", -2)
    assert mx.array_equal(given, tokens[:, :1]).item()
    expected = host(run(model, fresh(model), tokens, as_it_is(model)))
    assert relative_error(run(model, fresh(model), tokens, replayed(model)), expected) < TOLERANCE[mx.float32]


def test_what_a_capture_raises(module: Any) -> None:
    """By its own type, through MLX's own module as well."""
    assert issubclass(module.CaptureError, RuntimeError)
    step = module.step(mx.zeros((1, 1), mx.int32), 1, mx.default_stream(mx.gpu))
    with pytest.raises(module.CaptureError, match="position on the CPU"):
        mx.eval(step.tokens() + 1)
    with pytest.raises(module.CaptureError, match="does not depend on the tokens"):
        step.record(mx.ones(3) * 2, mx.zeros((1, 1), mx.int32), [(0, 0, 1, 0)])
    with pytest.raises(module.CaptureError, match="random numbers"):
        step.record(step.tokens() + mx.random.randint(0, 3, (1, 1)), mx.zeros((1, 1), mx.int32), [(0, 0, 1, 0)])


@pytest.mark.parametrize(
    ("shape", "rows"),
    [  # the driver's copies in two dimensions take no pitch and no width of 2 GiB
        ((2, 2**28 + 24), None),
        ((1, 2, 2**20 + 8, 512), 2**20 + 8),
        ((1, 2, 2**20 + 8, 512), 5),
        ((3, 2, 40, 64), 17),
    ],
    ids=str,
)
def test_copies_to_a_cache_of_any_size(rng: np.random.Generator, module: Any, shape: tuple[int, ...], rows: int | None) -> None:
    if 16 * math.prod(shape) > mx.get_memory_limit() // 2:
        pytest.skip("needs more memory")
    mx.random.seed(int(rng.integers(2**31)))
    content, memory = mx.random.randint(1, 200, shape), mx.zeros(shape, mx.int32)
    mx.eval(content, memory)
    step = module.step(mx.zeros((1, 1), mx.int32), 1, mx.default_stream(mx.gpu))
    (filled,) = step.fill([content], [rows], [memory])
    there = slice(None) if rows is None else (slice(None), slice(None), slice(rows))
    assert mx.array_equal(filled[there], content[there]).item()
    if rows is not None:
        assert not mx.any(filled[:, :, rows:]).item()
    del filled, content, memory, step
    mx.clear_cache()
