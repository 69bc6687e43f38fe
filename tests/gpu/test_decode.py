"""The kernel for few queries, against float64: every option, layouts as models make them, and what lies beside the data."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.options import Options
from mlx_cuda._common.limits import Attention
from mlx_cuda._loader import native as _native

from tests.package import references

from . import cases, trials
from .support import (
    DTYPES,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_close,
    assert_fused,
    has_small_memory,
    host,
    normal,
    poison,
    primitives,
    relative_error,
)

pytestmark = pytest.mark.gpu

HALF = {name: dtype for name, dtype in DTYPES.items() if dtype != mx.float32}
dtypes = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF.keys())


LAYOUTS = ("contiguous", "rows first", "cache", "unaligned")
WINDOWS = list(itertools.product((-1, 0, 5, 100), (-1, -1, 0, 3)))
SIZES = (1.0, 4.0, 1.0, 16.0)  # of scores
RANDOM: Any = {
    "dims": [(dim, dim) for dim in (8, 16, 40, 64, 72, 80, 96, 128, 136, 160, 192, 256)],
    "lengths": ((1, 1, 1, 2, 3, 4, 7, 8, 13, 16, 32), (1, 2, 7, 16, 17, 31, 128, 129, 300, 1000, 4100)),
    "layouts": LAYOUTS,
    "rows": 128,
    "lse": False,
}


def laid_out(chance: random.Random, rng: np.random.Generator, b: int, h: int, t: int, d: int, dtype: mx.Dtype) -> mx.array:
    return trials.laid_out(rng.standard_normal((b, h, t, d), np.float32), chance.choice(LAYOUTS), dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed: int, dtype: Any) -> None:
    for each in range(60 * seed, 60 * seed + 60):
        case = cases.dense(each, dtype, **RANDOM, window=WINDOWS[each % len(WINDOWS)], size=SIZES[each // 2 % len(SIZES)])
        given, options = trials.dense(case, arrays := cases.inputs(case))
        result = mlx_cuda.attention(**given, **options, force_fused=True)
        engine = mlx_cuda.explain(**given, **options).engine
        # Short caches are MLX's, and what cuDNN takes of many rows is cuDNN's, or flash's where the keys are those of a growing cache.
        rows = case.q_len * case.heads // case.kv_heads
        assert engine == "decode" or (rows > Attention().decode and engine == ("cudnn" if case.q_len == case.k_len else "flash")), case
        assert ("DecodeAttention" in primitives(result)) == (engine == "decode"), case
        error = relative_error(result, cases.expected(case, arrays).values["out"][0])
        assert error <= 1.5 * TOLERANCE[DTYPES[dtype]], (error, case)


def logarithms(q: mx.array, k: mx.array, mask: Any, scale: float, softcap: float, sinks: mx.array | None) -> Any:
    scores = host(q) @ np.repeat(host(k), q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    scores = np.where(mask, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(host(sinks).reshape(1, -1, 1, 1), (*scores.shape[:3], 1))], axis=3)
    peak = np.where(np.isfinite(scores.max(axis=3)), scores.max(axis=3), 0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - peak[..., None]).sum(axis=3)) + peak


# batch, kv heads and keys: parts of units, parts across their borders, and whole units, in one wave and in several
MANY = [(5, 8, 1031), (25, 4, 401), (33, 8, 300), (66, 4, 335), (33, 16, 97)]


@dtypes
@pytest.mark.parametrize(("b", "kv_heads", "s"), MANY)
@pytest.mark.parametrize("seed", range(2))
def test_many_units_alike(seed: int, b: int, kv_heads: int, s: int, dtype: mx.Dtype) -> None:
    """Caches of one length and no mask, as most calls of a batch are: these have kernels of their own."""
    chance = random.Random(f"{seed} {b} {s}")  # noqa: S311
    rng = np.random.default_rng(chance.getrandbits(32))
    for dim in (64, 128, chance.choice((40, 72, 256))):
        groups, t = chance.choice(((1, 1), (4, 1), (7, 1), (16, 1), (1, 5), (4, 4)))
        heads = kv_heads * groups
        q, k, v = (laid_out(chance, rng, b, h, n, dim, dtype) for h, n in ((heads, t), (kv_heads, s), (kv_heads, s)))
        options: dict[str, Any] = {"scale": chance.choice((dim**-0.5, -0.2)), "mask": "causal" if t > 1 else None}
        if chance.random() < 0.3:
            options["softcap"] = 5.0
        sinks = normal(rng, (heads,), dtype) if chance.random() < 0.5 else None
        result = mlx_cuda.attention(q, k, v, force_fused=True, sinks=sinks, **options)
        assert "DecodeAttention" in primitives(result)
        extra = None if sinks is None else host(sinks)
        expected = references.attention(host(q), host(k), host(v), sinks=extra, **options)
        assert relative_error(result, expected) <= TOLERANCE[dtype], (q.shape, k.shape, options)


# head_dim of q and k and of v, and whether v is the first columns of k, as in MLA
DIMS = [(64, 64, False), (128, 128, False), (192, 128, False), (256, 256, False), (512, 512, False), (576, 512, True), (264, 40, False)]


@dtypes
@pytest.mark.parametrize(("dim", "value_dim", "shared"), DIMS)
@pytest.mark.parametrize("seed", range(3))
def test_every_width_with_logarithms(seed: int, dim: int, value_dim: int, shared: bool, dtype: mx.Dtype) -> None:
    """The module's own function: any number of rows, heads that differ, and the logarithms of the sums."""
    if dim > 256 and has_small_memory():
        pytest.skip("its blocks have too little memory for heads this wide")
    engine = _native.engine(mx.default_stream(mx.gpu))
    assert not isinstance(engine, str), engine
    module: Any = engine.module
    chance = random.Random(f"{seed} {dim}")  # noqa: S311
    rng = np.random.default_rng(chance.getrandbits(32))
    for _ in range(4):
        b, kv_heads, groups = chance.choice((1, 3)), 1 if shared else chance.choice((1, 2)), chance.choice((1, 4, 16, 33, 128))
        t, s = chance.choice((1, 1, 3, 32)), chance.choice((1, 15, 129, 1000, 3000))
        heads = kv_heads * groups
        q, k = laid_out(chance, rng, b, heads, t, dim, dtype), normal(rng, (b, kv_heads, s, dim), dtype)
        v = k[..., :value_dim] if shared else laid_out(chance, rng, b, kv_heads, s, value_dim, dtype)
        lengths = np.array([chance.randint(0, s) for _ in range(b)])
        window = (chance.choice((-1, -1, 20)), chance.choice((-1, 0)))
        softcap, sinks = chance.choice((0.0, 0.0, 5.0)), normal(rng, (heads,), dtype) if chance.random() < 0.3 else None
        ends = mx.repeat(mx.array(lengths.astype(np.int32)), 2)[::2] if chance.random() < 0.5 else None
        seen = references.seen(t, s, window=window, ends=np.full(b, s) if ends is None else lengths)
        options = Options(dim**-0.5, softcap, window, sinks=sinks, ends=ends, lse=True)
        out, lse = module.decode_attention(q, k, v, options, mx.default_stream(mx.gpu))
        extra = None if sinks is None else host(sinks)
        expected = references.attention(
            host(q), host(k), host(v), mask=np.broadcast_to(seen, (b, heads, t, s)), softcap=softcap, sinks=extra
        )
        what = (q.shape, k.shape, window, softcap, ends is not None, sinks is not None)
        assert relative_error(out, expected) <= 1.5 * TOLERANCE[dtype], what
        assert np.allclose(host(lse), logarithms(q, k, seen, dim**-0.5, softcap, sinks), atol=1e-2), what


