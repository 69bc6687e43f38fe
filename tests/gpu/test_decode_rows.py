"""Few queries whose heads are more rows than one tile of tensor cores, and how results of parts are merged."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.options import Options
from mlx_cuda._loader import native as _native

from tests.package import references

from .support import DTYPES, TOLERANCE, host, normal, relative_error

pytestmark = pytest.mark.gpu

HALF = {name: dtype for name, dtype in DTYPES.items() if dtype != mx.float32}
dtypes = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF.keys())


def decode(
    q: mx.array, k: mx.array, v: mx.array, scale: float, softcap: float = 0.0, window: tuple[int, int] = (-1, -1), **extra: Any
) -> Any:
    """The kernels themselves, whatever the dispatch would choose: the result and the logarithms of the sums."""
    engine = _native.engine(mx.default_stream(mx.gpu))
    assert not isinstance(engine, str), engine
    module: Any = engine.module
    return module.decode_attention(q, k, v, Options(scale, softcap, window, lse=True, **extra), mx.default_stream(mx.gpu))


# Rows: what one warpgroup holds and a part of it, what two hold, and what takes several blocks.
@dtypes
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
@pytest.mark.parametrize(("t", "groups"), [(5, 4), (16, 4), (17, 4), (32, 4), (33, 5), (1, 71)])
def test_many_rows(rng: np.random.Generator, t: int, groups: int, dim: int, dtype: mx.Dtype) -> None:
    q = normal(rng, (2, 2 * groups, t, dim), dtype)
    for s in (t, 64, 65, 1000, 5003):
        k, v = normal(rng, (2, 2, s, dim), dtype), normal(rng, (2, 2, s, dim), dtype)
        expected = references.attention(host(q), host(k), host(v), mask=references.seen(t, s, window=(-1, 0)))
        result, _ = decode(q, k, v, dim**-0.5, window=(-1, 0))
        assert relative_error(result, expected) <= TOLERANCE[dtype], s


@dtypes
@pytest.mark.parametrize("rows_first", [False, True])
def test_many_rows_with_options(rng: np.random.Generator, rows_first: bool, dtype: mx.Dtype) -> None:
    """Keys that begin and end anywhere, none at all too, with NaN around them, a window, a softcap, sinks and a mask."""
    b, t, s, dim = 4, 12, 700, 128
    starts, ends = np.array([0, 130, 699, 300]), np.array([700, 333, 700, 300])
    q = normal(rng, (b, t, 16, dim) if rows_first else (b, 16, t, dim), dtype)
    q = q.transpose(0, 2, 1, 3) if rows_first else q
    place = mx.arange(s)[None, None, :, None]
    there = (place >= mx.array(starts)[:, None, None, None]) & (place < mx.array(ends)[:, None, None, None])
    k, v = (normal(rng, (b, 4, s, dim), dtype) for _ in range(2))
    bad_k, bad_v = (mx.where(there, each, float("nan")).astype(dtype) for each in (k, v))
    mask = mx.broadcast_to(mx.array(rng.random((b, 1, t, s)) < 0.8), (b, 16, t, s))
    sinks = normal(rng, (16,), dtype)
    exact = tuple(map(host, (q, k, v)))
    every: tuple[dict[str, Any], ...] = (
        {}, {"softcap": 3.0}, {"mask": mask}, {"mask": mask, "sinks": sinks}, {"sinks": sinks, "softcap": 8.0},
    )  # fmt: skip
    for window in ((-1, -1), (-1, 0), (100, 0), (50, 3)):
        for options in every:
            seen = np.broadcast_to(references.seen(t, s, window=window, starts=starts, ends=ends), (b, 16, t, s))
            seen = seen & host(mask).astype(bool) if "mask" in options else seen
            expected = references.attention(
                *exact, mask=seen, softcap=options.get("softcap", 0.0), sinks=host(sinks) if "sinks" in options else None
            )
            given: dict[str, Any] = {**options, "starts": mx.array(starts.astype(np.int32)), "ends": mx.array(ends.astype(np.int32))}
            result, _ = decode(q, bad_k, bad_v, dim**-0.5, window=window, **given)
            assert relative_error(result, expected) <= 1.5 * TOLERANCE[dtype], (window, options.keys())


@dtypes
@pytest.mark.parametrize(("t", "dim"), [(1, 64), (1, 128), (1, 256), (16, 64), (16, 128), (16, 256)])
def test_any_layout_and_scale(rng: np.random.Generator, t: int, dim: int, dtype: mx.Dtype) -> None:
    """Keys of which all heads are one, in reverse order, or a part of a longer cache; scores that a negative scale makes large."""
    q, cache = normal(rng, (2, 8, t, dim), dtype), normal(rng, (2, 2, 1200, dim), dtype)
    for k in (cache, mx.broadcast_to(cache[:, :1], cache.shape), cache[:, :, ::-1], cache[:, :, 100:1111], cache[:, :, ::3]):
        queries, keys = host(q), host(k)
        for scale in (dim**-0.5, -4.0):
            result, _ = decode(q, k, k, scale)
            expected = references.attention(queries, keys, keys, scale=scale)
            assert relative_error(result, expected) <= TOLERANCE[dtype], (k.shape, scale)


@dtypes
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("b", "kv_heads", "s"), [(1, 1, 4099), (1, 8, 4099), (5, 8, 4099), (3, 23, 1299)])
def test_parts_are_merged_the_same_way_each_time(
    rng: np.random.Generator, b: int, kv_heads: int, s: int, dim: int, dtype: mx.Dtype
) -> None:
    """Whichever block comes last: many calls at once, in memory that other calls have left, all give the same bits."""
    q, k, v = (normal(rng, (b, h, n, dim), dtype) for h, n in ((4 * kv_heads, 1), (kv_heads, s), (kv_heads, s)))
    exact = tuple(map(host, (q, k, v)))
    lengths = mx.array(rng.integers(0, s + 1, b).astype(np.int32))
    for ends in (None, lengths):
        calls = [decode(q, k, v, dim**-0.5, ends=ends) for _ in range(40)]
        mx.eval(calls)
        (first, logarithms), *others = calls
        seen = references.seen(1, s, ends=None if ends is None else np.array(ends))
        expected = references.attention(*exact, mask=np.broadcast_to(seen, (b, 4 * kv_heads, 1, s)))
        assert relative_error(first, expected) <= TOLERANCE[dtype]
        same = [mx.array_equal(*pair) for result, sums in others for pair in ((result, first), (sums, logarithms))]
        assert mx.stack(same).all()


def test_masks_that_hide_all_but_little(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (2, h, n, 128), mx.bfloat16) for h, n in ((8, 1), (2, 3000), (2, 3000)))
    for count in (0, 1, 50):
        chosen = np.zeros((2, 1, 1, 3000), dtype=bool)
        chosen[1, ..., rng.integers(0, 3000, count)] = True
        result = mlx_cuda.attention(q, k, v, mask=mx.array(chosen), force_fused=True)
        expected = references.attention(host(q), host(k), host(v), mask=np.broadcast_to(chosen, (2, 8, 1, 3000)))
        assert relative_error(result, expected) <= TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize("t", [8, 32])
def test_many_calls_at_once(t: int) -> None:
    """Several calls on the GPU at a time, their keys partly in its cache, so that tiles arrive in another order than asked for."""
    sizes = (8192, 1000, 3000)
    keys = [tuple(mx.random.normal((8, 8, s, 128)).astype(mx.bfloat16) for _ in range(2)) for s in sizes]
    queries = mx.random.normal((8, 32, t, 128)).astype(mx.bfloat16)
    mx.eval(queries, keys)

    def call(k: mx.array, v: mx.array) -> mx.array:
        result: mx.array = decode(queries, k, v, 128**-0.5, window=(-1, 0))[0]
        return result

    alone = []
    for pair in keys:
        alone.append(call(*pair))
        mx.eval(alone)
    together = [call(*pair) for _ in range(100) for pair in keys]
    mx.eval(together)
    assert mx.stack([mx.array_equal(result, alone[i % len(sizes)]) for i, result in enumerate(together)]).all()
    expected = references.attention(host(queries), host(keys[1][0]), host(keys[1][1]), mask="causal")
    assert relative_error(alone[1], expected) <= TOLERANCE[mx.bfloat16]
