from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._loader import native as _native

from . import reference
from .support import (
    DTYPES,
    GRADIENT_TOLERANCE,
    ROUNDOFF,
    TOLERANCE,
    assert_close,
    assert_fused,
    device,
    has_small_memory,
    host,
    normal,
    poison,
    primitives,
)

pytestmark = pytest.mark.gpu

Mask: TypeAlias = Literal["causal"] | None
Inputs: TypeAlias = tuple[mx.array, mx.array, mx.array]

# Engines and their primitives.
ENGINES = {"cudnn": "Attention", "decode": "DecodeAttention", "flash": "FlashAttention"}

HALF = {name: dtype for name, dtype in DTYPES.items() if dtype != mx.float32}

dtypes = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF.keys())
masks = pytest.mark.parametrize("mask", [None, "causal"], ids=str)
head_dims = pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 136, 192, 256])


def inputs(rng: np.random.Generator, b: int, h: int, h_kv: int, t: int, s: int, d: int, dtype: mx.Dtype) -> Inputs:
    return normal(rng, (b, h, t, d), dtype), normal(rng, (b, h_kv, s, d), dtype), normal(rng, (b, h_kv, s, d), dtype)


def expected(q: mx.array, k: mx.array, v: mx.array, mask: Mask = None, scale: float | None = None) -> reference.Array:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention(host(q), host(k), host(v), scale=scale, causal=mask == "causal")


def cudnn_or_flash(head_dim: int) -> str:
    """Who computes what is cuDNN's on Hopper."""
    return "flash" if head_dim > 128 and _native.capability(mx.Device(mx.gpu, 0)) < (9, 0) else "cudnn"


def check(q: mx.array, k: mx.array, v: mx.array, mask: Mask = None, *, fused: bool = True, scale: float | None = None) -> None:
    result = mlx_cuda.attention(q, k, v, scale=scale, mask=mask, force_fused=fused)
    if fused:
        engine = mlx_cuda.explain(q, k, v, scale=scale, mask=mask).engine
        assert_fused(result, ENGINES[engine])
    assert result.dtype == q.dtype
    assert_close(
        result,
        expected(q, k, v, mask, scale),
        tolerance=TOLERANCE[q.dtype] * (1 if fused else 2),  # what MLX composes rounds the scores as well
        # MLX's own raises "graph.prepare() failed" for strides of 0 and less, so it gets plain operands.
        upstream=mx.fast.scaled_dot_product_attention(
            *map(mx.contiguous, (q, k, v)), scale=q.shape[-1] ** -0.5 if scale is None else scale, mask=mask
        ),
        floor=ROUNDOFF[q.dtype],
    )


@dtypes
@masks
@head_dims
@pytest.mark.parametrize(("t", "s"), [(128, 128), (257, 257), (33, 65), (5, 200)])
def test_matches_float64(rng: np.random.Generator, head_dim: int, t: int, s: int, mask: Mask, dtype: mx.Dtype) -> None:
    check(*inputs(rng, 2, 3, 3, t, s, head_dim, dtype), mask)


@dtypes
@masks
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 1)])
def test_grouped_queries(rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int, mask: Mask, dtype: mx.Dtype) -> None:
    check(*inputs(rng, 2, heads, kv_heads, 100, 100, head_dim, dtype), mask)