# batch, and by how many keys lengths differ: each block has a part of one unit, or of several where one length is far from the others
# or there are more units than blocks
ABOUT_EQUAL = [(2, 0), (3, 40), (5, 200), (8, 40), (33, 200), (8, 1400)]


@dtypes
@pytest.mark.parametrize(("b", "spread"), ABOUT_EQUAL)
@pytest.mark.parametrize(("dim", "t"), [(128, 1), (256, 1), (64, 5), (128, 33), (512, 1)])
def test_lengths_about_equal(rng: np.random.Generator, dim: int, t: int, b: int, spread: int, dtype: mx.Dtype) -> None:
    """Of caches with spare rows of NaN, whose sequences also begin at different rows."""
    if dim > 256 and has_small_memory():
        pytest.skip("its blocks have too little memory for heads this wide")
    heads, kv_heads, s = 8, 8 if t == 1 else 2, 1500
    starts = rng.integers(0, 30, b)
    ends = 1470 - rng.integers(0, spread + 1, b)
    q, k, v = (normal(rng, (b, h, n, dim), dtype) for h, n in ((heads, t), (kv_heads, s), (kv_heads, s)))
    unused = mx.array((np.arange(s) < starts[:, None]) | (np.arange(s) >= ends[:, None]))[:, None, :, None]
    k, v = (mx.where(unused, float("nan"), each) for each in (k, v))
    given: dict[str, Any] = {"lengths": mx.array(ends.astype(np.int32)), "left_padding": mx.array(starts.astype(np.int32))}
    result = host(mlx_cuda.attention(q, k, v, mask="causal", force_fused=True, **given))
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        one = (host(each[at : at + 1, :, start:end]) for each in (k, v))
        expected = references.attention(host(q[at : at + 1]), *one, mask="causal")
        assert relative_error(result[at : at + 1], expected) <= TOLERANCE[dtype], (at, start, end)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("t", "s"), [(1, 256), (1, 5000), (3, 20000), (16, 3000)])
