"""The layout that matmuls with batches of quantised weights are brought into, on the CPU, where MLX takes any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._loader import native
from mlx_cuda._matmul import batches

UPSTREAM: Any = batches.upstream_quantized_matmul

FORMS = [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def weights(rng: np.random.Generator, shape: tuple[int, ...], form: tuple[str, int, int]) -> list[mx.array]:
    mode, bits, group = form
    return list(mx.quantize(mx.array(rng.normal(size=shape), mx.float32), group_size=group, bits=bits, mode=mode))


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("x", "w"), [
    ((2, 3), (2, 3)),  # each its own
    ((2, 3, 4), (2, 3, 1)),  # queries of several heads share keys
    ((2, 3), (3,)),  # a batch of rows for each matrix
    ((2, 3, 4), (2, 1, 4)),
    ((3,), (2, 3)),
    ((2, 1, 4), (1, 3, 1)),
    ((2, 3), (1, 1)),  # one for all
], ids=str)  # fmt: skip
@pytest.mark.parametrize("length", [1, 5])
def test_it_is_the_same_matmul(
    rng: np.random.Generator, length: int, x: tuple[int, ...], w: tuple[int, ...], form: tuple[str, int, int], transpose: bool
) -> None:
    parts = weights(rng, (*w, 64, 128), form)
    rows = mx.array(rng.normal(size=(*x, length, 128 if transpose else 64)), mx.float32)
    options = (transpose, form[2], form[1], form[0])
    biases = parts[2] if len(parts) > 2 else None
    expected = batches.upstream_quantized_matmul(rows, parts[0], parts[1], biases, *options)
    found = batches._batched(rows, parts, options)
    assert found.shape == expected.shape
    assert np.allclose(np.array(found), np.array(expected), atol=1e-4)


def test_no_rows(rng: np.random.Generator) -> None:
    parts = weights(rng, (1, 3, 64, 128), FORMS[0])
    assert batches._batched(mx.zeros((0, 3, 5, 128)), parts, (True, 64, 4, "affine")).shape == (0, 3, 5, 64)
    assert batches._batched(mx.zeros((2, 3, 0, 64)), parts, (False, 64, 4, "affine")).shape == (2, 3, 0, 128)


def test_weights_are_contiguous_then_and_not_copied_along_broadcast_axes(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[mx.array] = []

    def upstream(x: mx.array, *rest: object) -> mx.array:
        seen.extend([x, *(part for part in rest if isinstance(part, mx.array))])
        return mx.zeros((*x.shape[:-1], 64))

    monkeypatch.setattr(batches, "upstream_quantized_matmul", upstream)
    parts = [part[:, :, :64] for part in weights(rng, (2, 3, 80, 128), FORMS[0])]
    out = batches._batched(mx.zeros((2, 3, 4, 5, 128)), [part[:, :, None] for part in parts], (True, 64, 4, "affine"))
    assert out.shape == (2, 3, 4, 5, 64)
    assert [array.shape for array in seen] == [(2, 3, 20, 128), *(part.shape for part in parts)]
    for array in seen:
        mx.eval(array)
        assert np.array(array, copy=False).flags.c_contiguous


def test_what_does_not_fit_is_upstreams_error(rng: np.random.Generator) -> None:
    parts = weights(rng, (2, 64, 128), FORMS[0])
    with pytest.raises(ValueError, match=r"\[quantized_matmul\]|[Bb]roadcast"):
        batches._batched(mx.zeros((3, 5, 128)), parts, (True, 64, 4, "affine"))


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """Of x and of the weights' parts, as MLX's matmul is given them."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def matmul(*arguments: Any) -> Any:
        seen.append(tuple(each.shape for each in arguments if isinstance(each, mx.array)))
        return UPSTREAM(*arguments)

    monkeypatch.setattr(batches, "upstream_quantized_matmul", matmul)
    return seen


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k", "rows", "padded"), [
    (128, 64, 4, True), (256, 128, 4, True), (128, 192, 4, False), (96, 128, 4, False), (128, 128, 3, False),
], ids=str)  # fmt: skip
def test_the_kernel_that_reads_three_tiles_ahead_is_given_three(
    rng: np.random.Generator, shapes: list[Any], form: tuple[str, int, int], n: int, k: int, rows: int, padded: bool
) -> None:
    """MLX's qmm_sm80 fetches tiles of K that are not there: beyond the last row of x and of the weights."""
    parts = weights(rng, (2, n, k), form)
    parts = [part.astype(mx.bfloat16) if part.dtype == mx.float32 else part for part in parts]
    options = (True, form[2], form[1], form[0])
    x = mx.array(rng.normal(size=(2, rows, k))).astype(mx.bfloat16)
    expected = UPSTREAM(x, parts[0], parts[1], parts[2] if len(parts) > 2 else None, *options)
    found = batches._batched(x, parts, options)
    assert np.allclose(np.array(found.astype(mx.float32)), np.array(expected.astype(mx.float32)), atol=1e-2, rtol=1e-2)
    width = 192 if padded else k
    assert shapes == [((2, rows, width), (2, n, width * form[1] // 32), *((2, n, width // form[2]) for _ in parts[1:]))]


def test_so_is_that_of_a_gradient(rng: np.random.Generator, shapes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX differentiates ``x @ w`` as ``dy @ w.T``, of which the columns of w are K."""
    engine: Any = SimpleNamespace(module=SimpleNamespace(traced=lambda _: True))
    monkeypatch.setattr(native, "engine", lambda _: engine)
    parts = [part if part.dtype == mx.uint32 else part.astype(mx.bfloat16) for part in weights(rng, (2, 256, 128), FORMS[0])]
    x, options = mx.array(rng.normal(size=(2, 5, 256))).astype(mx.bfloat16), (False, 64, 4, "affine")
    expected = UPSTREAM(x, *parts, *options)
    assert mx.array_equal(batches._batched(x, parts, options), expected)
    assert shapes == [((2, 5, 256), (2, 256, 24), (2, 256, 3), (2, 256, 3))]


@pytest.mark.parametrize("transpose", [True, False])
def test_more_matrices_than_a_grid_holds(
    rng: np.random.Generator, shapes: list[Any], monkeypatch: pytest.MonkeyPatch, transpose: bool
) -> None:
    monkeypatch.setattr(batches, "MOST_MATMULS", 4)
    parts, options = weights(rng, (2, 3, 64, 128), FORMS[0]), (transpose, 64, 4, "affine")
    x = mx.array(rng.normal(size=(2, 3, 5, 128 if transpose else 64)), mx.float32)
    expected = UPSTREAM(x, *parts, *options)
    found = batches._batched(x, parts, options)
    assert np.allclose(np.array(found), np.array(expected), atol=1e-4)
    assert [each[0][0] for each in shapes] == [4, 2]


@pytest.mark.parametrize("transpose", [True, False])
def test_more_results_than_an_int_counts(
    rng: np.random.Generator, shapes: list[Any], monkeypatch: pytest.MonkeyPatch, transpose: bool
) -> None:
    """It divides all of them by those of a matrix, which it has in an int."""
    monkeypatch.setattr(batches, "MOST_COUNTED", 3 * 64 if transpose else 3 * 512)
    parts, options = weights(rng, (3, 64, 128), FORMS[0]), (transpose, 64, 4, "affine")
    x = mx.array(rng.normal(size=(3, 7, 128 if transpose else 64)), mx.float32)
    assert np.allclose(np.array(batches._batched(x, parts, options)), np.array(UPSTREAM(x, *parts, *options)), atol=1e-4)
    assert [each[0][1] for each in shapes] == [3, 3, 1]
