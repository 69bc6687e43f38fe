"""What cannot be computed as it was chosen when it is evaluated: kernels, plans and algorithms that are not there, and full memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native as _native

from . import operations
from .support import normal, relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80")]


def inject(where: str, after: int) -> None:
    assert _native.loaded is not None
    _native.loaded.inject_fault(where, after)


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    yield
    for where in ("kernel", "cublaslt", "cudnn", "cudnn full", "memory"):  # what did not come to pass
        inject(where, -2)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_another_way_is_taken(rng: np.random.Generator, name: str, after: int) -> None:
    where, make = operations.OPERATIONS[name]
    call = make(rng)
    first = where == "cudnn" and after == 0  # before there is a plan
    expected = None if first else np.array(call().astype(mx.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inject(where, after)
        results = [np.array(call().astype(mx.float32)) for _ in range(after + 2)]
    expected = results[-1] if expected is None else expected
    for result in results:
        assert relative_error(result, expected) < 2e-2
    assert all("doctor" in str(each.message) for each in caught)


WITHOUT_ANOTHER_WAY = operations.MORE | {name: operations.OPERATIONS[name] for name in ("fp8", "experts, many")}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in operations.OPERATIONS if name not in WITHOUT_ANOTHER_WAY])
def test_what_is_never_there(rng: np.random.Generator, name: str) -> None:
    """However often it is asked for, and as if it had not been once it is."""
    where, make = operations.OPERATIONS[name]
    call = make(rng)
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


def test_it_is_said_once(rng: np.random.Generator) -> None:
    call = operations.swiglu(rng)
    for count in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inject("kernel", 0)
            mx.eval(call())
        texts = [str(each.message) for each in caught if "swiglu" in str(each.message)]
        assert len(texts) <= count


def test_cudnn_is_not_asked_again(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (3, 8, 216, 64), mx.float16) for _ in range(3))
    assert mlx_cuda.explain(q, k, v).engine == "cudnn"
    inject("cudnn", 0)
    with pytest.warns(RuntimeWarning, match="cuDNN refused"):
        mx.eval(mlx_cuda.attention(q, k, v))
    assert mlx_cuda.explain(q, k, v).engine == "flash"
    mx.eval(mlx_cuda.attention(q, k, v))


def test_a_plan_without_memory_is_asked_for_again(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (3, 8, 232, 64), mx.float16) for _ in range(3))
    inject("cudnn full", 0)
    with pytest.raises(RuntimeError, match="no memory left for a plan"):
        mx.eval(mlx_cuda.attention(q, k, v))
    assert mlx_cuda.explain(q, k, v).engine == "cudnn"
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=64**-0.5)
    assert relative_error(mlx_cuda.attention(q, k, v), np.array(expected.astype(mx.float32)).astype(np.float64)) < 2e-3


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_memory_that_is_full_once_is_an_error_once(rng: np.random.Generator, name: str) -> None:
    """And nothing is concluded from it."""
    call = operations.OPERATIONS[name][1](rng)
    expected = np.array(call().astype(mx.float32))
    for _ in range(50):
        inject("memory", 0)
        with pytest.raises(RuntimeError, match="memory"):
            mx.eval(call())
        assert np.array_equal(np.array(call().astype(mx.float32)), expected)
