from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from . import recurrences
from .mlx_lm_parts import part
from .support import DTYPES, GRADIENT_TOLERANCE, TOLERANCE, assert_close, device, host, normal, primitives

pytestmark = pytest.mark.gpu

SHAPES = {  # batch, tokens, heads and groups, elements of a head and of its state's rows
    "one token": (2, 1, 8, 2, 64, 128),
    "a few": (1, 3, 4, 4, 7, 16),
    "less than a chunk": (2, 40, 4, 1, 40, 64),
    "two chunks": (2, 65, 4, 2, 64, 64),
    "a prompt": (1, 300, 8, 2, 64, 128),
    "long rows": (1, 100, 2, 1, 32, 256),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, tokens, heads, groups, inner, size = shape
    x = normal(rng, (batch, tokens, heads, inner), dtype)
    b, c = (normal(rng, (batch, tokens, groups, size), dtype, size**-0.5) for _ in range(2))
    return [x, device(rng.uniform(0.001, 0.5, x.shape[:3]), mx.float32), device(-rng.uniform(0.1, 8, heads), mx.float32), b, c]


@dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matches_float64(rng: np.random.Generator, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    batch, tokens, heads, _, inner, size = shape
    arrays = draw(rng, shape, dtype)
    chunked = mlx_cuda.explain(mlx_cuda.ssd, *arrays).engine == "chunked"
    assert chunked == (dtype != mx.float32 and tokens > 64 and size <= 128)
    state, mask = normal(rng, (batch, heads, inner, size), mx.float32), mx.array(rng.random((batch, tokens)) > 0.3)
    recurrences.check_all(mlx_cuda.ssd, arrays, state, mask)


@dtypes
def test_derivatives_are_those_of_the_composition(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    arrays, cotangent = draw(rng, (1, 80, 4, 2, 16, 32), dtype), normal(rng, (1, 80, 4, 16), dtype)
    recurrences.check_gradients(lambda *a: mlx_cuda.ssd(*a)[0], lambda *a: mlx_cuda.ssd(*a)[0], arrays, [cotangent], 5 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_by_chunks(rng: np.random.Generator, dtype: mx.Dtype) -> None:
    """Of all arrays, with a state and a mask."""
    arrays = [*draw(rng, (2, 150, 4, 2, 40, 72), dtype), normal(rng, (2, 4, 40, 72), mx.float32)]
    mask = mx.array(rng.random((2, 150)) > 0.3)
    cotangents = [normal(rng, (2, 150, 4, 40), dtype), normal(rng, (2, 4, 40, 72), mx.float32)]
    assert mlx_cuda.explain(mlx_cuda.ssd, *arrays[:5], mask=mask).engine == "chunked"

    def both(*a: mx.array) -> list[mx.array]:
        return list(mlx_cuda.ssd(*a[:5], state=a[5], mask=mask))

    recurrences.check_gradients(both, both, arrays, cotangents, GRADIENT_TOLERANCE[dtype])


def test_vmap(rng: np.random.Generator) -> None:
    """A batch of batches, of which the decays are shared."""
    x, dt, a, b, c = draw(rng, (6, 70, 4, 2, 16, 32), mx.float16)
    state = normal(rng, (6, 4, 16, 32), mx.float32)
    whole = mlx_cuda.ssd(x, dt, a, b, c, state=state)
    apart = [each.reshape(3, 2, *each.shape[1:]) for each in (x, dt, b, c, state)]
    mapped = mx.vmap(lambda x, dt, b, c, state: mlx_cuda.ssd(x, dt, a, b, c, state=state), in_axes=(0, 0, 0, 0, 0))(*apart)
    for mine, expected in zip(mapped, whole, strict=True):
        assert mx.array_equal(mine.reshape(expected.shape), expected)
    middle = mx.vmap(lambda x: mlx_cuda.ssd(x, dt[:1], a, b[:1], c[:1])[0], in_axes=2, out_axes=2)(
        x[:1, :, None] + mx.zeros((1, 70, 3, 1, 1), x.dtype)
    )
    assert mx.array_equal(middle[:, :, 1], mlx_cuda.ssd(x[:1], dt[:1], a, b[:1], c[:1])[0])


@pytest.mark.parametrize("lengths", [None, [90, 0, 37]], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("given", [False, True], ids=["no state", "state"])
def test_in_mlx_lm_s_place(rng: np.random.Generator, lengths: list[int] | None, *, padded: bool, given: bool) -> None:
    """With the masks that mlx-lm's caches make: of left padding, and of lengths."""
    ssm: Any = part("models.ssm")
    x, dt, a, b, c = draw(rng, (3, 90, 4, 2, 64, 64), mx.bfloat16)
    d, bias, inside = normal(rng, (4,), mx.bfloat16), normal(rng, (4,), mx.float32), np.ones((3, 90), bool)
    arguments: dict[str, Any] = {"time_step_limit": (0.001, 100.0)}
    if lengths is not None:
        inside = np.arange(90) < np.array(lengths)[:, None]
        arguments["lengths"] = mx.array(lengths)
    elif padded:
        inside = np.arange(90) >= np.array([[0], [5], [64]])
    if padded or lengths is not None:
        arguments["mask"] = mx.array(inside)
    if given:
        arguments["state"] = normal(rng, (3, 4, 64, 64), mx.float32)
    log = mx.log(-a)
    theirs = ssm.ssm_attn(x, log, b, c, d, dt, bias, **arguments)
    with mlx_cuda.patch():
        ours = ssm.ssm_attn(x, log, b, c, d, dt, bias, **arguments)
        assert "LinearAttention" in primitives(ours[0])
    assert ours[0].dtype == theirs[0].dtype
    assert_close(mx.where(mx.array(inside)[..., None, None], ours[0], 0), host(theirs[0]) * inside[..., None, None], tolerance=2e-2)
    assert_close(ours[1], host(theirs[1]), tolerance=2e-2)
