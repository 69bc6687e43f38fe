"""What cannot be computed as it was chosen when it is evaluated: kernels, plans and algorithms that are not there, and full memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native as _native

from .support import normal, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu


def inject(where: str, after: int) -> None:
    assert _native.loaded is not None
    _native.loaded.inject_fault(where, after)


def _attention(rng: np.random.Generator, queries: int, keys: int, **options: Any) -> Callable[[], mx.array]:
    q, k, v = (normal(rng, (2, 8, size, 64), mx.float16) for size in (queries, keys, keys))
    return lambda: mlx_cuda.attention(q, k, v, **options)


def _quantized(rng: np.random.Generator, rows: int) -> Callable[[], mx.array]:
    x, w = normal(rng, (rows, 512), mx.bfloat16), mx.quantize(normal(rng, (768, 512), mx.bfloat16))
    return lambda: mlx_cuda.quantized_matmul(x, *w)


def _experts(rng: np.random.Generator, rows: int) -> Callable[[], mx.array]:
    x, w = normal(rng, (rows, 1, 256), mx.bfloat16), mx.quantize(normal(rng, (8, 128, 256), mx.bfloat16))
    chosen = mx.array(rng.integers(0, 8, rows), mx.uint32)
    return lambda: mlx_cuda.gather_qmm(x, *w, rhs_indices=chosen)


def _linear(rng: np.random.Generator) -> Callable[[], mx.array]:
    x, w, b = (normal(rng, shape, mx.float16) for shape in ((96, 256), (160, 256), (160,)))
    return lambda: mlx_cuda.linear(x, w, b, activation="gelu_approx")


def _swiglu(rng: np.random.Generator) -> Callable[[], mx.array]:
    gate, up = (normal(rng, (33, 512), mx.float16) for _ in range(2))
    return lambda: mlx_cuda.swiglu(gate, up)


def _fp8(rng: np.random.Generator) -> Callable[[], mx.array]:
    (a, a_scale), (b, b_scale) = (mlx_cuda.quantize_fp8(normal(rng, (128, 256), mx.bfloat16)) for _ in range(2))
    return lambda: mlx_cuda.fp8_matmul(a, b, scale_a=a_scale, scale_b=b_scale)


OPERATIONS: dict[str, tuple[str, Any]] = {
    "decode": ("kernel", lambda rng: _attention(rng, 1, 300)),
    "flash": ("kernel", lambda rng: _attention(rng, 200, 300, mask="causal")),
    "flash with a soft cap": ("kernel", lambda rng: _attention(rng, 200, 200, softcap=20.0)),
    "cudnn": ("cudnn", lambda rng: _attention(rng, 208, 208, mask="causal")),
    "skinny": ("kernel", lambda rng: _quantized(rng, 6)),
    "dequantize, no kernel": ("kernel", lambda rng: _quantized(rng, 600)),
    "dequantize, no algorithm": ("cublaslt", lambda rng: _quantized(rng, 600)),
    "experts, few": ("kernel", lambda rng: _experts(rng, 7)),
    "experts, many": ("kernel", lambda rng: _experts(rng, 300)),
    "swiglu": ("kernel", _swiglu),
    "linear": ("cublaslt", _linear),
    "fp8": ("cublaslt", _fp8),
}


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    yield
    for where in ("kernel", "cublaslt", "cudnn", "memory"):  # what did not come to pass
        inject(where, -2)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("name", OPERATIONS)
def test_another_way_is_taken(rng: np.random.Generator, name: str, after: int) -> None:
    where, make = OPERATIONS[name]
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


def _packed(rng: np.random.Generator) -> Callable[[], mx.array]:
    q, k, v = (normal(rng, (90, 4, 64), mx.float16) for _ in range(3))
    ends = mx.array([0, 50, 90], mx.int32)
    return lambda: mlx_cuda.attention_varlen(q, k, v, ends, ends, max_seqlen_q=50, max_seqlen_k=50)


def _update(rng: np.random.Generator) -> Callable[[], mx.array]:
    pages, rows = normal(rng, (4, 2, 16, 64), mx.float16), normal(rng, (1, 2, 1, 64), mx.float16)
    table, lengths = mx.array([[1, 2]], mx.int32), mx.array([7], mx.int32)
    return lambda: mlx_cuda.paged_cache_update(pages + 0, pages + 0, rows, rows, table, lengths)[0]


def _codes(rng: np.random.Generator) -> Callable[[], mx.array]:
    x = normal(rng, (64, 128), mx.bfloat16)
    return lambda: mlx_cuda.quantize_fp8(x)[0]


def _dense_experts(rng: np.random.Generator) -> Callable[[], mx.array]:
    x, w = normal(rng, (40, 1, 64), mx.float16), normal(rng, (4, 64, 96), mx.float16)
    chosen = mx.array(rng.integers(0, 4, 40), mx.uint32)
    return lambda: mlx_cuda.gather_mm(x, w, rhs_indices=chosen)


def _biased_fp8(rng: np.random.Generator) -> Callable[[], mx.array]:
    (a, a_scale), (b, b_scale) = (mlx_cuda.quantize_fp8(normal(rng, (128, 256), mx.bfloat16)) for _ in range(2))
    bias = normal(rng, (128,), mx.bfloat16)
    return lambda: mlx_cuda.fp8_matmul(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias)


WITHOUT_ANOTHER_WAY: dict[str, tuple[str, Any]] = {
    "varlen": ("kernel", _packed),
    "paged update": ("kernel", _update),
    "codes": ("kernel", _codes),
    "dense experts": ("kernel", _dense_experts),
    "fp8": ("cublaslt", OPERATIONS["fp8"][1]),
    "fp8 with a bias": ("cublaslt", _biased_fp8),
    "experts, many": ("kernel", OPERATIONS["experts, many"][1]),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in WITHOUT_ANOTHER_WAY])
def test_what_is_never_there(rng: np.random.Generator, name: str) -> None:
    """However often it is asked for, and as if it had not been once it is."""
    where, make = OPERATIONS[name]
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
    call = _swiglu(rng)
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_that_is_full_once_is_an_error_once(rng: np.random.Generator, name: str) -> None:
    """And nothing is concluded from it."""
    call = OPERATIONS[name][1](rng)
    expected = np.array(call().astype(mx.float32))
    for _ in range(50):
        inject("memory", 0)
        with pytest.raises(RuntimeError, match="memory"):
            mx.eval(call())
        assert np.array_equal(np.array(call().astype(mx.float32)), expected)