@dtypes
@masks
@head_dims
def test_default_dispatch(rng: np.random.Generator, head_dim: int, mask: Mask, dtype: mx.Dtype) -> None:
    """Whichever path is chosen (MLX's own kernel for few queries), the result is right."""
    for t, s in (1, 1), (1, 77), (3, 77), (256, 256):
        check(*inputs(rng, 1, 4, 2, t, s, head_dim, dtype), mask, fused=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences_are_fused_by_default(rng: np.random.Generator, head_dim: int) -> None:
    q, k, v = inputs(rng, 1, 2, 2, 1024, 1024, head_dim, mx.bfloat16)
    assert_fused(mlx_cuda.attention(q, k, v, mask="causal"), ENGINES[cudnn_or_flash(head_dim)])


@pytest.mark.parametrize("head_dim", [12, 100, 584])
@masks
def test_head_dims_that_no_kernel_takes(rng: np.random.Generator, head_dim: int, mask: Mask) -> None:
    q, k, v = inputs(rng, 1, 2, 2, 33, 33, head_dim, mx.float16)
    check(q, k, v, mask, fused=False)
    with pytest.raises(ValueError, match=r"\[attention\] force_fused"):
        mlx_cuda.attention(q, k, v, mask=mask, force_fused=True)


@masks
def test_float32(rng: np.random.Generator, mask: Mask) -> None:
    q, k, v = inputs(rng, 2, 2, 2, 65, 65, 64, mx.float32)
    result = mlx_cuda.attention(q, k, v, mask=mask, force_fused=True)
    assert_fused(result, "FlashAttention")
    assert_close(result, expected(q, k, v, mask), tolerance=TOLERANCE[mx.float32])


@dtypes
@pytest.mark.parametrize("head_dim", [64, 192])
def test_array_masks(rng: np.random.Generator, head_dim: int, dtype: mx.Dtype) -> None:
    q, k, v = inputs(rng, 1, 2, 2, 40, 40, head_dim, dtype)
    visible = np.tril(np.ones((40, 40), dtype=bool))
    additive = device(np.where(visible, 0.0, -1e4), dtype)
    for mask in mx.array(visible), additive:
        assert_close(mlx_cuda.attention(q, k, v, mask=mask), expected(q, k, v, "causal"), tolerance=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "options", "engine"),
    [
        ((1, 4, 2, 300, 300, 128, 128), {"mask": "causal"}, "cudnn"),
        ((1, 4, 2, 300, 300, 192, 128), {"mask": "causal", "window_size": 100, "sinks": True}, "cudnn"),
        ((1, 4, 2, 300, 300, 128, 128), {"mask": "bool"}, "flash"),
        ((1, 4, 2, 300, 300, 128, 128), {"softcap": 20.0, "window_size": (50, 20)}, "flash"),
        ((1, 4, 2, 300, 300, 256, 256), {"mask": "additive", "lengths": [200]}, "flash"),
        ((1, 4, 2, 300, 100, 64, 64), {"mask": "causal"}, "flash"),
        ((1, 4, 2, 100, 300, 512, 512), {}, "flash"),
        ((1, 4, 2, 100, 300, 576, 512), {"mask": "causal"}, "flash"),
        ((1, 4, 2, 1, 300, 576, 512), {}, "decode"),
        ((2, 8, 2, 8, 300, 128, 128), {"mask": "bool", "softcap": 20.0, "sinks": True, "lengths": [200, 0]}, "decode"),
    ],
    ids=str,
)
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
def test_engines(rng: np.random.Generator, shape: tuple[int, ...], options: dict[str, Any], engine: str, lse: bool) -> None:
    """Each is reached by what it is for, in one primitive; that results are right is test_fuzz.py's."""
    b, h, h_kv, t, s, d, v_d = shape
    q, k, v = normal(rng, (b, h, t, d), mx.bfloat16), normal(rng, (b, h_kv, s, d), mx.bfloat16), normal(rng, (b, h_kv, s, v_d), mx.bfloat16)
    options = dict(options)
    if options.get("mask") in {"bool", "additive"}:
        options["mask"] = device(rng.random((t, s)) < 0.8, mx.bool_ if options["mask"] == "bool" else mx.bfloat16)
    if "sinks" in options:
        options["sinks"] = normal(rng, (h,), mx.bfloat16)
    if "lengths" in options:
        options["lengths"] = mx.array(options["lengths"], mx.int32)
    choice = mlx_cuda.explain(q, k, v, return_lse=lse, **options)
    if engine == "cudnn":
        engine = cudnn_or_flash(d)
    elif d > 512 and has_small_memory():
        engine = "flash"
    assert choice.engine == engine, choice.reason
    call: Any = mlx_cuda.attention
    result = call(q, k, v, return_lse=lse, force_fused=True, **options)
    results = list(result) if lse else [result]
    assert ENGINES[engine] in primitives(*results)
    mx.eval(results)
    assert [array.shape for array in results] == [(b, h, t, v_d), (b, h, t)][: len(results)]


def test_force_fused_refuses_what_no_kernel_takes(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, 1, 2, 2, 40, 40, 100, mx.float16)
    with pytest.raises(ValueError, match=r"\[attention\] force_fused is set.*needs head_dim a multiple of 8, not 100"):
        mlx_cuda.attention(q, k, v, mask=mx.ones((40, 40), mx.bool_), force_fused=True)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("t", "s"), [(1, 130), (64, 65), (127, 300), (65, 64), (300, 127), (40, 1)])