def test_plain_calls_are_one_primitive(rng: np.random.Generator, head_dim: int, t: int, s: int, dtype: mx.Dtype) -> None:
    q, k, v = normal(rng, (2, 8, t, head_dim), dtype), normal(rng, (2, 2, s, head_dim), dtype), normal(rng, (2, 2, s, head_dim), dtype)
    first = mlx_cuda.attention(q, k, v, mask="causal")
    assert_fused(first, "DecodeAttention")
    expected = references.attention(host(q), host(k), host(v), mask="causal")
    assert_close(first, expected, tolerance=TOLERANCE[dtype])
    again = mlx_cuda.attention(q, k, v, mask="causal")  # cached: straight to the primitive
    assert_fused(again, "DecodeAttention")
    assert mx.array_equal(first, again)


def test_remembered_calls_do_not_remember_the_length(rng: np.random.Generator) -> None:
    q = normal(rng, (1, 4, 1, 64), mx.float16)
    for s in (5, 256, 257, 1000):
        k, v = normal(rng, (1, 2, s, 64), mx.float16), normal(rng, (1, 2, s, 64), mx.float16)
        assert_close(mlx_cuda.attention(q, k, v), references.attention(host(q), host(k), host(v)), tolerance=TOLERANCE[mx.float16])
    with pytest.raises(ValueError, match=r"\[attention\]"):
        mlx_cuda.attention(q, k, v[:, :, :-1])


