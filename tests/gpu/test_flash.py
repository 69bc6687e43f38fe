"""The kernels for many queries, against float64: every option and layout, packed sequences, and what lies beside the data."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import mlx_cuda._loader.native
import numpy as np
import pytest
from mlx_cuda._attention.options import Options

from tests.package import references

from . import cases, trials
from .support import DTYPES, GRADIENT_TOLERANCE, TOLERANCE, host, normal, primitives, relative_error

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def asked(*, scale: float = 0.125, window_left: int = -1, window_right: int = -1, with_lse: bool = True, **options: Any) -> Options:
    return Options(scale, window=(window_left, window_right), lse=with_lse, **options)


def flash(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> list[mx.array]:
    module: Any = mlx_cuda._loader.native.load()
    results: list[mx.array] = module.flash_attention(q, k, v, asked(**options), mx.default_stream(mx.gpu))
    return results


def flash_varlen(q: mx.array, k: mx.array, v: mx.array, lengths: list[int], kv_lengths: list[int], **options: Any) -> list[mx.array]:
    module: Any = mlx_cuda._loader.native.load()
    ends = offsets(lengths), offsets(kv_lengths)
    results: list[mx.array] = module.flash_varlen(
        q, k, v, *ends, max(lengths), max(kv_lengths), asked(**options), mx.default_stream(mx.gpu)
    )
    return results


def offsets(lengths: list[int]) -> mx.array:
    return mx.array(list(itertools.accumulate(lengths, initial=0)), mx.int32)


def reference(q: mx.array, k: mx.array, v: mx.array, seen: Any, **options: Any) -> tuple[references.Array, references.Array]:
    """The output and the logarithms of the sums; ``seen`` is a bool or an additive mask."""
    sinks, softcap, scale = options.get("sinks"), options.get("softcap", 0.0), options.get("scale", 0.125)
    wide = None if sinks is None else host(sinks)
    out = references.attention(host(q), host(k), host(v), scale=scale, mask=seen, softcap=softcap, sinks=wide)
    scores = host(q) @ np.repeat(host(k), q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf) if seen.dtype == np.bool_ else scores + seen
    if wide is not None:
        scores = np.concatenate([scores, np.broadcast_to(wide.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))], axis=3)
    add: Any = np.logaddexp
    return out, add.reduce(scores, axis=3)


def assert_right(results: list[mx.array], out: references.Array, lse: references.Array, dtype: mx.Dtype, about: object = "") -> None:
    error = relative_error(results[0], out)
    assert error <= 1.5 * TOLERANCE[dtype], (error, about)
    if len(results) > 1:
        assert results[1].dtype == mx.float32
        actual, there = host(results[1]), np.isfinite(lse)
        assert actual.shape == lse.shape
        assert np.array_equal(np.isneginf(actual), ~there), about
        size = np.maximum(np.abs(lse[there]), 4.0)
        assert (np.abs(actual[there] - lse[there]) <= (1e-2 if dtype == mx.float32 else 1e-4) * size).all(), about


# Of the keys and of the values: multiples of 8, mostly the same, and long ones where there is a kernel for them.
NARROW = [(dim, v_dim) for dim in (8, 16, 40, 64, 72, 80, 96, 128, 136, 192, 200, 256) for v_dim in (dim, dim, 8, 64, 128, 256)]
WIDE = [(512, 512), (576, 512), (264, 8), (320, 320), (64, 512)] * 3
DIMS = {name: NARROW if name == "float32" else NARROW + WIDE for name in DTYPES}
LENGTHS = ((1, 2, 7, 31, 64, 128, 129, 300), (1, 2, 7, 31, 64, 128, 129, 300, 1000))
LAYOUTS = ("contiguous", "rows first", "cache", "unaligned", "one for all")
WINDOWS = list(itertools.product((-1, -1, 0, 5, 100, 2**31 - 1), (-1, 0, 0, 3, 2**31 - 1)))


def check(case: cases.Case) -> None:
    """One random call; a failure shows it."""
    dtype, arrays, (left, right) = DTYPES[case.dtype], cases.inputs(case), case.sides
    given, _ = trials.dense(case, arrays)
    options: dict[str, Any] = {"scale": case.factor, "softcap": case.softcap, "with_lse": case.lse, "sinks": given.get("sinks")}
    options |= {name: mx.array(each, mx.int32) for name, each in (("starts", case.starts), ("ends", case.ends)) if each is not None}
    if "mask" in arrays:
        shape = (case.batch, case.heads, case.q_len, case.k_len)
        options["mask"] = mx.broadcast_to(trials.on_device(arrays["mask"], dtype), shape)
    results = flash(given["q"], given["k"], given["v"], window_left=left, window_right=right, **options)
    assert "FlashAttention" in primitives(results[0])
    assert len(results) == 1 + case.lse
    values = cases.expected(case, arrays).values
    assert_right(results, values["out"][0], values["lse" if case.lse else "out"][0], dtype, case)


ROWS: list[tuple[int, ...]] = [(264,), (200, 264), (3, 200, 264), (2, 1, 1, 264), (2, 1, 200, 264), (2, 3, 200, 264), (1, 3, 1, 264)]


@dtypes
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_additive_masks_of_every_shape(rng: np.random.Generator, shape: tuple[int, ...], head_dim: int, dtype: mx.Dtype) -> None:
    q, k, v = (normal(rng, (2, heads, length, head_dim), dtype) for heads, length in ((3, 200), (1, 264), (1, 264)))
    mask = mx.broadcast_to(normal(rng, shape, dtype), (2, 3, 200, 264))
    assert_right(flash(q, k, v, mask=mask, with_lse=False), *reference(q, k, v, host(mask)), dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("length", [1, 63])
@pytest.mark.parametrize("keys", [1, 2, 3, 4])
def test_additive_masks_of_a_few_bytes(rng: np.random.Generator, keys: int, length: int, head_dim: int, dtype: mx.Dtype) -> None:
    """Which MLX's allocator puts on 8 bytes: of many at once some are not on the 16 that the copy engine takes."""
    q, k, v = (normal(rng, (1, heads, rows, head_dim), dtype) for heads, rows in ((2, length), (1, keys), (1, keys)))
    masks = [normal(rng, (keys,), dtype) for _ in range(16)]
    for mask in masks:
        everywhere = mx.broadcast_to(mask, (1, 2, length, keys))
        assert_right(flash(q, k, v, mask=everywhere, with_lse=False), *reference(q, k, v, host(everywhere)), dtype)