def test_causal_is_aligned_to_the_lower_right(rng: np.random.Generator, t: int, s: int, head_dim: int, dtype: mx.Dtype) -> None:
    """With more queries than keys the first ones see nothing, and give zeros rather than NaN."""
    q, k, v = inputs(rng, 2, 2, 2, t, s, head_dim, dtype)
    result = mlx_cuda.attention(q, k, v, mask="causal")
    assert_close(result, expected(q, k, v, "causal"), tolerance=2 * TOLERANCE[dtype])
    assert (host(result)[:, :, : max(t - s, 0)] == 0).all()


@dtypes
@masks
@pytest.mark.parametrize("head_dim", [64, 256])
def test_huge_logits(rng: np.random.Generator, head_dim: int, mask: Mask, dtype: mx.Dtype) -> None:
    """Scores in the thousands, beyond the range of float16: the softmax must subtract its maximum, and keep scores in float32."""
    q, k, v = inputs(rng, 1, 2, 2, 129, 129, head_dim, dtype)
    q, k = 16 * q, 16 * k
    mx.eval(q, k)
    result = mlx_cuda.attention(q, k, v, scale=1.0, mask=mask, force_fused=True)
    assert_close(result, expected(q, k, v, mask, 1.0), tolerance=TOLERANCE[dtype])


@dtypes
@masks
@pytest.mark.parametrize("scale", [0.0, 0.05, 0.3, -0.125])
def test_scale(rng: np.random.Generator, scale: float, mask: Mask, dtype: mx.Dtype) -> None:
    check(*inputs(rng, 1, 2, 2, 64, 64, 64, dtype), mask, fused=False, scale=scale)


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "from [B, T, H, D]": lambda a: a.transpose(0, 2, 1, 3),
    "from [T, B, H, D]": lambda a: a.transpose(1, 2, 0, 3),
    "from [B, T, D, H]": lambda a: a.transpose(0, 3, 1, 2),
    "some heads": lambda a: a[:, 1:5],
    "every other head": lambda a: a[:, ::2],
    "every other position": lambda a: a[:, :, ::2],
    "backwards": lambda a: a[:, :, ::-1],
    "one batch for all": lambda a: mx.broadcast_to(a[:1], (3, *a.shape[1:])),
    "one head for all": lambda a: mx.broadcast_to(a[:, :1], (a.shape[0], 4, *a.shape[2:])),
}


@dtypes
@masks
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(rng: np.random.Generator, view: Callable[[mx.array], mx.array], mask: Mask, dtype: mx.Dtype) -> None:
    for head_dim in 64, 256:
        q, k, v = (view(normal(rng, (5, 8, 96, head_dim), dtype)) for _ in range(3))
        mx.eval(q, k, v)
        check(q, k, v, mask)
        plain = normal(rng, q.shape, dtype)
        check(q, plain, v, mask)
        check(plain, k, plain, mask)


@dtypes
@masks
def test_misaligned_data(rng: np.random.Generator, mask: Mask, dtype: mx.Dtype) -> None:
    """Rows that do not start on 16 bytes: head dimensions cut from a wider array at an odd element."""
    for offset, width in (1, 66), (4, 72), (8, 72), (0, 65):
        q, k, v = (normal(rng, (2, 2, 33, width), dtype)[..., offset : offset + 64] for _ in range(3))
        mx.eval(q, k, v)
        check(q, k, v, mask)


