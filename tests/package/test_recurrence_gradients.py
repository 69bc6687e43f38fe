"""Derivatives of linear attention by chunks against those that MLX derives of the composition."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._loader import native as _native
from mlx_cuda._recurrence import backward
from mlx_cuda._recurrence.backward import by_chunks
from mlx_cuda._recurrence.composed import composed
from mlx_cuda._recurrence.fused import fused
from mlx_cuda._recurrence.rules import Call

from .recurrence_scans import by_mlx, scan
from .references import error, host, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

CLOSE = 5e-3 if mx.cuda.is_available() else 2e-5  # a GPU rounds the inputs of float32 matmuls to TF32
# By chunks the gradients of strong decays cancel. MLX's wheels for Windows bring OpenBLAS: 3.6e-5 with its kernels for AVX-512,
# 2.8e-5 with those for AVX2. Those for Linux x86_64 bring the reference BLAS: 1.7e-5 everywhere.
BY_CHUNKS = max(CLOSE, 5e-5) if sys.platform == "win32" else CLOSE
SHAPES = {  # batch, tokens, heads of keys and of values, sizes of a key and of a value
    "one chunk": (2, 64, 1, 1, 8, 6),
    "more": (1, 65, 2, 2, 16, 8),
    "three chunks": (2, 170, 2, 6, 8, 16),
}


def draw(
    shape: tuple[int, int, int, int, int, int], decay: tuple[float, float], dtype: mx.Dtype, *, more: bool
) -> tuple[Call, mx.array, mx.array]:
    """A call, perhaps with a state and a mask, and the gradients of its results."""
    batch, tokens, key_heads, heads, key, value = shape
    q, k = (random((batch, tokens, key_heads, key), dtype, seed=seed) for seed in (0, 1))
    k = k / mx.linalg.norm(k.astype(mx.float32), axis=-1, keepdims=True).astype(dtype)
    v, gates = random((batch, tokens, heads, value), dtype, seed=2), (batch, tokens, heads)
    g = decay[0] + (decay[1] - decay[0]) * mx.sigmoid(random(gates, seed=3))
    beta = 1.5 * mx.sigmoid(random(gates, seed=4))
    state = random((batch, heads, value, key), seed=5) if more else None
    mask = random((batch, tokens), seed=6) > -0.5 if more else None
    return Call(q, k, v, g, beta, state, mask, None), random(v.shape, dtype, seed=7), random((batch, heads, value, key), seed=8)


def derived(call: Call, cotangents: list[mx.array], *, delta: bool) -> list[mx.array]:
    masks = [] if call.mask is None else [call.mask]
    floats = [*call[:5], mx.zeros_like(cotangents[1]) if call.state is None else call.state]
    return mx.vjp(lambda *a: list(composed(call._replace(state=floats[5]).with_arrays([*a, *masks]), delta=delta)), floats, cotangents)[1]


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "plain"])
@pytest.mark.parametrize("more", [False, True], ids=["from nothing", "with state and mask"])
@pytest.mark.parametrize("decay", [(0.9, 1.0), (0.0, 0.3), (1.0, 1.0)], ids=["weak", "strong", "none"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_by_chunks(shape: tuple[int, int, int, int, int, int], decay: tuple[float, float], *, more: bool, delta: bool) -> None:
    call, *cotangents = draw(shape, decay, mx.float32, more=more)
    ours, theirs = (each(call, cotangents, delta=delta) for each in (by_mlx, derived))
    for name, mine, expected in zip("qkvgbs", ours, theirs, strict=True):
        assert mine.dtype == mx.float32
        assert error(mine, host(expected)) < BY_CHUNKS, name


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_gradients_in_16_bits(dtype: mx.Dtype) -> None:
    call, *cotangents = draw(SHAPES["three chunks"], (0.5, 1.0), dtype, more=True)
    wide = call.with_arrays([each if each.dtype == mx.bool_ else each.astype(mx.float32) for each in call.arrays()])
    ours, theirs = by_mlx(call, cotangents, delta=True), derived(wide, [each.astype(mx.float32) for each in cotangents], delta=True)
    for name, mine, expected in zip("qkvgbs", ours, theirs, strict=True):
        assert error(mine, host(expected)) < (3e-3 if dtype == mx.float16 else 2.5e-2), name


def test_a_decay_of_nothing_has_no_gradient() -> None:
    call, *cotangents = draw(SHAPES["more"], (0.5, 1.0), mx.float32, more=False)
    call.g[:, 3] = 0
    g = by_mlx(call, cotangents, delta=True)[3]
    assert not host(g[:, 3]).any()
    assert error(g, host(derived(call, cotangents, delta=True)[3])) < CLOSE


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of them were called: compositions in their places."""
    called: list[str] = []

    def forward(*given: Any) -> tuple[mx.array, mx.array]:
        called.append("forward")
        q, k, v, g, beta, state, mask, offsets, delta, *_ = given
        return composed(Call(q, k, v, g, beta, state, mask, offsets), delta=delta)

    def scans(*given: Any) -> list[mx.array]:
        called.append("scan")
        *arrays, dy, last, delta, _ = given
        call = Call(*arrays)
        return [each for each in scan(call, by_chunks(call, dy), last, delta=delta) if each is not None]

    def gradients(*_: Any) -> None:
        called.append("gradients")

    there = types.SimpleNamespace(
        traced=lambda _: True, linear_attention=forward, linear_attention_scan=scans, linear_attention_gradients=gradients
    )
    monkeypatch.setattr(_native, "module", lambda _: there)
    return called


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "plain"])
@pytest.mark.parametrize("more", [False, True], ids=["from nothing", "with state and mask"])
@pytest.mark.parametrize("groups", [1, 2], ids=["all heads", "heads in turn"])
def test_gradients_of_calls_in_chunks_come_of_kernels(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, groups: int, *, more: bool, delta: bool
) -> None:
    if groups > 1:
        monkeypatch.setattr(backward, "MEMORY", 1)
    call, *cotangents = draw(SHAPES["three chunks"], (0.6, 1.0), mx.float32, more=more)
    stream, masks = mx.default_stream(mx.default_device()), [] if call.mask is None else [call.mask]
    floats = call.arrays()[: 6 if more else 5]

    def ours(*arrays: mx.array) -> list[mx.array]:
        return list(fused(call.with_arrays([*arrays, *masks]), stream, delta=delta, chunked=True))

    theirs = derived(call, cotangents, delta=delta)
    for name, mine, expected in zip("qkvgbs", mx.vjp(ours, floats, cotangents)[1], theirs, strict=False):
        assert error(mine, host(expected)) < CLOSE, name
    assert kernels == ["forward", *["scan", "gradients"] * groups]


