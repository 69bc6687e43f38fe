"""Keys and values in pages: the kernel that reads them and the one that writes them, against float64 and against one piece."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.options import Options
from mlx_cuda._attention.rules import PAGE_TILE
from mlx_cuda._loader import native as _native
from numpy.typing import NDArray

from tests.package import references

from .support import DTYPES, TOLERANCE, has_small_memory, host, normal, poison, relative_error

Ints = NDArray[Any]

pytestmark = pytest.mark.gpu

HALF = {name: dtype for name, dtype in DTYPES.items() if dtype != mx.float32}
dtypes = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF.keys())
NAN = float("nan")
GARBAGE = (-1, 2**30, 7)
async_eval: Any = mx.async_eval  # which has no types


def native() -> Any:
    """The module itself: what is tested here does not depend on who is chosen."""
    engine = _native.engine(mx.default_stream(mx.gpu))
    assert not isinstance(engine, str), engine
    return engine.module


def attend(q: mx.array, *arrays: mx.array, window: int = -1, **options: Any) -> list[mx.array]:
    """By the decode kernel, or by whoever takes pages of a size that it does not."""
    k_pages, v_pages, table, lengths = arrays
    if k_pages.shape[2] % PAGE_TILE:
        given: dict[str, Any] = {
            "window_size": None if window < 0 else window,
            "softcap": options.get("softcap") or None,
            "sinks": options.get("sinks"),
        }
        ours: Any = mlx_cuda  # overloads do not let options through
        return list(ours.paged_attention(q, *arrays, return_lse=True, **given))
    asked = Options(q.shape[3] ** -0.5, window=(window, 0), ends=lengths, lse=True, **options)
    results: list[mx.array] = native().decode_attention(q, k_pages, v_pages, asked, mx.default_stream(mx.gpu), table)
    return results


def in_pages(rows: mx.array, lengths: Ints, size: int, table: Ints, *, transposed: bool) -> mx.array:
    """[P, Hkv, size, D] with the rows of each sequence where its row of the table says, and NaN everywhere else."""
    batch, heads, _, dim = rows.shape
    count = batch * table.shape[1] + 3
    pages = np.full((count, heads, size, dim), np.nan, np.float32)
    values = np.array(rows.astype(mx.float32))
    for b in range(batch):
        for place in range(lengths[b]):
            pages[table[b, place // size], :, place % size] = values[b, :, place]
    result = mx.array(pages.swapaxes(1, 2) if transposed else pages).astype(rows.dtype)
    return result.swapaxes(1, 2) if transposed else result


def a_table(rng: np.random.Generator, lengths: Ints, size: int, columns: int) -> Ints:
    """Pages in any order where they are needed, and garbage elsewhere."""
    table = rng.choice(GARBAGE, (len(lengths), columns)).astype(np.int32)
    free = list(rng.permutation(len(lengths) * columns + 3))
    for b, length in enumerate(lengths):
        for column in range(-(-int(length) // size)):
            table[b, column] = free.pop()
    return table


def expected_of(q: mx.array, k: mx.array, v: mx.array, lengths: Ints, window: int, **options: Any) -> tuple[Any, Any]:
    """The result and the logarithms, in float64."""
    seen = references.seen(q.shape[2], k.shape[2], window=(window, 0), starts=None, ends=lengths)
    out = references.attention(host(q), host(k), host(v), mask=np.broadcast_to(seen, (*q.shape[:3], k.shape[2])), **options)
    scores = host(q) @ np.repeat(host(k), q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * q.shape[3] ** -0.5
    if cap := options.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    with np.errstate(divide="ignore"):
        lse = np.log(np.where(seen, np.exp(scores), 0).sum(axis=3) + _sink(options.get("sinks"), q.shape[1]))
    return out, lse


def _sink(sinks: Any, heads: int) -> Any:
    return 0.0 if sinks is None else np.exp(sinks).reshape(1, heads, 1)


@dtypes
@pytest.mark.parametrize("size", [1, 7, 16, 32, 48, 64])
def test_random_calls(rng: np.random.Generator, size: int, dtype: mx.Dtype) -> None:
    chance = random.Random(int(rng.integers(2**31)))  # noqa: S311
    wide = () if has_small_memory() else ((512, 512), (576, 512))
    for _ in range(6):
        dim, value_dim = chance.choice(((64, 64), (128, 128), (72, 72), (256, 256), (192, 128), *wide))
        kv_heads, groups, t = chance.choice((1, 2, 3)), chance.choice((1, 4, 7, 16)), chance.choice((1, 1, 2, 5, 32))
        batch, longest = chance.choice((1, 3, 5)), chance.choice((5, 200, 1500))
        lengths = np.array([0, longest, *(chance.randint(0, longest) for _ in range(batch))][:batch][::-1])
        q, k = normal(rng, (batch, kv_heads * groups, t, dim), dtype), normal(rng, (batch, kv_heads, longest, dim), dtype)
        v = normal(rng, (batch, kv_heads, longest, value_dim), dtype)
        table = a_table(rng, lengths, size, -(-longest // size) + chance.randint(0, 3))
        transposed = chance.random() < 0.5
        pages = [in_pages(rows, lengths, size, table, transposed=transposed) for rows in (k, v)]
        options: dict[str, Any] = {"softcap": chance.choice((0.0, 0.0, 5.0)), "window": chance.choice((-1, -1, 0, 40))}
        sinks = normal(rng, (kv_heads * groups,), dtype) if chance.random() < 0.3 else None
        out, lse = attend(q, *pages, mx.array(table), mx.array(lengths.astype(np.int32)), sinks=sinks, **options)
        wanted = {"softcap": options["softcap"], "sinks": None if sinks is None else host(sinks)}
        expected, expected_lse = expected_of(q, k, v, lengths, options["window"], **wanted)
        what = (q.shape, k.shape, lengths, transposed, options, sinks is not None)
        assert relative_error(out, expected) <= 1.5 * TOLERANCE[dtype], what
        assert np.allclose(host(lse), expected_lse, atol=1e-2), what


@dtypes
@pytest.mark.parametrize("size", [16, 64])
def test_pages_are_as_one_piece(rng: np.random.Generator, size: int, dtype: mx.Dtype) -> None:
    """Up to the order of the sums: keys in one piece that few units read are another kernel's (src/attention/decode/decode_direct.cu)."""
    lengths = np.array([4096, 1000, 0, 17])
    q, k, v = normal(rng, (4, 8, 1, 128), dtype), normal(rng, (4, 2, 4096, 128), dtype), normal(rng, (4, 2, 4096, 128), dtype)
    table = a_table(rng, lengths, size, 4096 // size)
    pages = [in_pages(rows, lengths, size, table, transposed=False) for rows in (k, v)]
    ends = mx.array(lengths.astype(np.int32))
    out, lse = attend(q, *pages, mx.array(table), ends)
    stream = mx.default_stream(mx.gpu)
    whole = native().decode_attention(q, k, v, Options(128**-0.5, window=(-1, 0), ends=ends, lse=True), stream)
    assert relative_error(out, host(whole[0])) <= 1.5 * TOLERANCE[dtype]
    assert np.allclose(host(lse), host(whole[1]), rtol=0, atol=1e-4)
    assert np.all(host(out)[2] == 0)
    assert np.all(host(lse)[2] == -np.inf)


@dtypes
def test_what_lies_in_memory_does_not_matter(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    q, pages = normal(rng, (2, 8, 1, 128), dtype), normal(rng, (9, 2, 16, 128), dtype)
    table, lengths = mx.array([[1, 2, 3], [4, 5, 6]], mx.int32), mx.array([40, 0], mx.int32)
    poison(lambda: attend(q, pages * NAN, pages * NAN, table, mx.array([48, 48], mx.int32))[0], q.shape, dtype)
    out = host(attend(q, pages, pages, table, lengths)[0])
    assert np.isfinite(out).all()
    assert np.all(out[1] == 0)


@dtypes
def test_layouts_and_transformations(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Strided tables and lengths, mx.compile, and the composition that vmap takes."""
    q, pages = normal(rng, (2, 4, 1, 64), dtype), normal(rng, (9, 2, 16, 64), dtype)
    table, lengths = mx.array([[1, 2, 3], [4, -1, 2**30]], mx.int32), mx.array([40, 10], mx.int32)
    expected = host(attend(q, pages, pages, table, lengths)[0])
    strided = attend(q, pages, pages, mx.repeat(table, 2, axis=1)[:, ::2], mx.repeat(lengths, 3)[::3])[0]
    assert np.array_equal(host(strided), expected)
    compiled = mx.compile(lambda *a: attend(*a)[0])
    assert np.array_equal(host(compiled(q, pages, pages, table, lengths)), expected)
    spoilt = mx.where((mx.arange(9) == 0)[:, None, None, None], NAN, pages).astype(dtype)  # a page that nobody has
    mapped = mx.vmap(lambda each: attend(each, spoilt, spoilt, table, lengths)[0])(q[None])
    assert relative_error(mapped[0], expected) <= 2 * TOLERANCE[dtype]


# ------------------------------------------------------------------------------------------------------------------- writing
def updated(pages: Ints, rows: Ints, table: Ints, lengths: Ints) -> Ints:
    result: Ints = pages.copy()
    size, steps = pages.shape[2], rows.shape[2]
    for b in range(rows.shape[0]):
        for t in range(steps):
            place = lengths[b] - steps + t
            if 0 <= place < table.shape[1] * size and 0 <= table[b, place // size] < len(pages):
                result[table[b, place // size], :, place % size] = rows[b, :, t]
    return result


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "held", "slice"])
def test_update(rng: np.random.Generator, size: int, layout: str, dtype: mx.Dtype) -> None:
    lengths = np.array([150, 3, 0, 70, 1000])  # of which some rows are before the first place, and some beyond the table
    steps, columns = 5, -(-150 // size)
    table = a_table(rng, np.minimum(lengths, 150), size, columns)
    count = len(lengths) * columns + 3
    stream = mx.default_stream(mx.gpu)

    def pages_of(dim: int) -> mx.array:
        shape = (count, size, 2, dim) if layout == "transposed" else (count, 2, size, dim)
        pages = normal(rng, shape, dtype)
        if layout == "slice":
            return mx.concatenate([pages, pages], axis=0)[:count]
        return pages.swapaxes(1, 2) if layout == "transposed" else pages

    dims = (64, 40)
    pages = [pages_of(dim) for dim in dims]
    # Rows as a projection leaves them.
    rows = [normal(rng, (len(lengths), steps, 2, dim), dtype).swapaxes(1, 2) for dim in dims]
    expected = [updated(host(p), host(r), table, lengths) for p, r in zip(pages, rows, strict=True)]
    before = [host(each) for each in pages] if layout == "held" else []
    held = pages if layout == "held" else []
    results = native().paged_cache_update(*pages, *rows, mx.array(table), mx.array(lengths.astype(np.int32)), stream)
    del pages
    for result, wanted in zip(results, expected, strict=True):
        assert np.array_equal(host(result), wanted)
    for each, kept in zip(held, before, strict=True):  # whoever holds the old pages sees the old pages
        assert np.array_equal(host(each), kept)


def test_update_in_place(rng: np.random.Generator) -> None:
    """Pages that nobody else holds are not copied."""
    shape, stream = (2048, 2, 16, 128), mx.default_stream(mx.gpu)
    k, v = normal(rng, shape, mx.float16), normal(rng, shape, mx.float16)
    rows = normal(rng, (2, 2, 1, 128), mx.float16)
    table = mx.arange(128, dtype=mx.int32).reshape(2, 64)
    mx.eval(table)
    for step in range(5):
        mx.synchronize()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        lengths = mx.array([step + 1, 500 + step], mx.int32)
        pages = native().paged_cache_update(k, v, rows, rows, table, lengths, stream)
        del k, v
        mx.eval(pages)
        k, v = pages
        del pages
        assert mx.get_peak_memory() - held < k.nbytes // 2
    for each in (k, v):
        assert np.array_equal(host(each)[0, :, :5], np.repeat(host(rows)[0], 5, axis=1))


class Ahead(NamedTuple):
    """Two sequences that are decoded a step ahead of the device: it is given the next step while it still computes an earlier one."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    table: mx.array
    k: mx.array
    v: mx.array

    @classmethod
    def of(cls, rng: np.random.Generator, steps: int) -> Ahead:
        queries, keys, values = (normal(rng, (2, heads, steps, 128), mx.float16) for heads in (8, 2, 2))
        k, v = mx.zeros((4096, 2, 16, 128), mx.float16), mx.zeros((4096, 2, 16, 128), mx.float16)
        table = mx.arange(2 * -(-steps // 16), dtype=mx.int32).reshape(2, -1)
        mx.eval(k, v, table)
        return cls(queries, keys, values, table, k, v)

    def lengths(self, step: int) -> mx.array:
        return mx.full((2,), step + 1, mx.int32)

    def updated(self, step: int) -> Ahead:
        rows = (each[:, :, step : step + 1] for each in (self.keys, self.values))
        stream = mx.default_stream(mx.gpu)
        k, v = native().paged_cache_update(self.k, self.v, *rows, self.table, self.lengths(step), stream)
        return self._replace(k=k, v=v)

    def attended(self, step: int, stream: mx.Stream | None = None) -> mx.array:
        asked = Options(128**-0.5, window=(-1, 0), ends=self.lengths(step))
        on = stream or mx.default_stream(mx.gpu)
        result: mx.array = native().decode_attention(self.queries[:, :, step : step + 1], self.k, self.v, asked, on, self.table)[0]
        return result

    def expected(self) -> Ints:
        return references.attention(host(self.queries), host(self.keys), host(self.values), mask="causal")

    def written(self, steps: int) -> list[Ints]:
        """The pages after so many steps, keys and values."""
        shape = (2, self.table.shape[1] * 16, 2, 128)
        results = []
        for rows in (self.keys, self.values):
            places = np.zeros(shape)
            places[:, :steps] = host(rows)[:, :, :steps].swapaxes(1, 2)
            results.append(places.reshape(-1, 16, 2, 128).swapaxes(1, 2))
        return results


def busy(stream: mx.Stream) -> list[mx.array]:
    """Have the device compute for some 25 ms, with memory that stays taken while the results are held."""
    x = mx.full((16384, 16384), 2**-14, mx.float16)
    mx.eval(x)
    matmuls = [mx.matmul(x, x, stream=stream) for _ in range(2)]
    async_eval(matmuls)
    return [x, *matmuls]


def test_update_ahead_of_the_device(rng: np.random.Generator) -> None:
    """The pages are not copied while attention to them is pending."""
    steps, outs = 100, []
    ahead = Ahead.of(rng, steps)
    held = busy(mx.default_stream(mx.gpu))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(steps):
        ahead = ahead.updated(step)
        outs.append(ahead.attended(step))
        async_eval(outs[-1])
    mx.eval(outs)
    assert mx.get_peak_memory() - before < ahead.k.nbytes // 2
    del held
    assert relative_error(mx.concatenate(outs, axis=2), ahead.expected()) <= TOLERANCE[mx.float16]
    for pages, wanted in zip((ahead.k, ahead.v), ahead.written(steps), strict=True):
        assert np.array_equal(host(pages[: len(wanted)]), wanted)


@pytest.mark.parametrize("holds", ["the pages", "a view", "a view not computed yet", "another stream's attention"])
def test_update_ahead_leaves_what_others_hold(rng: np.random.Generator, holds: str) -> None:
    """Whoever holds pages of an earlier step sees that step, whatever is pending."""
    steps, held_at, outs = 40, 20, []
    ahead, other = Ahead.of(rng, steps), mx.new_stream(mx.gpu)
    kept: list[mx.array] = []
    work = busy(mx.default_stream(mx.gpu))
    for step in range(steps):
        ahead = ahead.updated(step)
        outs.append(ahead.attended(step))
        async_eval(outs[-1])
        if step != held_at - 1:
            continue
        if holds == "another stream's attention":
            work += busy(other)
            kept = [ahead.attended(steps - 1, other)]  # to what the later steps are about to write, too
        else:
            kept = [ahead.k, ahead.v] if holds == "the pages" else [each[: ahead.table.size] for each in (ahead.k, ahead.v)]
        if holds not in {"the pages", "a view not computed yet"}:
            async_eval(kept)
    assert relative_error(mx.concatenate(outs, axis=2), ahead.expected()) <= TOLERANCE[mx.float16]
    if holds == "another stream's attention":
        at_that_step = [np.concatenate([host(each)[:, :, :held_at], 0 * host(each)[:, :, held_at:]], axis=2) for each in ahead[1:3]]
        wanted = references.attention(host(ahead.queries[:, :, -1:]), *at_that_step)
        assert relative_error(kept[0], wanted) <= TOLERANCE[mx.float16]
        return
    for each, content in zip(kept, ahead.written(held_at), strict=True):
        assert np.array_equal(host(each[: len(content)]), content)


def test_update_ahead_of_the_same_place(rng: np.random.Generator) -> None:
    """Each step writes over what the step before reads: evaluated at once, in graphs of their own, and compiled."""
    steps = 30
    ahead = Ahead.of(rng, steps)
    lengths = ahead.lengths(0)
    asked, stream = Options(128**-0.5, window=(-1, 0), ends=lengths), mx.default_stream(mx.gpu)

    def step_of(k: mx.array, v: mx.array, rows: mx.array, query: mx.array) -> tuple[mx.array, ...]:
        k, v = native().paged_cache_update(k, v, rows, rows, ahead.table, lengths, stream)
        return k, v, native().decode_attention(query, k, v, asked, stream, ahead.table)[0]

    expected = np.repeat(host(ahead.keys), 4, axis=1)  # attention to one key is its value
    for way in ("at once", "ahead", "compiled"):
        run: Any = mx.compile(step_of) if way == "compiled" else step_of
        k, v, outs, work = ahead.k + 0, ahead.v + 0, [], busy(stream)
        for step in range(steps):
            rows, query = (each[:, :, step : step + 1] for each in (ahead.keys, ahead.queries))
            k, v, out = run(k, v, rows, query)
            outs.append(out)
            if way != "at once":
                async_eval(out)
        assert np.array_equal(host(mx.concatenate(outs, axis=2)), expected), way
        del work


def test_update_then_attend(rng: np.random.Generator) -> None:
    """Steps of decoding without waiting in between: what is read is what was written before, and nothing after."""
    batch, steps, size, dim, stream = 2, 40, 16, 64, mx.default_stream(mx.gpu)
    k, v = mx.full((12, 2, size, dim), NAN, mx.float16), mx.full((12, 2, size, dim), NAN, mx.float16)
    table = mx.array(rng.permutation(12)[:6].reshape(2, 3).astype(np.int32))
    keys, values, queries = (normal(rng, (batch, 2, steps, dim), mx.float16) for _ in range(3))
    outs = []
    for step in range(steps):
        lengths = mx.full((batch,), step + 1, mx.int32)
        new = (each[:, :, step : step + 1] for each in (keys, values))
        k, v = native().paged_cache_update(k, v, *new, table, lengths, stream)
        outs.append(attend(queries[:, :, step : step + 1], k, v, table, lengths)[0])
    expected = references.attention(host(queries), host(keys), host(values), mask="causal")
    assert relative_error(mx.concatenate(outs, axis=2), expected) <= TOLERANCE[mx.float16]


def test_update_refuses_transformations(rng: np.random.Generator) -> None:
    pages, rows = normal(rng, (4, 2, 16, 64), mx.float16), normal(rng, (1, 2, 1, 64), mx.float16)
    table, lengths, stream = mx.array([[1]], mx.int32), mx.array([3], mx.int32), mx.default_stream(mx.gpu)

    def loss(rows: mx.array) -> mx.array:
        new: mx.array = native().paged_cache_update(pages, pages, rows, rows, table, lengths, stream)[0]
        return new.astype(mx.float32).sum()

    with pytest.raises(ValueError, match=r"\[paged_cache_update\] Gradients"):
        mx.grad(loss)(rows)
    with pytest.raises(ValueError, match=r"\[paged_cache_update\] vmap"):
        mx.vmap(loss)(rows[None])