@dtypes
def test_packed_projection(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """q, k and v as views of one projection, as models make them; and the result back to [B, T, H * D]."""
    packed = normal(rng, (2, 50, 3 * 4 * 64), dtype)
    q, k, v = (part.reshape(2, 50, 4, 64).transpose(0, 2, 1, 3) for part in mx.split(packed, 3, axis=-1))
    mx.eval(q, k, v)
    check(q, k, v, "causal")
    merged = mlx_cuda.attention(q, k, v, mask="causal").transpose(0, 2, 1, 3).reshape(2, 50, 256)
    exact = expected(q, k, v, "causal").transpose(0, 2, 1, 3).reshape(2, 50, 256)
    assert_close(merged, exact, tolerance=TOLERANCE[dtype])


@masks
@pytest.mark.parametrize(("b", "h", "t", "s", "d"), [(0, 2, 4, 4, 64), (1, 0, 4, 4, 64), (1, 2, 0, 4, 64), (1, 2, 0, 0, 64)])
def test_empty(b: int, h: int, t: int, s: int, d: int, mask: Mask) -> None:
    q, kv = mx.ones((b, h, t, d), mx.float16), mx.ones((b, h, s, d), mx.float16)
    result = mlx_cuda.attention(q, kv, kv, mask=mask)
    assert result.shape == (b, h, t, d)
    mx.eval(result)


@masks
def test_no_keys_give_zeros(mask: Mask) -> None:
    q, kv = mx.ones((1, 2, 3, 64), mx.float16), mx.ones((1, 2, 0, 64), mx.float16)
    assert (host(mlx_cuda.attention(q, kv, kv, mask=mask)) == 0).all()


@dtypes
@masks
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_vjp(rng: np.random.Generator, head_dim: int, mask: Mask, dtype: mx.Dtype) -> None:
    q, k, v = inputs(rng, 2, 4, 2, 65, 65, head_dim, dtype)
    cotangent = normal(rng, q.shape, dtype)
    scale = head_dim**-0.5

    def function(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mlx_cuda.attention(q, k, v, scale=scale, mask=mask, force_fused=True)

    gradients = mx.vjp(function, [q, k, v], [cotangent])[1]
    exact = reference.attention_vjp(host(q), host(k), host(v), host(cotangent), scale=scale, causal=mask == "causal")
    for gradient, of_float64 in zip(gradients, exact, strict=True):
        assert gradient.dtype == dtype
        assert_close(gradient, of_float64, tolerance=GRADIENT_TOLERANCE[dtype])


@dtypes
@masks
def test_vmap(rng: np.random.Generator, mask: Mask, dtype: mx.Dtype) -> None:
    q, k, v = (normal(rng, (3, 2, 4, 20, 64), dtype) for _ in range(3))
    k, v = k[:, :, :2], v[:, :, :2]
    function = partial(mlx_cuda.attention, mask=mask, force_fused=True)
    exact = np.stack([expected(q[i], k[i], v[i], mask) for i in range(3)])
    assert_close(mx.vmap(function)(q, k, v), exact, tolerance=TOLERANCE[dtype])
    moved = mx.vmap(function, in_axes=(2, 0, 1), out_axes=1)(mx.moveaxis(q, 0, 2), k, mx.moveaxis(v, 0, 1))
    assert_close(moved, np.moveaxis(exact, 0, 1), tolerance=TOLERANCE[dtype])
    shared = np.stack([expected(q[i], k[0], v[0], mask) for i in range(3)])
    assert_close(mx.vmap(function, in_axes=(0, None, None))(q, k[0], v[0]), shared, tolerance=TOLERANCE[dtype])


@dtypes
@masks
@pytest.mark.parametrize("head_dim", [64, 256])
def test_compiled_equals_eager(rng: np.random.Generator, head_dim: int, mask: Mask, dtype: mx.Dtype) -> None:
    function = partial(mlx_cuda.attention, mask=mask, force_fused=True)
    compiled = mx.compile(function)
    for length in 40, 41, 40:
        arrays = inputs(rng, 1, 4, 2, length, length, head_dim, dtype)
        assert mx.array_equal(compiled(*arrays), function(*arrays))


@dtypes
@masks
def test_writes_all_of_its_output(rng: np.random.Generator, mask: Mask, dtype: mx.Dtype) -> None:
    for t, head_dim in (65, 64), (130, 256), (5, 128):
        q, k, v = inputs(rng, 2, 2, 2, t, t, head_dim, dtype)
        poison(partial(mlx_cuda.attention, q, k, mx.full(v.shape, float("nan"), dtype), mask=mask), q.shape, dtype)
        check(q, k, v, mask)


@dtypes
def test_nan_stays_in_its_head(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v = inputs(rng, 2, 2, 2, 33, 33, 64, dtype)
    v[1, 0, 5, 7] = float("nan")
    nan = np.isnan(host(mlx_cuda.attention(q, k, v, force_fused=True)))
    assert nan[1, 0, :, 7].all()
    assert not nan[0].any()
    assert not nan[1, 1].any()


def test_more_shapes_than_plans_are_kept(rng: np.random.Generator) -> None:
    """Growing key lengths, evaluated together, some of them again."""
    lengths = [*range(64, 364), *range(64, 74)]
    q, k, v = inputs(rng, 1, 2, 2, 16, 400, 64, mx.float16)
    results = [mlx_cuda.attention(q, k[:, :, :s], v[:, :, :s], mask="causal", force_fused=True) for s in lengths]
    mx.eval(results)
    for s, result in zip(lengths, results, strict=True):
        assert_close(result, expected(q, k[:, :, :s], v[:, :, :s], "causal"), tolerance=TOLERANCE[mx.float16])
