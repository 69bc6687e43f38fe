"""What cannot be computed as it was chosen when it is evaluated: kernels, plans and algorithms that are not there, and full memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._common import limits
from mlx_cuda._loader import native as _native

from . import operations
from .support import normal, relative_error

pytestmark = pytest.mark.gpu


SIZES = itertools.count(240, 8)  # of queries and keys: cuDNN is asked for each plan once


def inject(where: str, after: int) -> bool:
    """Returns whether such a fault was still waiting."""
    assert _native.loaded is not None
    return _native.loaded.inject_fault(where, after)


def call_of(rng: np.random.Generator, name: str) -> tuple[str, Callable[[], mx.array]]:
    """What may fail, and a call of an engine."""
    where, make = operations.OPERATIONS[name]
    if where == "cudnn":
        size = next(SIZES)
        return where, operations.attention(rng, size, size, mask="causal")
    return where, make(rng)


@pytest.fixture(autouse=True)
def _fp8_needs_its_gpu(request: pytest.FixtureRequest) -> None:
    is_fp8 = "fp8" in request.node.name or "[codes]" in request.node.name
    if is_fp8 and _native.capability(mx.Device(mx.gpu, 0)) < (8, 9):
        pytest.skip("FP8 needs sm_89")


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    yield
    for where in ("kernel", "cublaslt", "cudnn", "cudnn full", "memory"):  # what did not come to pass
        inject(where, -2)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_another_way_is_taken(rng: np.random.Generator, name: str, after: int) -> None:
    where, call = call_of(rng, name)
    first = where == "cudnn" and after == 0  # before there is a plan
    expected = None if first else np.array(call().astype(mx.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject(where, after)
        results = [np.array(call().astype(mx.float32)) for _ in range(after + 2)]
        assert not inject(where, -2), "nothing failed"
    expected = results[-1] if expected is None else expected
    for result in results:
        assert relative_error(result, expected) < 2e-2
    assert all("doctor" in str(each.message) for each in caught)


WITHOUT_ANOTHER_WAY = operations.MORE | {name: operations.OPERATIONS[name] for name in ("fp8", "experts, many")}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in operations.OPERATIONS if name not in WITHOUT_ANOTHER_WAY])
def test_what_is_never_there(rng: np.random.Generator, name: str) -> None:
    """However often it is asked for, and as if it had not been once it is."""
    where, call = call_of(rng, name)
    expected = np.array(call().astype(mx.float32))
    inject(where, -1)
    for _ in range(3):
        assert relative_error(call(), expected.astype(np.float64)) < 2e-2
    inject(where, -2)
    assert relative_error(call(), expected.astype(np.float64)) < 2e-2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", WITHOUT_ANOTHER_WAY)
def test_where_there_is_no_other_way_the_error_says_what_is_missing(rng: np.random.Generator, name: str) -> None:
    where, make = WITHOUT_ANOTHER_WAY[name]
    call = make(rng)
    expected = np.array(call().astype(mx.float32))
    inject(where, -1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="holds no code of" if where == "kernel" else "has no algorithm"):
            mx.eval(call())
    inject(where, -2)
    assert np.array_equal(np.array(call().astype(mx.float32)), expected)


@pytest.mark.parametrize("after", range(4))
def test_gradients_by_chunks_without_one_of_their_kernels(rng: np.random.Generator, after: int) -> None:
    """Each is asked for before anything is evaluated."""
    if after > 1 and _native.capability(mx.Device(mx.gpu, 0))[0] not in {9, 10}:
        pytest.skip("slopes of chunks need the shared memory of sm_90 or sm_100")
    q, k = (normal(rng, (1, 130, 2, 64), mx.bfloat16) / 8 for _ in range(2))
    v, g, beta = normal(rng, (1, 130, 4, 64), mx.bfloat16), *(mx.sigmoid(normal(rng, (1, 130, 4), mx.float32)) for _ in range(2))

    def gradients() -> list[mx.array]:
        return list(mx.grad(lambda *a: mlx_cuda.gated_delta(*a)[0].astype(mx.float32).sum(), argnums=(0, 1, 2, 3, 4))(q, k, v, g, beta))

    expected = [np.array(each.astype(mx.float32)).astype(np.float64) for each in gradients()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject("kernel", after)
        found = gradients()
        assert not inject("kernel", -2), "nothing failed"
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine, other) < 3e-2


def test_it_is_said_once(rng: np.random.Generator) -> None:
    gate, up = (normal(rng, (33, 512), mx.float32) for _ in range(2))
    for count in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inject("kernel", 0)
            mx.eval(mlx_cuda.swiglu(gate, up))
        assert len([each for each in caught if "float32" in str(each.message)]) == count


def test_layers_that_are_composed_in_one_evaluation(rng: np.random.Generator) -> None:
    """Numbers that a composition makes for itself live until they have been read."""
    if limits.limits(_native.capability(mx.Device(mx.gpu, 0))).attention.additive != "flash":
        pytest.skip("additive masks are MLX's on this GPU")
    q, k, v = (normal(rng, (1, 2, size, 64), mx.float16) for size in (40, 56, 56))
    bias = normal(rng, (1, 1, 40, 56), mx.float16)

    def layers() -> list[mx.array]:
        return [mlx_cuda.attention(q + i, k, v, mask=bias - 3, return_lse=True)[0] for i in range(12)]

    assert mlx_cuda.explain(q, k, v, mask=bias).engine == "flash"
    expected = [np.array(each.astype(mx.float32)).astype(np.float64) for each in layers()]
    inject("kernel", -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composed = layers()
        mx.eval(composed)
    assert inject("kernel", -2)
    for one, other in zip(composed, expected, strict=True):
        assert relative_error(one, other) < 5e-3


def test_cudnn_is_not_asked_again(rng: np.random.Generator) -> None:
    size = next(SIZES)
    q, k, v = (normal(rng, (3, 8, size, 64), mx.float16) for _ in range(3))
    assert mlx_cuda.explain(q, k, v).engine == "cudnn"
    inject("cudnn", 0)
    with pytest.warns(RuntimeWarning, match=f"cuDNN refused a problem of {size} queries"):
        mx.eval(mlx_cuda.attention(q, k, v))
    assert mlx_cuda.explain(q, k, v).engine == "flash"
    mx.eval(mlx_cuda.attention(q, k, v))


def test_a_plan_without_memory_is_asked_for_again(rng: np.random.Generator) -> None:
    size = next(SIZES)
    q, k, v = (normal(rng, (3, 8, size, 64), mx.float16) for _ in range(3))
    expected = np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=64**-0.5).astype(mx.float32)).astype(np.float64)
    inject("cudnn full", 0)
    assert relative_error(mlx_cuda.attention(q, k, v), expected) < 2e-3
    assert mlx_cuda.explain(q, k, v).engine == "cudnn"
    assert relative_error(mlx_cuda.attention(q, k, v), expected) < 2e-3
    assert not inject("cudnn full", -2)


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_memory_that_is_full_once_is_an_error_once(rng: np.random.Generator, name: str) -> None:
    """And nothing is concluded from it."""
    _, call = call_of(rng, name)
    expected = np.array(call().astype(mx.float32))
    for _ in range(50):
        inject("memory", 0)
        with pytest.raises(RuntimeError, match="memory"):
            mx.eval(call())
        assert np.array_equal(np.array(call().astype(mx.float32)), expected)