def test_gradients_without_kernels_are_those_of_the_composition(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call, *cotangents = draw(SHAPES["more"], (0.6, 1.0), mx.float32, more=False)
    stream = mx.default_stream(mx.default_device())
    monkeypatch.setattr(_native.module(stream), "linear_attention_scan", lambda *_: None)

    def ours(*arrays: mx.array) -> list[mx.array]:
        return list(fused(call.with_arrays(arrays), stream, delta=True, chunked=True))

    theirs = derived(call, cotangents, delta=True)
    for name, mine, expected in zip("qkvgb", mx.vjp(ours, call.arrays(), cotangents)[1], theirs, strict=False):
        assert error(mine, host(expected)) < CLOSE, name
    assert kernels == ["forward"]


def test_second_derivatives_are_those_of_the_composition(kernels: list[str]) -> None:
    call, *cotangents = draw(SHAPES["more"], (0.6, 1.0), mx.float32, more=True)
    stream = mx.default_stream(mx.default_device())

    def sharpness(function: Any) -> Any:
        def gradient(k: mx.array, v: mx.array) -> Any:
            def loss(k: mx.array) -> Any:
                y, last = function(call._replace(k=k, v=v))
                return (y * cotangents[0]).sum() + (last * cotangents[1]).sum()

            return mx.square(mx.grad(loss)(k)).sum()

        return mx.grad(gradient, argnums=(0, 1))(call.k, call.v)

    ours = sharpness(lambda own: fused(own, stream, delta=True, chunked=True))
    theirs = sharpness(lambda own: composed(own, delta=True))
    assert "scan" in kernels
    for mine, expected in zip(ours, theirs, strict=True):
        assert error(mine, host(expected)) < 10 * CLOSE


@pytest.mark.parametrize("more", [False, True], ids=["from nothing", "with state and mask"])
def test_tangents_of_gradients_are_those_of_the_composition(kernels: list[str], monkeypatch: pytest.MonkeyPatch, *, more: bool) -> None:
    call, *_ = draw(SHAPES["more"], (0.6, 1.0), mx.float32, more=more)
    stream = mx.default_stream(mx.default_device())
    there: Any = _native.module(stream)
    plain = there.linear_attention_scan

    def without_tangents(*given: Any) -> Any:
        """As kernels are."""
        which = [i for i, each in enumerate(given) if isinstance(each, mx.array)]

        def scans(*arrays: mx.array) -> Any:
            own = list(given)
            for i, each in zip(which, arrays, strict=True):
                own[i] = each
            return plain(*own)

        def fails(*_: Any) -> None:
            raise ValueError

        function = mx.custom_function(scans)
        function.jvp(fails)
        return function(*(given[i] for i in which))

    monkeypatch.setattr(there, "linear_attention_scan", without_tangents)

    def moved(function: Any) -> mx.array:
        def loss(k: mx.array) -> Any:
            y, last = function(call._replace(k=k))
            return mx.square(y).sum() + mx.square(last).sum()

        return mx.jvp(mx.grad(loss), [call.k], [random(call.k.shape, mx.float32, seed=9)])[1][0]

    ours = moved(lambda own: fused(own, stream, delta=True, chunked=True))
    assert "scan" in kernels
    assert error(ours, host(moved(lambda own: composed(own, delta=True)))) < 10 * CLOSE


def _sum(results: tuple[mx.array, mx.array]) -> mx.array:
    return mx.square(results[0]).sum() + mx.square(results[1]).sum()


tangents = mx.jvp  # nobody watches this one
DERIVATIVES: dict[str, Callable[[Callable[[mx.array], mx.array], mx.array], object]] = {
    "gradient": lambda loss, k: mx.grad(loss)(k),
    "second derivative": lambda loss, k: mx.grad(lambda k: mx.grad(loss)(k).sum())(k),
    "tangent of a gradient": lambda loss, k: tangents(mx.grad(loss), [k], [k]),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("way", ["kernels", "composition for want of kernels", "composition"])
def test_derivatives_are_built_on_the_stream_of_the_call(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, way: str, derivative: Callable[..., object]
) -> None:
    """MLX asks for them after the call, when another stream is the default again."""
    call, *_ = draw(SHAPES["one chunk"], (0.6, 1.0), mx.float32, more=True)
    stream, found = mx.new_stream(mx.default_device()), []

    def watched(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found.append(mx.default_stream(mx.default_device()))
            return function(*arguments)

        return call

    there: Any = _native.module(stream)
    own = there.linear_attention_scan if way == "kernels" else lambda *_: None
    monkeypatch.setattr(there, "linear_attention_scan", watched(own))
    for name in ("vjp", "jvp", "zeros_like"):
        monkeypatch.setattr(mx, name, watched(getattr(mx, name)))
    derivative(lambda k: _sum(fused(call._replace(k=k), stream, delta=True, chunked=way != "composition")), call.k)
    assert found
    assert all(each == stream for each in found)
