"""``fp8_matmul`` and ``quantize_fp8``, on the CPU and through a native module."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_cuda._matmul.fp8 import Axis

from tests.gpu.formats import e4m3, spread

from .matmuls import Matmuls
from .references import DTYPES, Array, assert_close, host, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SHAPES: dict[str | int | None, Any] = {
    None: lambda _: (1,),
    -1: lambda shape: (*shape[:-1], 1),
    "block128": lambda shape: (*shape[:-1], -(-shape[-1] // 128)),
    "block128x128": lambda shape: tuple(-(-size // 128) for size in shape),
}


def values(codes: mx.array, scales: mx.array, axis: Axis) -> Array:
    return e4m3(np.array(codes)) * spread(host(scales), codes.shape, axis)


@given(
    axis=st.sampled_from((None, -1, "block128", "block128x128")),
    shape=st.sampled_from(((3, 5), (1, 128), (130, 300), (129, 1), (2, 3, 200), (7,))),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((1.0, 1e-3, 1e4)),
)
def test_quantises_to_the_largest(axis: Axis, shape: tuple[int, ...], dtype: mx.Dtype, size: float) -> None:
    if axis == "block128x128" and len(shape) != 2:
        return
    x = (random(shape) * size).astype(dtype)
    codes, scales = mlx_cuda.quantize_fp8(x, axis=axis)
    assert (codes.dtype, scales.dtype) == (mx.uint8, mx.float32)
    assert (codes.shape, scales.shape) == (shape, SHAPES[axis](shape))
    given_, got = host(x), values(codes, scales, axis)
    assert np.abs(got - given_).max() <= np.abs(given_).max() * 2**-4 * 1.01  # half of the last of 3 bits of the largest
    each = spread(host(scales), shape, axis)
    assert (np.abs(got - given_) <= np.maximum(np.abs(given_) * 2**-4, each * 2**-10) * 1.01).all()
    assert np.isclose(np.abs(given_ / each).max(), 448, rtol=1e-6)


@pytest.mark.parametrize("axis", [None, -1, "block128", "block128x128"])
def test_zeros_and_nothing(axis: Axis) -> None:
    codes, scales = mlx_cuda.quantize_fp8(mx.zeros((3, 200)), axis=axis)
    assert not host(codes).any()
    assert (host(scales) == 2.0**-126).all()
    codes, scales = mlx_cuda.quantize_fp8(mx.zeros((0, 200)), axis=axis)
    assert (codes.shape, scales.shape) == ((0, 200), SHAPES[axis]((0, 200)))


AXES: list[tuple[Axis, Axis]] = [(None, None), (-1, -1), ("block128", "block128x128"), (-1, None), ("block128", -1), (None, "block128x128")]


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shape", [(3, 48), (2, 5, 160), (160,), (1, 16)], ids=str)
def test_matmul(shape: tuple[int, ...], axes: tuple[Axis, Axis], natively: bool, request: pytest.FixtureRequest) -> None:
    module: Matmuls | None = request.getfixturevalue("matmuls") if natively else None
    x, w, bias = random(shape), random((144, shape[-1]), seed=1), random((144,), seed=2)
    (a, scale_a), (b, scale_b) = mlx_cuda.quantize_fp8(x, axis=axes[0]), mlx_cuda.quantize_fp8(w, axis=axes[1])
    exact = values(a, scale_a, axes[0]) @ values(b, scale_b, axes[1]).T + host(bias)
    for dtype in DTYPES:
        result = mlx_cuda.fp8_matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)
        assert result.dtype == dtype
        assert_close(result, exact)
    if module is not None:
        assert [name.split(" (")[0] for name in module.calls if name.startswith("fp8")] == ["fp8"] * 3


def test_infinities_saturate_and_nan_stays() -> None:
    for axis in (None, -1, "block128", "block128x128"):
        codes, scales = mlx_cuda.quantize_fp8(mx.array([[1.0, float("inf"), -float("inf"), float("nan"), 2.0]]), axis=axis)
        got = e4m3(np.array(codes)) * host(scales)
        assert np.allclose(got[0, [0, 1, 2, 4]], [1, 2, -2, 2])
        assert np.isnan(got[0, 3])


def test_other_scales(matmuls: Matmuls) -> None:
    """One for all in any shape, and none."""
    a, b = mx.to_fp8(random((2, 3, 32))), mx.to_fp8(random((16, 32), seed=1))
    exact = e4m3(np.array(a)) @ e4m3(np.array(b)).T
    assert_close(mlx_cuda.fp8_matmul(a, b, out_dtype=mx.float32), exact)
    assert_close(mlx_cuda.fp8_matmul(a, b, scale_a=mx.array(2.0), scale_b=mx.array([3.0]), out_dtype=mx.float32), 6 * exact)
    assert matmuls.calls == ["fp8 (2, 3, 32) None None", "fp8 (2, 3, 32) () (1,)"]


@pytest.mark.parametrize("natively", [False, True])
def test_gradients_reach_the_bias_alone(natively: bool, request: pytest.FixtureRequest) -> None:
    if natively:
        request.getfixturevalue("matmuls")
    (a, scale_a), (b, scale_b) = (mlx_cuda.quantize_fp8(random((rows, 32), seed=rows), axis=-1) for rows in (5, 7))

    def loss(bias: mx.array, scale_a: mx.array, scale_b: mx.array) -> mx.array:
        return mlx_cuda.fp8_matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=mx.float32).sum()

    gradients = mx.grad(loss, argnums=(0, 1, 2))(mx.zeros(7), scale_a, scale_b)
    assert [set(host(gradient).reshape(-1).tolist()) for gradient in gradients] == [{5.0}, {0.0}, {0.0}]


def test_all_codes() -> None:
    codes = mx.arange(256).astype(mx.uint8)
    numbers = e4m3(np.arange(256, dtype=np.uint8))
    assert np.array_equal(np.isnan(numbers), np.isnan(np.array(mx.from_fp8(codes, mx.float32))))
    assert np.array_equal(np.nan_to_num(numbers), np.nan_to_num(np.array(mx.from_fp8(codes, mx.float32))))


def test_empty() -> None:
    zeros = mlx_cuda.fp8_matmul(mx.zeros((3, 0), mx.uint8), mx.zeros((4, 0), mx.uint8), bias=mx.ones(4))
    assert (host(zeros) == np.ones((3, 4))).all()
    assert mlx_cuda.fp8_matmul(mx.zeros((0, 16), mx.uint8), mx.zeros((4, 16), mx.uint8)).shape == (0, 4)


A, B = mx.zeros((3, 300), mx.uint8), mx.zeros((200, 300), mx.uint8)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((A, B[:, :16]), {}, r"Shapes must be a \[\.\.\., M, K\] and b \[N, K\], got \(3,300\) and \(200,16\)."),
        ((A, B[None]), {}, r"Shapes must be .*"),
        ((A.astype(mx.float16), B), {}, "a must hold e4m3 numbers in uint8, got float16."),
        ((A, B.astype(mx.int8)), {}, "b must hold e4m3 numbers in uint8, got int8."),
        ((A, B), {"scale_a": mx.ones((3,))}, r"scale_a must be one number, or have the shape \(3,1\) or \(3,3\), got \(3,\)."),
        ((A, B), {"scale_b": mx.ones((200, 3))}, r"scale_b must be one number, or have the shape \(200,1\) or \(2,3\), got \(200,3\)."),
        ((A, B), {"scale_a": mx.ones((1,), mx.int32)}, "scale_a must be of a floating type, got int32."),
        ((A, B), {"bias": mx.ones((3,))}, r"bias must have the shape \(200,\) of b's rows, got \(3,\)."),
        ((A, B), {"out_dtype": mx.int32}, "out_dtype must be float16, bfloat16 or float32, got int32."),
    ],
)
def test_errors(arguments: tuple[mx.array, mx.array], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[fp8_matmul\] {text}$"):
        mlx_cuda.fp8_matmul(*arguments, **options)


def test_types() -> None:
    for dtype in "float16", None:
        with pytest.raises(TypeError, match=r"^\[fp8_matmul\] out_dtype must be an mlx\.core\.Dtype, got ('float16'|None)\.$"):
            mlx_cuda.fp8_matmul(A, B, out_dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^\[fp8_matmul\] scale_a must be an mlx\.core\.array, got float\.$"):
        mlx_cuda.fp8_matmul(A, B, scale_a=2.0)  # type: ignore[arg-type]
    short = mx.zeros((3, 16), mx.uint8)
    with pytest.raises(ValueError, match=r"scale_a must be one number, or have the shape \(3,1\), got \(3,\)\.$"):
        mlx_cuda.fp8_matmul(short, short, scale_a=mx.ones((3,)))


def test_errors_of_quantising() -> None:
    for x, options, text in (
        (mx.ones((2, 2)), {"axis": 0}, "axis must be None, -1, 'block128' or 'block128x128', got 0."),
        (mx.ones((2, 2), mx.int32), {}, "Only float16, bfloat16 and float32 are supported, got int32."),
        (mx.ones((2, 2, 2)), {"axis": "block128x128"}, r"x must be \[N, K\], got \(2,2,2\)."),
        (mx.array(1.0), {}, r"x must be \[\.\.\., K\], got \(\)."),
    ):
        with pytest.raises(ValueError, match=rf"^\[quantize_fp8\] {text}$"):
            mlx_cuda.quantize_fp8(x, **options)
    with pytest.raises(TypeError, match=r"^\[quantize_fp8\] x must be an mlx\.core\.array, got float\.$"):
        mlx_cuda.quantize_fp8(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("axis", "fits", "more"), [("block128", (300, 128), (3, 129)), ("block128x128", (128, 300), (129, 3))])
def test_more_blocks_than_a_grid_has(
    matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch, axis: Any, fits: tuple[int, int], more: tuple[int, int]
) -> None:
    monkeypatch.setattr("mlx_cuda._matmul.fp8.MOST_BLOCKS", 1)
    for shape, engine in (fits, "fused"), (more, "fallback"):
        assert mlx_cuda.explain(mlx_cuda.quantize_fp8, mx.ones(shape), axis=axis).engine == engine
        mlx_cuda.quantize_fp8(mx.ones(shape), axis=axis)
    assert matmuls.calls == [f"quantise {axis}"]
