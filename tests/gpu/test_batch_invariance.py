"""``patch(batch_invariant=True)`` on a GPU: a row's bits are those that it has alone, whatever stands beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._invariant.state import NotInvariant, refusal

from .formats import Form
from .invariant_parts import differing, differing_answers, draw, logits_of, model_of, serve
from .mlx_lm_parts import part
from .support import DTYPES, normal

if find_spec("mlx_lm") is None:
    pytest.skip("mlx_lm is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

HALF = mx.bfloat16
untyped: Any = mx
MOST = 700  # rows
FORMS = [Form("affine", 4, 64), Form("affine", 8, 64), Form("affine", 4, 32), Form("mxfp4", 4, 32), Form("nvfp4", 4, 16),
         Form("mxfp8", 8, 32)]  # fmt: skip
SIZES = [(64, 64), (100, 72), (49, 131), (1, 256), (576, 1536), (1536, 576), (4096, 2048)]  # N, K


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    if why := refusal():
        pytest.skip(why)
    part("generate")
    with mlx_cuda.patch(batch_invariant=True):
        yield


def some_rows(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Where pieces begin, and how long they are."""
    sizes = [1, 1, 1, count, *rng.integers(1, min(count, 130), 8).tolist(), *rng.integers(1, count, 3).tolist()]
    return [(int(rng.integers(0, count - size + 1)), size) for size in sizes]


