"""The native FP8 functions, against numpy in float64 of the numbers that the codes stand for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._loader import native as _native
from numpy.typing import NDArray

from .formats import e4m3, spread
from .reference import Array
from .support import DTYPES, ROUNDOFF, TOLERANCE, assert_close, device, host, normal, poison

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
HOW = ["tensor", "row", "block128", "block128x128"]
how = pytest.mark.parametrize("how", HOW)


@pytest.fixture
def module() -> Any:
    if _native.capability(mx.Device(mx.gpu, 0)) < (8, 9):
        pytest.skip("needs sm_89")
    module: Any = _native.load()
    assert not isinstance(module, Exception), module
    return module


def gpu() -> mx.Stream:
    return mx.default_stream(mx.Device(mx.gpu, 0))


def parts(size: Array, how: str) -> Array:
    """The largest of each part that has a scale."""
    if how == "tensor":
        return np.full(1, np.max(size))
    if how == "row":
        return np.asarray(size.max(axis=-1, keepdims=True))
    padded = np.pad(size, [(0, 0)] * (size.ndim - 1) + [(0, -size.shape[-1] % 128)])
    blocks = padded.reshape(*size.shape[:-1], -1, 128).max(axis=-1)
    if how == "block128x128":
        padded = np.pad(blocks, [(0, -size.shape[0] % 128), (0, 0)])
        blocks = padded.reshape(-1, 128, blocks.shape[1]).max(axis=1)
    return np.asarray(blocks)


def expected_scales(x: Array, how: str) -> NDArray[np.float32]:
    largest = parts(np.where(np.isfinite(x), np.abs(x), 0), how).astype(np.float32)
    return np.asarray(np.maximum(largest / np.float32(448), np.float32(2.0**-126)))


def check_quantised(module: Any, x: mx.array, how: str) -> None:
    values, scales = module.quantize_fp8(x, how, gpu())
    exact = host(x)
    wanted = expected_scales(exact, how)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (mx.uint8, x.shape, mx.float32, wanted.shape)
    assert np.array_equal(np.array(scales), wanted)
    each = spread(wanted.astype(np.float64), exact.shape, how).astype(np.float32)
    with np.errstate(invalid="ignore"):
        quotient = exact.astype(np.float32) / each
    codes = np.array(mx.to_fp8(mx.array(quotient), stream=mx.cpu))
    assert np.array_equal(np.array(values), np.where(np.isnan(quotient), 0x7F, codes))


SHAPES = [
    (1, 1),
    (3, 5),
    (7, 128),
    (65, 130),
    (129, 257),
    (300, 1024),
    (33, 2048),
    (17, 9000),
    (5, 20001),
    (500,),
    (2, 3, 384),
    (4, 1, 2, 100),
]


@dtypes
@how
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantised_as_defined(rng: np.random.Generator, module: Any, shape: tuple[int, ...], how: str, dtype: mx.Dtype) -> None:
    if how == "block128x128" and len(shape) != 2:
        pytest.skip("tiles are of a matrix")
    x = rng.standard_normal(shape) * rng.uniform(0.01, 30, (*shape[:-1], 1))
    check_quantised(module, device(x, dtype), how)


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "columns of a wider matrix": lambda x: x[:, 0, 256:512],
    "from an odd element on": lambda x: x[:, 0, 3:259],
    "every other row": lambda x: x[::2, 1],
    "transposed": lambda x: x[:, 0].T,
    "every other column": lambda x: x[:, 0, ::2],
    "one row for all": lambda x: mx.broadcast_to(x[:1, 0], (50, 600)),
    "backwards": lambda x: x[::-1, 0],
}


@dtypes
@how
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_quantised_views(rng: np.random.Generator, module: Any, view: Callable[[mx.array], mx.array], how: str, dtype: mx.Dtype) -> None:
    x = view(normal(rng, (140, 2, 600), dtype))
    mx.eval(x)
    check_quantised(module, x, how)


@dtypes
@how
def test_zeros_infinities_and_nan(rng: np.random.Generator, module: Any, how: str, dtype: mx.Dtype) -> None:
    x = rng.standard_normal((260, 512))
    x[3] = 0
    x[128:256, 128:256] = 0
    x[5, 7], x[6, 300], x[7, 0], x[9] = np.inf, -np.inf, np.nan, np.nan
    x[11, :4] = [1e-30, -1e-30, 0, -0.0]
    check_quantised(module, device(x, dtype), how)


@how
def test_the_largest_and_the_smallest(module: Any, how: str) -> None:
    x = np.array([[3e38, -1e38, 1.0, 0.0], [1e-38, -1e-39, 1e-45, 0.0], [448.0, 447.9, 17.0, 2.0**-9]])
    check_quantised(module, mx.array(x.astype(np.float32)), how)


def test_ties_go_to_even(module: Any) -> None:
    """Every tie between two codes, and what lies a little beside it."""
    codes = np.sort(e4m3(np.arange(127, dtype=np.uint8)))
    ties = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    x = np.concatenate([ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e3)), [np.float32(448)]])
    for factor in 1.0, 2.0**-40, 3.0:
        check_quantised(module, mx.array((x * np.float32(factor)).astype(np.float32)), "tensor")


def test_vmap_quantises_each(rng: np.random.Generator, module: Any) -> None:
    x = rng.standard_normal((3, 40, 300))
    x[0, 0, 0], x[1, 2, 3] = np.nan, np.inf
    batch = device(x, mx.float16)
    for name in HOW:
        for axis in 0, 1, 2:
            one = partial(module.quantize_fp8, how=name, stream=gpu())
            values, scales = mx.vmap(one, in_axes=axis)(mx.moveaxis(batch, 0, axis))
            for i in range(3):
                one_values, one_scales = module.quantize_fp8(batch[i], name, gpu())
                assert mx.array_equal(values[i], one_values)
                assert mx.array_equal(scales[i], one_scales)


def test_no_gradient_passes(rng: np.random.Generator, module: Any) -> None:
    x = normal(rng, (32, 64), mx.float32)

    def loss(x: mx.array, bias: mx.array) -> mx.array:
        values, scales = module.quantize_fp8(x, "row", gpu())
        matmul = module.fp8_matmul(values, values, scales, scales, bias, mx.float32, gpu())
        return mx.add(x.sum(), matmul.sum())

    assert (host(mx.grad(loss)(x, mx.zeros(32))) == 1).all()


@pytest.mark.parametrize("names", [("none", "row"), ("tensor", "tensor"), ("row", "row"), ("block128", "block128x128")], ids="-".join)
@dtypes
def test_derivatives_of_the_bias(rng: np.random.Generator, module: Any, names: tuple[str, str], dtype: mx.Dtype) -> None:
    a, scale_a, exact_a = operands(rng, module, (37, 144), names[0])
    b, scale_b, exact_b = operands(rng, module, (21, 144), names[1])
    bias, tangent, cotangent = (normal(rng, shape, mx.float32) for shape in ((21,), (21,), (37, 21)))

    def matmul(bias: mx.array, scale: mx.array | None) -> mx.array:
        return module.fp8_matmul(a, b, scale, scale_b, bias, dtype, gpu())  # type: ignore[no-any-return]

    (out,), (gradient,) = mx.vjp(lambda bias: matmul(bias, scale_a), [bias], [cotangent.astype(dtype)])
    size = np.sqrt((exact_a**2) @ (exact_b**2).T)
    assert_close(out, exact_a @ exact_b.T + host(bias), size=size, tolerance=max(TOLERANCE[dtype], 5e-4))
    assert gradient.dtype == bias.dtype
    assert_close(gradient, host(cotangent).sum(axis=0), tolerance=4 * TOLERANCE[dtype])
    _, (moved,) = mx.jvp(lambda bias: matmul(bias, scale_a), [bias], [tangent])
    assert_close(moved, np.broadcast_to(host(tangent), (37, 21)), tolerance=TOLERANCE[dtype])
    if scale_a is not None:
        assert not host(mx.grad(lambda scale: matmul(bias, scale).sum())(scale_a)).any()
    assert mx.array_equal(mx.compile(matmul)(bias, scale_a), matmul(bias, scale_a))


# ---------------------------------------------------------------------------------------------------------------- matmuls
def operands(rng: np.random.Generator, module: Any, shape: tuple[int, ...], name: str) -> tuple[mx.array, mx.array | None, Array]:
    """Codes, scales, and what they stand for."""
    x = rng.standard_normal(shape) * rng.uniform(0.2, 5, (*shape[:-1], 1))
    if name == "none":
        codes = mx.to_fp8(mx.array(x.astype(np.float32)))
        return codes, None, e4m3(np.array(codes))
    codes, scales = module.quantize_fp8(mx.array(x.astype(np.float32)), name, gpu())
    return codes, scales, e4m3(np.array(codes)) * spread(np.array(scales).astype(np.float64), shape, name)


def check_matmul(
    rng: np.random.Generator, module: Any, a_shape: tuple[int, ...], n: int, names: tuple[str, str], dtype: mx.Dtype, *, bias: bool
) -> None:
    a, scale_a, exact_a = operands(rng, module, a_shape, names[0])
    b, scale_b, exact_b = operands(rng, module, (n, a_shape[-1]), names[1])
    added = normal(rng, (n,), dtype) if bias else None
    result = module.fp8_matmul(a, b, scale_a, scale_b, added, dtype, gpu())
    assert (result.dtype, result.shape) == (dtype, (*a_shape[:-1], n))
    exact = exact_a @ exact_b.T + (host(added) if added is not None else 0)
    size = np.sqrt((exact_a * exact_a) @ (exact_b * exact_b).T + (host(added) ** 2 if added is not None else 0))
    # float32 results are sums of FP8 tensor cores, which keep fewer bits than float32.
    assert_close(result, exact, size=size, tolerance=TOLERANCE[dtype] if dtype != mx.float32 else 5e-4)


NAMES_A = ["none", "tensor", "row", "block128"]
NAMES_B = ["none", "tensor", "row", "block128", "block128x128"]


@dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("names", list(itertools.product(NAMES_A, NAMES_B)), ids="-".join)
def test_matmuls(rng: np.random.Generator, module: Any, names: tuple[str, str], dtype: mx.Dtype, bias: bool) -> None:
    for m, n, k in (256, 384, 512), (33, 80, 272):
        check_matmul(rng, module, (m, k), n, names, dtype, bias=bias)


ODD = [(1, 16, 16), (1, 1, 1), (3, 5, 7), (17, 130, 300), (129, 127, 1001), (2, 300, 129), (64, 8, 40), (250, 257, 128)]


@pytest.mark.parametrize("names", [("none", "none"), ("tensor", "row"), ("row", "row"), ("block128", "block128x128")], ids="-".join)
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_odd_sizes(rng: np.random.Generator, module: Any, names: tuple[str, str], sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    for dtype in DTYPES.values():
        check_matmul(rng, module, (m, k), n, names, dtype, bias=True)


@pytest.mark.parametrize("names", [("none", "none"), ("row", "row"), ("block128", "block128")], ids="-".join)
@pytest.mark.parametrize("shape", [(48,), (2, 3, 144), (2, 1, 5, 256)], ids=str)
def test_leading_dimensions(rng: np.random.Generator, module: Any, names: tuple[str, str], shape: tuple[int, ...]) -> None:
    check_matmul(rng, module, shape, 96, names, mx.bfloat16, bias=False)


def test_views_of_operands(rng: np.random.Generator, module: Any) -> None:
    a, scale_a, exact_a = operands(rng, module, (60, 320), "row")
    b, scale_b, exact_b = operands(rng, module, (300, 320), "row")
    assert scale_a is not None and scale_b is not None  # noqa: PT018
    cuts = [(slice(None, None, 2), slice(0, 256)), (slice(1, 41), slice(16, 272)), (slice(None, None, -1), slice(3, 260))]
    for rows, columns in cuts:
        result = module.fp8_matmul(a[rows, columns], b[rows, columns], scale_a[rows], scale_b[rows], None, mx.float32, gpu())
        assert_close(result, exact_a[rows, columns] @ exact_b[rows, columns].T, tolerance=5e-4)
    transposed = mx.contiguous(a.T).T
    result = module.fp8_matmul(transposed, b, mx.contiguous(scale_a.T).T, scale_b, None, mx.float32, gpu())
    assert_close(result, exact_a @ exact_b.T, tolerance=5e-4)


def test_nan_goes_through(module: Any) -> None:
    a, b = mx.to_fp8(mx.ones((32, 64))), mx.to_fp8(mx.ones((48, 64)))
    a[3, 5] = 0x7F
    result = host(module.fp8_matmul(a, b, None, None, None, mx.bfloat16, gpu()))
    assert np.isnan(result[3]).all()
    assert (np.delete(result, 3, axis=0) == 64).all()


def test_sums_are_not_cut_short(rng: np.random.Generator, module: Any) -> None:
    """The fast accumulation of FP8 tensor cores keeps 13 bits: over a long sum of positive numbers that shows."""
    a, b = (mx.to_fp8(mx.array(rng.uniform(0.5, 1, (256, 16384)).astype(np.float32))) for _ in range(2))
    result = module.fp8_matmul(a, b, None, None, None, mx.float32, gpu())
    assert_close(result, e4m3(np.array(a)) @ e4m3(np.array(b)).T, tolerance=2e-4)


@dtypes
def test_writes_all_of_its_output(rng: np.random.Generator, module: Any, dtype: mx.Dtype) -> None:
    for m, n, k in (64, 96, 128), (36, 80, 64):
        nan = mx.full((m, k), 0x7F, mx.uint8)
        b = operands(rng, module, (n, k), "none")[0]
        poison(partial(module.fp8_matmul, nan, b, None, None, None, dtype, gpu()), (m, n), dtype)
        check_matmul(rng, module, (m, k), n, ("row", "row"), dtype, bias=False)


def test_vmap_and_compile(rng: np.random.Generator, module: Any) -> None:
    a, scale_a, exact_a = operands(rng, module, (3, 32, 256), "row")
    b, scale_b, exact_b = operands(rng, module, (48, 256), "row")

    def matmul(a: mx.array, scale: mx.array | None) -> mx.array:
        return module.fp8_matmul(a, b, scale, scale_b, None, mx.float32, gpu())  # type: ignore[no-any-return]

    assert_close(mx.vmap(matmul)(a, scale_a), exact_a @ exact_b.T, tolerance=5e-4)
    assert mx.array_equal(mx.compile(matmul)(a, scale_a), matmul(a, scale_a))


SEPARATE = """
import mlx.core as mx
from mlx_cuda._loader import native as _native
gpu, module = mx.default_stream(mx.gpu), _native.load()
mx.random.seed(3)
for name in "row", "tensor", "block128":
    for dtype in mx.bfloat16, mx.float16, mx.float32:
        (a, scale_a), (b, scale_b) = (module.quantize_fp8(mx.random.normal((rows, 320)), name, gpu) for rows in (70, 90))
        bias = mx.random.normal((90,)).astype(dtype)
        got = module.fp8_matmul(a, b, scale_a, scale_b, bias, dtype, gpu)
        wide = [mx.from_fp8(codes, mx.float32) for codes in (a, b)]
        for i, scale in enumerate((scale_a, scale_b)):
            wide[i] = wide[i] * (mx.repeat(scale, 128, axis=1)[:, :320] if name == "block128" else scale)
        exact = wide[0] @ wide[1].T + bias
        error = mx.linalg.norm(got.astype(mx.float32) - exact) / mx.linalg.norm(exact)
        assert error.item() < {tolerance}[dtype], (name, dtype, error)
print("right")
"""


@pytest.mark.usefixtures("module")
def test_without_the_library_s_scalings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cuBLASLt that scales whole tensors only is asked for."""
    monkeypatch.setenv("MLX_CUDA_EPILOGUE", "separate")
    tolerances = {f"mx.{name}": max(4 * ROUNDOFF[dtype], 2e-3) for name, dtype in DTYPES.items()}
    program = SEPARATE.format(tolerance="{" + ", ".join(f"{name}: {value}" for name, value in tolerances.items()) + "}")
    process = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "right\n"), process.stderr
