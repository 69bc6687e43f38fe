"""The layout that products with batches of quantised weights are brought into, on the CPU, where MLX takes any."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_cuda._matmul import batches

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
def test_it_is_the_same_product(
    rng: np.random.Generator, length: int, x: tuple[int, ...], w: tuple[int, ...], form: tuple[str, int, int], transpose: bool
) -> None:
    parts = weights(rng, (*w, 64, 128), form)
    rows = mx.array(rng.normal(size=(*x, length, 128 if transpose else 64)), mx.float32)
    options = (transpose, form[2], form[1], form[0])
    biases = parts[2] if len(parts) > 2 else None
    expected = batches.upstream_quantized_matmul(rows, parts[0], parts[1], biases, *options)
    found = batches._product(rows, parts, options)
    assert found.shape == expected.shape
    assert np.allclose(np.array(found), np.array(expected), atol=1e-4)


def test_no_rows(rng: np.random.Generator) -> None:
    parts = weights(rng, (1, 3, 64, 128), FORMS[0])
    assert batches._product(mx.zeros((0, 3, 5, 128)), parts, (True, 64, 4, "affine")).shape == (0, 3, 5, 64)
    assert batches._product(mx.zeros((2, 3, 0, 64)), parts, (False, 64, 4, "affine")).shape == (2, 3, 0, 128)


def test_weights_are_contiguous_then_and_not_copied_along_broadcast_axes(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[mx.array] = []

    def upstream(x: mx.array, *rest: object) -> mx.array:
        seen.extend([x, *(part for part in rest if isinstance(part, mx.array))])
        return mx.zeros((*x.shape[:-1], 64))

    monkeypatch.setattr(batches, "upstream_quantized_matmul", upstream)
    parts = [part[:, :, :64] for part in weights(rng, (2, 3, 80, 128), FORMS[0])]
    out = batches._product(mx.zeros((2, 3, 4, 5, 128)), [part[:, :, None] for part in parts], (True, 64, 4, "affine"))
    assert out.shape == (2, 3, 4, 5, 64)
    assert [array.shape for array in seen] == [(2, 3, 20, 128), *(part.shape for part in parts)]
    for array in seen:
        mx.eval(array)
        assert np.array(array, copy=False).flags.c_contiguous


def test_what_does_not_fit_is_upstreams_error(rng: np.random.Generator) -> None:
    parts = weights(rng, (2, 64, 128), FORMS[0])
    with pytest.raises(ValueError, match=r"\[quantized_matmul\]|[Bb]roadcast"):
        batches._product(mx.zeros((3, 5, 128)), parts, (True, 64, 4, "affine"))