def check_rows(rng: np.random.Generator, call: Callable[[mx.array], mx.array], x: mx.array) -> None:
    """Pieces of the rows, and rows in another order, give what they give in all of them."""
    whole = call(x)
    for first, size in some_rows(rng, x.shape[0]):
        assert differing(call(x[first : first + size]), whole[first : first + size]) == 0, (first, size)
    order = mx.array(rng.permutation(x.shape[0])[: rng.integers(1, x.shape[0])])
    assert differing(call(x[order]), whole[order]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense(rng: np.random.Generator, size: tuple[int, int], dtype: str) -> None:
    n, k = size
    of = DTYPES[dtype]
    x, w, bias = normal(rng, (MOST, k), of), normal(rng, (n, k), of), normal(rng, (n,), of)
    check_rows(rng, lambda x: x @ w.T, x)
    check_rows(rng, lambda x: mx.addmm(bias, x, w.T), x)
    check_rows(rng, lambda x: mx.matmul(x, mx.contiguous(w.T)), x)
    check_rows(rng, lambda x: mx.matmul(x[None, :, None], w.T)[0, :, 0], x)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_every_tile_of_the_kernel_of_groups(rng: np.random.Generator, dtype: str, transpose: bool) -> None:
    """It has one for many rows, one for some and one for few: each sums alike, also where K ends within a step."""
    n, k = 4096, 1096
    x, w = normal(rng, (3000, k), DTYPES[dtype]), normal(rng, (n, k), DTYPES[dtype])
    w = w if transpose else mx.contiguous(w.T)
    tiles = set()

    def matmul(first: int, size: int) -> mx.array:
        rows = x[first : first + size]
        tiles.add(mlx_cuda.explain(mlx_cuda.grouped_matmul, rows, w[None], mx.array([0, size]), transpose=transpose).kernel)
        return rows @ (w.T if transpose else w)

    whole = matmul(0, 3000)
    for first, size in ((0, 1), (2999, 1), (1000, 700), (64, 64), (1, 2999)):
        assert differing(matmul(first, size), whole[first : first + size]) == 0, (first, size)
    assert len(tiles) == 3


@pytest.mark.parametrize("form", [Form("affine", 4, 32), Form("affine", 6, 32), Form("mxfp4", 4, 32)], ids=str)
def test_weights_that_are_dequantized_before(rng: np.random.Generator, form: Form) -> None:
    """Of a K that is not a multiple of 64, and then the same tiles."""
    x, packed = normal(rng, (3000, 1056), HALF), mx.quantize(normal(rng, (4096, 1056), HALF), **form.options)
    whole = untyped.quantized_matmul(x, *packed, **form.options)
    for first, size in ((0, 1), (2999, 1), (1000, 700), (1, 2999)):
        rows = slice(first, first + size)
        assert differing(untyped.quantized_matmul(x[rows], *packed, **form.options), whole[rows]) == 0, rows


def test_weights_of_one_bit(rng: np.random.Generator) -> None:
    """No kernel of ours reads them: it is as with MLX alone, be that an error."""
    x, packed = normal(rng, (64, 512), HALF), mx.quantize(normal(rng, (384, 512), HALF), group_size=64, bits=1)

    def outcome() -> mx.array | None:
        try:
            result: mx.array = untyped.quantized_matmul(x, *packed, group_size=64, bits=1)
            mx.eval(result)
        except (RuntimeError, ValueError):
            return None
        return result.astype(mx.float32)

    with mlx_cuda.patch(batch_invariant=False):
        theirs = outcome()
    ours = outcome()
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert mx.linalg.norm(ours - theirs, stream=mx.cpu) <= 0.02 * mx.linalg.norm(theirs, stream=mx.cpu)


def test_other_streams_and_compiled_functions(rng: np.random.Generator) -> None:
    x, w = normal(rng, (MOST, 576), HALF), normal(rng, (1536, 576), HALF)

    def layer(x: mx.array) -> mx.array:
        y = x @ w.T
        return y * mx.sigmoid(y)

    whole = layer(x)
    check_rows(rng, mx.compile(layer), x)
    with mx.stream(mx.new_stream(mx.gpu)):
        check_rows(rng, layer, x)
        assert differing(layer(x[5:6]), whole[5:6]) == 0
    q = normal(rng, (1, 2, 6, 64), HALF)
    with pytest.raises(NotInvariant, match="the stream is on the CPU"):
        attend(q, q, q, None, stream=mx.cpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [(384, 512), (1000, 576), (4096, 2048), (72, 1088)], ids=str)
def test_quantized(rng: np.random.Generator, size: tuple[int, int], form: Form, dtype: str) -> None:
    n, k = size
    x, w = normal(rng, (MOST, k), DTYPES[dtype]), normal(rng, (n, k), DTYPES[dtype])
    packed: Any = mx.quantize(w, **form.options)
    check_rows(rng, lambda x: mx.quantized_matmul(x, *packed, **form.options), x)
    if form.mode == "affine":
        other: Any = mx.quantize(normal(rng, (k, 512), DTYPES[dtype]), **form.options)
        check_rows(rng, lambda x: untyped.quantized_matmul(x, *other, transpose=False, **form.options), x)


@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
@pytest.mark.parametrize("size", [(8, 384, 512), (64, 768, 2048), (128, 192, 1024)], ids=str)
def test_experts(rng: np.random.Generator, size: tuple[int, int, int], form: Form | None) -> None:
    """Sorted, as mlx-lm has many of them, and as they come."""
    count, n, k = size
    chosen = 4
    w = normal(rng, (count, n, k), HALF)
    x = normal(rng, (MOST, k), HALF)
    indices = mx.array(np.stack([rng.permutation(count)[:chosen] for _ in range(MOST)]).astype(np.uint32))
    packed: Any = None if form is None else mx.quantize(w, **form.options)

    def call(x: mx.array, indices: mx.array, **options: Any) -> Any:
        if form is None:
            return mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=indices, **options)
        return untyped.gather_qmm(x, *packed, rhs_indices=indices, **form.options, **options)

    whole = call(x[:, None, None], indices)[:, :, 0]
    for first, size_of_piece in some_rows(rng, MOST):
        rows = slice(first, first + size_of_piece)
        assert differing(call(x[rows, None, None], indices[rows])[:, :, 0], whole[rows]) == 0, rows
    for rows in (slice(0, 16), slice(0, MOST), slice(100, 333)):
        flat = indices[rows].reshape(-1)
        order = mx.argsort(flat)
        in_order = call(x[rows][order // chosen][:, None], flat[order], sorted_indices=True)[:, 0]
        assert differing(in_order[mx.argsort(order)].reshape(-1, chosen, n), whole[rows]) == 0


def causal(queries: int, offset: int, **options: Any) -> mx.array:
    mask: mx.array = part("models.base").create_causal_mask(queries, offset, **options)
    return mask


def attend(q: mx.array, k: mx.array, v: mx.array, mask: Any, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask, **options)


@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_attention(rng: np.random.Generator, dim: int, heads: tuple[int, int], window: int | None) -> None:
    """A prompt at once, in chunks, token by token, and in a batch with padding before it, with what others left there."""
    length = int(rng.integers(600, 3000))
    dtype = mx.float16 if dim == 80 else HALF
    q, k, v = (normal(rng, (1, count, length, dim), dtype) for count in (heads[0], heads[1], heads[1]))
    sinks = normal(rng, (heads[0],), dtype) if window == 100 else None
    whole = attend(q, k, v, "causal" if window is None else causal(length, 0, window_size=window), sinks=sinks)
    for first, size in [(0, 1), (0, 130), (length - 1, 1), *some_rows(rng, length)]:
        end = first + size
        mask: Any = None if size == 1 and window is None else "causal"
        mask = mask if window is None else causal(size, first, window_size=window)
        got = attend(q[:, :, first:end], k[:, :, :end], v[:, :, :end], mask, sinks=sinks)
        assert differing(got, whole[:, :, first:end]) == 0, (first, size)
    for size in (1, 5, 257):
        ends = rng.integers(size, length, 4).tolist()
        padding = [max(ends) - end for end in ends]

        def padded(x: mx.array, end: int, pad: int) -> mx.array:
            return mx.concatenate([normal(rng, (*x.shape[:2], pad, dim), dtype, 100.0), x[:, :, :end]], axis=2)

        keys, values = (mx.concatenate([padded(x, *each) for each in zip(ends, padding, strict=True)]) for x in (k, v))
        queries = mx.concatenate([q[:, :, end - size : end] for end in ends])
        mask = causal(size, max(ends) - size, window_size=window, left_padding=mx.array(padding))
        got = attend(queries, keys, values, mask, sinks=sinks)
        for number, end in enumerate(ends):
            assert differing(got[number], whole[0, :, end - size : end]) == 0, (size, end, padding[number])


def test_attention_whose_values_have_another_width(rng: np.random.Generator) -> None:
    """As latent attention has them that is written out."""
    length = 900
    q, k = normal(rng, (1, 4, length, 192), HALF), normal(rng, (1, 4, length, 192), HALF)
    v = normal(rng, (1, 4, length, 128), HALF)
    whole = attend(q, k, v, "causal")
    for first, size in [(0, 1), (length - 1, 1), *some_rows(rng, length)]:
        end = first + size
        got = attend(q[:, :, first:end], k[:, :, :end], v[:, :, :end], "causal" if size > 1 else None)
        assert differing(got, whole[:, :, first:end]) == 0, (first, size)


ROWS: dict[str, Callable[[mx.array], mx.array]] = {
    "rms_norm": lambda x: mx.fast.rms_norm(x, mx.ones(x.shape[-1:], x.dtype) * 1.5, 1e-6),
    "layer_norm": lambda x: mx.fast.layer_norm(x, mx.ones(x.shape[-1:], x.dtype) * 1.5, None, 1e-6),
    "softmax": lambda x: mx.softmax(x, axis=-1, precise=True),
    "logsumexp": lambda x: mx.logsumexp(x, axis=-1, keepdims=True),
    "logprobs": lambda x: x - mx.logsumexp(x, axis=-1, keepdims=True),
    "argmax": lambda x: mx.argmax(x, axis=-1),
    "sum": lambda x: mx.sum(x, axis=-1),
    "mean of squares": lambda x: mx.mean(mx.square(x.astype(mx.float32)), axis=-1),
    "silu": lambda x: x * mx.sigmoid(x),
    "top experts": lambda x: mx.argpartition(mx.round(x), kth=-4, axis=-1)[..., -4:],  # with many ties
}


@pytest.mark.parametrize("width", [64, 100, 576, 2048, 5120, 49152])
@pytest.mark.parametrize("name", [name for name in ROWS if name != "top experts"])
def test_rows_of_mlx_s_own_kernels(rng: np.random.Generator, name: str, width: int) -> None:
    x = normal(rng, (150 if width > 10000 else 1500, width), HALF)  # from 1024 on MLX's sums have two rows in a block
    check_rows(rng, ROWS[name], x)
    check_rows(rng, lambda x: ROWS[name](x[None])[0], x)


@pytest.mark.parametrize("count", [8, 60, 64, 128, 256, 384])
def test_choices_of_experts(rng: np.random.Generator, count: int) -> None:
    check_rows(rng, ROWS["top experts"], normal(rng, (MOST, count), HALF))


@pytest.mark.parametrize("chosen", [1, 2, 4, 8, 33])
@pytest.mark.parametrize("width", [64, 100, 576, 2048])
def test_sums_over_experts(rng: np.random.Generator, width: int, chosen: int) -> None:
    scores = normal(rng, (MOST, chosen, 1), HALF)
    x = normal(rng, (MOST, chosen, width), HALF)
    both = mx.concatenate([x, mx.broadcast_to(scores, (MOST, chosen, 1))], axis=-1)
    check_rows(rng, lambda each: (each[..., :-1] * each[..., -1:]).sum(axis=-2), both)
    check_rows(rng, lambda each: (each[None, ..., :-1] * each[None, ..., -1:]).sum(axis=-2)[0], both)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("freqs", [False, True])
def test_rope(rng: np.random.Generator, freqs: bool, traditional: bool) -> None:
    """At once, in pieces, each token alone, and in a batch that has an offset for each sequence."""
    x = normal(rng, (1, 6, 300, 64), HALF)
    given: dict[str, Any] = {"base": None, "freqs": mx.exp(mx.arange(32) / 3.0)} if freqs else {"base": 1e6}

    def rope(x: mx.array, offset: Any) -> mx.array:
        return mx.fast.rope(x, 64, traditional=traditional, scale=1.0, offset=offset, **given)

    whole = rope(x, 1000)
    for first, size in [*some_rows(rng, 300), (0, 1), (299, 1)]:
        piece = x[:, :, first : first + size]
        assert differing(rope(piece, 1000 + first), whole[:, :, first : first + size]) == 0, (first, size)
        assert differing(rope(mx.contiguous(piece), mx.array(1000 + first)), whole[:, :, first : first + size]) == 0
        places = [int(each) for each in rng.integers(0, 300 - size + 1, 3)]
        batch = mx.concatenate([x[:, :, at : at + size] for at in places])
        got = rope(batch, mx.array([1000 + at for at in places]))
        assert all(differing(got[i], whole[0, :, at : at + size]) == 0 for i, at in enumerate(places))
        by_rows = batch.swapaxes(1, 2)  # as a layer makes it
        got = rope(mx.contiguous(by_rows).swapaxes(1, 2), mx.array([1000 + at for at in places]))
        assert all(differing(got[i], whole[0, :, at : at + size]) == 0 for i, at in enumerate(places))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_logits(rng: np.random.Generator, kind: str, bits: int | None) -> None:
    model = model_of(kind, bits)
    prompts = [rng.integers(0, 512, size).tolist() for size in (400, 1, 37, 150)]
    whole = [logits_of(model, tokens, [len(tokens)]) for tokens in prompts]
    for _ in range(3):
        cuts = sorted({0, 400, *rng.integers(1, 400, 6).tolist()})
        sizes = [after - before for before, after in itertools.pairwise(cuts)]
        assert differing(logits_of(model, prompts[0], sizes), whole[0]) == 0, sizes
    assert differing(logits_of(model, prompts[3], [1] * 150), whole[3]) == 0
    caches = [part("models.cache").BatchKVCache([400 - len(tokens) for tokens in prompts]) for _ in model.layers]
    together = model(mx.array([[7] * (400 - len(tokens)) + tokens for tokens in prompts]), cache=caches)
    for number, tokens in enumerate(prompts):
        assert differing(together[number, 400 - len(tokens) :], whole[number]) == 0, number


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_requests_in_random_company(kind: str, bits: int | None) -> None:
    check_requests(model_of(kind, bits), 512)


@pytest.mark.parametrize("form", ["bf16", "4 bit", "mxfp4"])
def test_requests_to_a_real_model_in_random_company(form: str) -> None:
    real = pytest.importorskip("tests.gpu.test_real_models", reason="it is in a checkout alone")
    if reason := real.why_not("smollm2-135m"):
        pytest.skip(reason)
    loading = pytest.importorskip("tests.models.loading")
    model, _ = loading.load(real.places.folder() / "smollm2-135m", form)
    check_requests(model, 49152)


def check_requests(model: Any, vocabulary: int) -> None:
    alone, together = draw(200, vocabulary, 0), draw(200, vocabulary, 0)
    serve(model, alone, None)
    serve(model, together, random.Random(1))  # noqa: S311
    assert sum(bool(each.tokens) for each in together) == len(together)
    assert sum(each.cached > 0 for each in together) > 30
    assert differing_answers(alone, together) == []


def test_masks_that_are_written_to_are_another_s(rng: np.random.Generator) -> None:
    q = normal(rng, (1, 2, 6, 64), HALF)
    mask = causal(6, 0)
    attend(q, q, q, mask)
    mask &= mx.zeros((6, 6), mx.bool_)
    with pytest.raises(NotInvariant, match="create_causal_mask"):
        attend(q, q, q, mask)


def test_models_with_windows_raise() -> None:
    cache = part("models.cache")
    model = model_of("dense", None)
    with pytest.raises(NotInvariant, match="sliding windows"):
        model(mx.array([[1, 2, 3]]), cache=[cache.RotatingKVCache(64) for _ in model.layers])


def test_results_are_as_right_as_upstream_s(rng: np.random.Generator) -> None:
    model = model_of("dense", None)
    tokens = rng.integers(0, 512, 100).tolist()
    ours = logits_of(model, tokens, [100]).astype(mx.float32)
    with mlx_cuda.patch(batch_invariant=False):
        theirs = logits_of(model, tokens, [100]).astype(mx.float32)
    assert mx.linalg.norm(ours - theirs, stream=mx.cpu) <= 0.03 * mx.linalg.norm(theirs, stream=mx.cpu)
