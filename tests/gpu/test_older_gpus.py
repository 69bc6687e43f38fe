"""GPUs older than sm_80, as the T4: all operations are composed there, and ``patch()`` changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._common.choice import OLDEST_GPU
from mlx_cuda._loader import native
from mlx_cuda._mlx_lm import wrapped
from mlx_cuda._patch import EVERY

from . import reference
from .decoding_checks import FOUR, make, words
from .decoding_model import caches_of
from .support import GRADIENT_TOLERANCE, TOLERANCE, device, host, normal, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.older_gpus]

HALF = mx.float16
Rng = np.random.Generator


@pytest.fixture(autouse=True)
def _older() -> None:
    if native.capability(mx.Device(mx.gpu, 0)) >= OLDEST_GPU:
        pytest.skip("needs a GPU older than sm_80, or MLX_CUDA_CAPABILITY=75")


def heads(rng: Rng, *counts: int, tokens: int = 70, batch: int = 2) -> list[mx.array]:
    return [normal(rng, (batch, count, tokens, 64), HALF) for count in counts]


def close(actual: mx.array, expected: Any, tolerance: float = 2 * TOLERANCE[HALF]) -> None:
    assert relative_error(actual, expected) <= tolerance


@pytest.mark.parametrize("options", [{"window_size": (20, 0)}, {"softcap": 3.0}, {"mask": "causal"}, {}], ids=str)
def test_attention(rng: Rng, options: dict[str, Any]) -> None:
    q, k, v = heads(rng, 4, 2, 2)
    window = options.get("window_size", (-1, 0 if "mask" in options else -1))
    bias = reference.bias_of(70, 70, window=window)
    given = [host(each) for each in (q, k, v)]
    expected = reference.attend(*given, scale=0.125, bias=bias, softcap=options.get("softcap", 0.0))
    out, lse = mlx_cuda.attention(q, k, v, scale=0.125, return_lse=True, **options)
    close(out, expected.out)
    close(lse, expected.lse)
    assert mlx_cuda.explain(mlx_cuda.attention, q, k, v, **options).engine in {"mlx", "fallback"}


def test_gradients_of_attention(rng: Rng) -> None:
    q, k, v, cotangent = heads(rng, 4, 2, 2, 4)
    gradients = mx.vjp(lambda *arrays: mlx_cuda.attention(*arrays, scale=0.125, mask="causal"), [q, k, v], [cotangent])[1]
    exact = reference.attention_vjp(*map(host, (q, k, v, cotangent)), scale=0.125, causal=True)
    for mine, expected in zip(gradients, exact, strict=True):
        close(mine, expected, GRADIENT_TOLERANCE[HALF])


def test_attention_to_pages(rng: Rng) -> None:
    k_pages, v_pages = (normal(rng, (5, 2, 32, 64), HALF) for _ in range(2))
    rows = heads(rng, 2, 2, tokens=1)
    table, lengths = mx.array([[3, 0], [1, 4]]), mx.array([40, 64])
    k, v = mlx_cuda.paged_cache_update(k_pages, v_pages, rows[0], rows[1], table, lengths)
    q = heads(rng, 4, tokens=1)[0]
    whole = [host(each)[np.array(table)].swapaxes(1, 2).reshape(2, 2, 64, 64) for each in (k, v)]
    for at, row in zip(whole, rows, strict=True):
        assert np.array_equal(at[0, :, 39], host(row)[0, :, 0])
        assert np.array_equal(at[1, :, 63], host(row)[1, :, 0])
    bias = reference.bias_of(1, 64, ends=np.array([40, 64]))
    close(mlx_cuda.paged_attention(q, k, v, table, lengths), reference.attend(host(q), *whole, scale=0.125, bias=bias).out)


def test_quantised(rng: Rng) -> None:
    w, x = normal(rng, (96, 128), HALF), normal(rng, (7, 128), HALF)
    parts = mx.quantize(w, 64, 4)
    close(mlx_cuda.quantized_matmul(x, *parts, group_size=64, bits=4), host(x) @ host(mx.dequantize(*parts, 64, 4)).T)
    q, k, v = heads(rng, 4, 2, 2)
    packed = [mx.quantize(each, 64, 8) for each in (k, v)]
    wide = [host(mx.dequantize(*each, 64, 8)) for each in packed]
    expected = reference.attention(host(q), *wide, scale=0.125, causal=True)
    close(mlx_cuda.quantized_attention(q, *packed, group_size=64, bits=8, scale=0.125, mask="causal"), expected)


def test_experts(rng: Rng) -> None:
    x, w = normal(rng, (6, 1, 128), HALF), normal(rng, (4, 128, 96), HALF)
    which = mx.array([0, 3, 3, 1, 0, 2])
    expected = np.stack([host(x)[i] @ host(w)[int(each)] for i, each in enumerate(which.tolist())])  # type: ignore[arg-type]
    close(mlx_cuda.gather_mm(x, w, rhs_indices=which), expected)
    parts = mx.quantize(mx.contiguous(w.swapaxes(1, 2)), 64, 4)
    wide = host(mx.dequantize(*parts, 64, 4)).swapaxes(1, 2)
    expected = np.stack([host(x)[i] @ wide[int(each)] for i, each in enumerate(which.tolist())])  # type: ignore[arg-type]
    close(mlx_cuda.gather_qmm(x, *parts, rhs_indices=which, group_size=64, bits=4), expected)


def test_linear_attention(rng: Rng) -> None:
    q, k = (normal(rng, (1, 90, 2, 64), HALF, 0.1) for _ in range(2))
    v = normal(rng, (1, 90, 4, 64), HALF)
    g, beta = (device(rng.uniform(0.8, 1, (1, 90, 4)), mx.float32) for _ in range(2))
    y, state = mlx_cuda.gated_delta(q, k, v, g, beta)
    expected = reference.linear_attention([host(each) for each in (q, k, v, g, beta)])
    close(y, expected[0])
    close(state, expected[1])
    x, taps = normal(rng, (2, 40, 64), HALF), normal(rng, (64, 4), HALF)
    y, rows = mlx_cuda.short_conv(x, taps, activation="silu")
    exact = reference.short_conv(host(x), host(taps), activation="silu")
    close(y, exact[0])
    close(rows, exact[1])


def test_patch_changes_nothing(rng: Rng) -> None:
    model, tokens = make(rng, HALF, FOUR), words(rng, 1, 8)
    with mlx_cuda.patch():
        assert [getattr(route.owner, route.name) for route in EVERY] == [route.upstream for route in EVERY]
        assert not wrapped.installed()
    cache = caches_of(model)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"\[decode_step\] Steps are captured on GPUs from sm_80 on, got sm_"):
        mlx_cuda.decode_step(model, tokens[:, :1], cache)
    assert {each.offset for each in cache} == {8}


@pytest.mark.parametrize(
    "call",
    [
        lambda q: mlx_cuda.attention(q, q, q, softcap=2.0, force_fused=True),
        lambda q: mlx_cuda.quantized_attention(q, mx.quantize(q), mx.quantize(q), softcap=2.0, force_fused=True),
    ],
    ids=["attention", "quantized attention"],
)
def test_force_fused_says_why_not(rng: Rng, call: Callable[[mx.array], mx.array]) -> None:
    with pytest.raises(ValueError, match="sm_80 or newer"):
        call(heads(rng, 2)[0])
