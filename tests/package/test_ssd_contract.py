from __future__ import annotations

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from tests.gpu import reference
from tests.gpu.recurrences import exact

from .references import Array, assert_close, host, random, with_

Arrays = list[mx.array]


def draw(batch: int = 2, tokens: int = 7) -> Arrays:
    """x, dt, a, b and c of 4 heads in 2 groups."""
    x, b, c = random((batch, tokens, 4, 6)), random((batch, tokens, 2, 8), seed=1), random((batch, tokens, 2, 8), seed=2)
    return [x, mx.sigmoid(random((batch, tokens, 4), seed=3)), -mx.exp(random((4,), seed=4)), b, c]


@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_matches_float64(tokens: int) -> None:
    arrays, d, state, mask = draw(tokens=tokens), random((4,)), random((2, 4, 6, 8)), random((2, tokens)) > -0.5
    for given in ((None, None, None), (d, None, None), (None, state, mask), (d, state, mask)):
        y, last = mlx_cuda.ssd(*arrays, d=given[0], state=given[1], mask=given[2])
        expected = exact(mlx_cuda.ssd, arrays, *given[1:])
        assert_close(y, expected[0] if given[0] is None else expected[0] + host(d)[:, None] * host(arrays[0]))
        assert_close(last, expected[1])


def test_dtypes() -> None:
    arrays = draw()
    for dtype, expected in ((mx.float16, mx.float16), (mx.int32, mx.float32)):
        y, state = mlx_cuda.ssd(arrays[0].astype(dtype), *arrays[1:3], *(each.astype(dtype) for each in arrays[3:]))
        assert (y.dtype, state.dtype) == (expected, mx.float32)


def test_no_token_leaves_the_state() -> None:
    y, last = mlx_cuda.ssd(*draw(tokens=0), state=(state := random((2, 4, 6, 8))))
    assert y.shape == (2, 0, 4, 6)
    assert mx.array_equal(last, state)
    assert last is not state


def test_derivatives() -> None:
    """Of all that is given, against differences in float64."""
    arrays, cotangent = [*draw(batch=1, tokens=3), random((1, 4, 6, 8))], random((1, 3, 4, 6), seed=9)
    gradients = mx.vjp(lambda *a: mlx_cuda.ssd(*a[:5], state=a[5])[0], arrays, [cotangent])[1]

    def value(values: list[Array]) -> float:
        x, dt, a, b, c, state = values
        y, _ = reference.linear_attention([c, b, x, np.exp(dt * a), dt], state, delta=False)
        return float((y * host(cotangent)).sum())

    for i, gradient in enumerate(gradients):
        direction, values = host(random(arrays[i].shape, seed=20 + i)), [host(each) for each in arrays]
        sides = [value([*values[:i], values[i] + sign * 1e-6 * direction, *values[i + 1 :]]) for sign in (1, -1)]
        assert abs((host(gradient) * direction).sum() - (sides[0] - sides[1]) / 2e-6) < 2e-3


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (with_(draw(), 0, mx.zeros((2, 7, 6))), {}, r"x must be \[B, T, H, P\], and b and c \[B, T, G, N\], got \(2,7,6\)"),
        (with_(draw(), 4, mx.zeros((2, 7, 2, 9))), {}, "x must be"),
        (with_(draw(), 0, mx.zeros((2, 7, 3, 6))), {}, "multiple of the groups"),
        (with_(draw(), 1, mx.zeros((2, 7, 2))), {}, r"dt must be \[B, T, H\] and a \[H\], got \(2,7,2\) and \(4,\)"),
        (with_(draw(), 2, mx.zeros((3,))), {}, "dt must be"),
        (with_(draw(), 3, mx.zeros((2, 7, 2, 8), mx.complex64)), {}, "Only real types"),
        (draw(), {"state": mx.zeros((2, 4, 8, 6))}, r"state must have the shape \(2,4,6,8\)"),
        (draw(), {"mask": mx.ones((7, 2), mx.bool_)}, "mask must have the shape"),
        (draw(), {"d": mx.ones((2,))}, r"d must have the shape \(4,\)"),
    ],
    ids=lambda value: "" if isinstance(value, (list, dict)) else str(value)[:24],
)
def test_errors(arrays: Arrays, options: dict[str, mx.array], message: str) -> None:
    with pytest.raises(ValueError, match=r"^\[ssd\] .*" + message):
        mlx_cuda.ssd(*arrays, **options)  # type: ignore[arg-type]