def additive(rng: np.random.Generator, rows: int, columns: int, dtype: mx.Dtype, *, all_seen: bool) -> mx.array:
    """Rows in turn: hidden; of the lowest number alone; of it but for some keys; about a low and a high number; half hidden; low for
    padding, as models write it, until near the end (with -1e9 float32 keeps no score, so some other key has to be seen).
    """
    mask = host(normal(rng, (rows, columns), dtype))
    row, lowest = np.arange(rows)[:, None] % 7, float(mx.finfo(dtype).min)
    mask = np.select(
        [
            row == 0,
            row == 1,
            (row == 2) & (rng.random(mask.shape) < 0.9),
            row == 3,
            row == 4,
            (row == 5) & (rng.random(mask.shape) < 0.5),
            (row == 6) & (np.arange(columns) < 0.8 * columns) & all_seen,
        ],
        [-np.inf, lowest, lowest, mask - 2e4, mask + 6e3, -np.inf, max(-1e9, lowest)],
        mask,
    )
    mask[: rows // 2, : columns // 2] = 0  # whole tiles without a bias
    return mx.array(mask.astype(np.float32)).astype(dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("columns", [1000, 1001], ids=str)
@pytest.mark.parametrize("options", [{}, {"window_left": 300, "window_right": 20}, {"ends": mx.array([700, 33], mx.int32)}], ids=str)
def test_rows_of_additive_masks(rng: np.random.Generator, options: dict[str, Any], columns: int, head_dim: int, dtype: mx.Dtype) -> None:
    """However large what a row has in common, its weights are those without it."""
    q, k, v = (normal(rng, (2, 2, length, head_dim), dtype) for length in (700, columns, columns))
    mask = additive(rng, 700, columns, dtype, all_seen=not options)
    wide = host(mask)
    peak = wide.max(axis=1, keepdims=True)
    window = (options.get("window_left", -1), options.get("window_right", -1))
    ends = host(options["ends"]).astype(int) if "ends" in options else None
    seen = references.seen(700, columns, window=window, ends=ends)
    bias = np.where(seen, wide - np.where(np.isfinite(peak), peak, 0), -np.inf)
    result = flash(q, k, v, mask=mx.broadcast_to(mask, (2, 2, 700, columns)), with_lse=False, **options)
    assert_right(result, *reference(q, k, v, np.broadcast_to(bias, (2, 2, 700, columns))), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_calls(seed: int, dtype: Any) -> None:
    for each in range(45 * seed, 45 * seed + 45):
        fields: Any = {"scale": (None, 0.3)[each % 2], "window": WINDOWS[each // 2 % len(WINDOWS)], "size": (1.0, 4.0)[each // 4 % 2]}
        check(cases.dense(each, dtype, DIMS[dtype], LENGTHS, LAYOUTS, **fields))


@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_many_tiles(rng: np.random.Generator, head_dim: int, causal: bool, dtype: mx.Dtype) -> None:
    if dtype == mx.float32 and head_dim > 256:
        pytest.skip("float32 has kernels up to 256")
    q, k, v = (normal(rng, (1, heads, 1100, head_dim), dtype) for heads in (4, 2, 2))
    window = (-1, 0 if causal else -1)
    seen = np.broadcast_to(references.seen(1100, 1100, window=window), (1, 4, 1100, 1100))
    scale = head_dim**-0.5
    results = flash(q, k, v, scale=scale, window_right=window[1])
    assert_right(results, *reference(q, k, v, seen, scale=scale), dtype)
    assert mx.array_equal(results[0], flash(q, k, v, scale=scale, window_right=window[1])[0])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_packed_sequences(seed: int, name: str) -> None:
    chance, dtype = random.Random(seed), DTYPES[name]  # noqa: S311
    rng = np.random.default_rng(seed)
    for _ in range(10):
        dim, v_dim = chance.choice(DIMS[name])
        kv_heads, groups = chance.choice((1, 2)), chance.choice((1, 3))
        heads, count = kv_heads * groups, chance.choice((1, 2, 5))
        lengths, kv_lengths = ([chance.choice((0, 1, 5, 64, 129, 400)) for _ in range(count)] for _ in range(2))
        lengths[0], kv_lengths[-1] = max(lengths[0], 3), max(kv_lengths[-1], 2)
        q = normal(rng, (sum(lengths), heads, dim), dtype)
        k, v = (normal(rng, (sum(kv_lengths) + 3, kv_heads, d), dtype) for d in (dim, v_dim))
        k, v = (mx.where(mx.arange(len(each))[:, None, None] < sum(kv_lengths), each, float("nan")).astype(dtype) for each in (k, v))
        window = chance.choice(((-1, -1), (-1, 0), (20, 0), (7, 3)))
        options: dict[str, Any] = {"scale": dim**-0.5, "window_left": window[0], "window_right": window[1]}
        if chance.random() < 0.3:
            options["sinks"] = normal(rng, (heads,), dtype)
        out, lse = flash_varlen(q, k, v, lengths, kv_lengths, **options)
        assert out.shape == (*q.shape[:2], v_dim)
        q_at, k_at = (np.cumsum([0, *each]) for each in (lengths, kv_lengths))
        for b, (t, s) in enumerate(zip(lengths, kv_lengths, strict=True)):
            rows, keys = slice(int(q_at[b]), int(q_at[b + 1])), slice(int(k_at[b]), int(k_at[b + 1]))
            if t == 0:
                continue
            part, part_lse = out[rows].swapaxes(0, 1)[None], lse[None, :, rows]
            if s == 0:
                assert (host(part) == 0).all()
                continue
            seen = np.broadcast_to(references.seen(t, s, window=window), (1, heads, t, s))
            one_q, one_k, one_v = (each.swapaxes(0, 1)[None] for each in (q[rows], k[keys], v[keys]))
            assert_right([part, part_lse], *reference(one_q, one_k, one_v, seen, **options), dtype, (lengths, kv_lengths, options))


@dtypes
def test_hidden_keys_may_hold_anything(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v = (normal(rng, (2, 4, t, 64), dtype) for t in (70, 300, 300))
    expected = host(flash(q, k[:, :, 10:250], v[:, :, 10:250])[0])
    key = mx.arange(300)[:, None]
    k, v = (mx.where((key < 10) | (key >= 250), float("nan"), each).astype(dtype) for each in (k, v))
    limits = {"starts": mx.array([10, 10], mx.int32), "ends": mx.array([250, 250], mx.int32)}
    assert relative_error(flash(q, k, v, **limits)[0], expected) <= TOLERANCE[dtype]


@dtypes
def test_queries_that_see_nothing(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, k, v = normal(rng, (2, 4, 150, 128), dtype), normal(rng, (2, 4, 40, 128), dtype), normal(rng, (2, 4, 40, 128), dtype)
    sinks = normal(rng, (4,), dtype)
    for given in (None, sinks):
        out, lse = flash(q, k, v, window_right=0, ends=mx.array([40, 0], mx.int32), sinks=given)
        assert (host(out)[0, :, :110] == 0).all()
        assert (host(out)[1] == 0).all()
        assert (np.abs(host(out)[0, :, 110:]).max(axis=-1) > 0).all()
        nothing = -np.inf if given is None else host(sinks)[:, None]
        assert np.allclose(host(lse)[1], np.broadcast_to(nothing, (4, 150)), atol=1e-5)


@pytest.mark.parametrize("size", [1e2, 3e3])
@dtypes
def test_huge_scores(rng: np.random.Generator, size: float, dtype: mx.Dtype) -> None:
    """The queries are powers of 2 and alike, so that float32 rounded to TF32 chooses the same keys."""
    q = mx.full((1, 4, 100, 64), 2.0 ** np.floor(np.log2(size)), dtype)
    k, v = mx.round(normal(rng, (1, 2, 500, 64), dtype) * 8) / 8, normal(rng, (1, 2, 500, 64), dtype)
    seen = np.ones((1, 4, 100, 500), bool)
    assert_right(flash(q, k, v), *reference(q, k, v, seen), dtype)


@dtypes
def test_gradients(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Of both results, against the same call in float32."""
    q, k, v = (normal(rng, (2, heads, 50, 64), dtype) for heads in (4, 2, 2))
    sinks, weight = normal(rng, (4,), dtype), normal(rng, (2, 4, 50, 64), mx.float32)
    options: dict[str, Any] = {"softcap": 5.0, "window_left": 20, "window_right": 0, "ends": mx.array([50, 30], mx.int32)}

    def loss(*arrays: mx.array) -> mx.array:
        q, k, v, sinks = arrays
        out, lse = flash(q, k, v, sinks=sinks, **options)
        return (out.astype(mx.float32) * weight).sum() + (lse * weight[..., 0]).sum()

    wide = mx.grad(loss, argnums=(0, 1, 2, 3))(*(each.astype(mx.float32) for each in (q, k, v, sinks)))
    for actual, expected in zip(mx.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks), wide, strict=True):
        assert actual.dtype == dtype
        assert np.isfinite(host(expected)).all()
        assert relative_error(actual, host(expected)) <= GRADIENT_TOLERANCE[dtype]


def test_compiled_and_vectorised(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (3, heads, 90, 64), mx.float16) for heads in (4, 2, 2))
    expected = host(flash(q, k, v, window_left=20)[0])
    compiled = mx.compile(lambda *a: flash(*a, window_left=20)[0])
    assert relative_error(compiled(q, k, v), expected) <= TOLERANCE[mx.float16]
    mapped = mx.vmap(lambda *a: flash(*(each[None] for each in a), window_left=20)[0][0])
    assert relative_error(mapped(q, k, v), expected) <= 2 * TOLERANCE[mx.float16]


def test_packed_sequences_have_no_gradient(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (10, 2, 64), mx.float16) for _ in range(3))
    with pytest.raises(ValueError, match=r"\[attention_varlen\] Neither gradients"):
        mx.grad(lambda q: flash_varlen(q, k, v, [4, 6], [4, 6])[0].sum())(q)