@dtypes
def test_what_lies_in_memory_does_not_matter(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v = normal(rng, (2, 8, 1, 128), dtype), normal(rng, (2, 2, 3000, 128), dtype), normal(rng, (2, 2, 3000, 128), dtype)
    bad = k * float("nan")
    poison(lambda: mlx_cuda.attention(q, bad, bad), q.shape, dtype)
    lengths = mx.array([0, 2001], mx.int32)
    result = host(mlx_cuda.attention(q, k, v, lengths=lengths))
    assert np.array_equal(result[0], np.zeros_like(result[0]))
    assert np.isfinite(result).all()


@dtypes
def test_hidden_keys_may_hold_anything(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v = normal(rng, (1, 4, 2, 64), dtype), normal(rng, (1, 4, 100, 64), dtype), normal(rng, (1, 4, 100, 64), dtype)
    expected = mlx_cuda.attention(q, k[:, :, 10:50], v[:, :, 10:50])
    bad = mx.arange(100)[:, None] < 10
    late = mx.arange(100)[:, None] >= 50
    spoilt = (mx.where(bad | late, float("nan"), each) for each in (k, v))
    result = mlx_cuda.attention(q, *spoilt, lengths=mx.array([50]), left_padding=mx.array([10]))
    assert relative_error(result, host(expected)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("size", [1e2, 3e3])
@dtypes
def test_huge_scores(rng: np.random.Generator, size: float, dtype: mx.Dtype) -> None:
    q, k, v = normal(rng, (1, 4, 1, 64), dtype, size), normal(rng, (1, 2, 500, 64), dtype), normal(rng, (1, 2, 500, 64), dtype)
    assert_close(mlx_cuda.attention(q, k, v), references.attention(host(q), host(k), host(v)), tolerance=TOLERANCE[dtype])


@dtypes
def test_gradients(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Against the same call in float32, which is composed."""
    q, k, v = normal(rng, (2, 4, 3, 64), dtype), normal(rng, (2, 2, 50, 64), dtype), normal(rng, (2, 2, 50, 64), dtype)
    sinks, weight = normal(rng, (4,), dtype), normal(rng, (2, 4, 3, 64), mx.float32)
    options: dict[str, Any] = {"mask": "causal", "softcap": 5.0, "window_size": 20, "lengths": mx.array([50, 0], mx.int32)}

    def loss(*arrays: mx.array) -> mx.array:
        q, k, v, sinks = arrays
        out: mx.array = mlx_cuda.attention(q, k, v, sinks=sinks, **options)
        return (out.astype(mx.float32) * weight).sum()

    wide = mx.grad(loss, argnums=(0, 1, 2, 3))(*(each.astype(mx.float32) for each in (q, k, v, sinks)))
    for actual, expected in zip(mx.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks), wide, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, host(expected)) <= GRADIENT_TOLERANCE[dtype]


def test_compiled_and_vectorised(rng: np.random.Generator) -> None:
    q, k, v = normal(rng, (2, 4, 1, 64), mx.float16), normal(rng, (2, 2, 50, 64), mx.float16), normal(rng, (2, 2, 50, 64), mx.float16)
    expected = host(mlx_cuda.attention(q, k, v, window_size=20))
    compiled = mx.compile(lambda *a: mlx_cuda.attention(*a, window_size=20))
    assert relative_error(compiled(q, k, v), expected) <= TOLERANCE[mx.float16]
    mapped = mx.vmap(lambda *a: mlx_cuda.attention(*(each[None] for each in a), window_size=20)[0])
    assert relative_error(mapped(q, k, v), expected) <= 2 * TOLERANCE[mx.float16]


def test_patch_routes_mlx_calls_here(rng: np.random.Generator) -> None:
    q, k, v = (
        normal(rng, (2, 8, 1, 128), mx.bfloat16),
        normal(rng, (2, 2, 300, 128), mx.bfloat16),
        normal(rng, (2, 2, 300, 128), mx.bfloat16),
    )
    mask = mx.array(rng.random((2, 1, 1, 300)) < 0.5)
    cases: tuple[dict[str, Any], ...] = ({}, {"mask": mask}, {"sinks": normal(rng, (8,), mx.bfloat16)}, {"mask": "causal"})
    for options in cases:
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, **options)
        with mlx_cuda.patch():
            result = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, **options)
        assert "DecodeAttention" in primitives(result)
        assert relative_error(result, host(expected)) <= 2 * TOLERANCE[mx.bfloat16]
