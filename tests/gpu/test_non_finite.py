"""NaN and infinity come out where they come out of MLX's operations one after another in float32: each engine, each of its inputs.

``tests/package/test_non_finite.py`` does the same for what is composed of MLX's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.attention import run, spread
from mlx_cuda._attention.options import operands
from mlx_cuda._common.choice import Choice
from mlx_cuda._loader import native

from .decoding_checks import as_it_is, fresh, make, replayed, words
from .decoding_checks import run as run_model
from .formats import Form
from .non_finite import NUMBERS, Attention, Call, attention, differences, finite, linear_attention, linear_call
from .support import has_small_memory, normal

pytestmark = pytest.mark.gpu

derivatives = pytest.mark.parametrize("derivative", [False, True], ids=["result", "gradient"])


def check(call: Call, name: str, about: object, *, derivative: bool = False) -> None:
    found = differences(call, name, derivative=derivative)
    assert not found, (about, *found)


# ---------------------------------------------------------------------------------------------------------------- attention
class Engine(NamedTuple):
    """A form of attention on one engine; with few keys but where more of them have another kernel."""

    name: Any
    form: Attention
    dtype: mx.Dtype = mx.bfloat16
    derivative: bool = False


FEW, WIDE, MANY = (1, 8, 2, 1, 300, 64, 64), (1, 8, 2, 1, 300, 128, 128), (1, 4, 2, 70, 200, 64, 64)
ENGINES = {
    "decode": Engine("decode", Attention(FEW, lse=True), derivative=True),
    "decode float16": Engine("decode", Attention(WIDE, lse=True), mx.float16),
    "decode, parts": Engine("decode", Attention((1, 8, 2, 1, 3000, 128, 128), lse=True)),
    "decode, bool mask": Engine("decode", Attention(FEW, mask="row")),
    "decode, additive mask": Engine("decode", Attention(WIDE, mask="additive"), derivative=True),
    "decode, additive mask of several rows": Engine("decode", Attention((1, 8, 2, 4, 300, 128, 128), mask="additive", lse=True)),
    "decode, all": Engine("decode", Attention(FEW, mask="additive", softcap=5.0, sinks=True, lse=True), derivative=True),
    "decode, ring": Engine("decode", Attention((2, 16, 8, 1, 2200, 128, 128), sinks=True, lse=True)),
    "decode 256": Engine("decode", Attention((1, 8, 2, 1, 300, 256, 256), lse=True)),
    "decode 256, bool mask": Engine("decode", Attention((1, 8, 2, 1, 300, 256, 256), mask="row", lse=True)),
    "decode 256, rows": Engine("decode", Attention((1, 16, 2, 8, 300, 256, 256), window=(200, 0), lse=True)),
    "decode, rows": Engine("decode", Attention((1, 16, 2, 8, 300, 128, 128), window=(-1, 0), lse=True)),
    "decode, rows of two groups": Engine("decode", Attention((1, 32, 2, 8, 300, 64, 64), mask="additive", sinks=True, lse=True)),
    "decode wide": Engine("decode", Attention((1, 16, 1, 2, 300, 512, 512), softcap=5.0, lse=True)),
    "decode wide, shared": Engine("decode", Attention((1, 16, 1, 2, 300, 576, 512), lse=True, shared=True)),
    "flash": Engine("flash", Attention(MANY), derivative=True),
    "flash, logarithms": Engine("flash", Attention(MANY, window=(120, 0), lse=True)),
    "flash, bool mask": Engine("flash", Attention(MANY, mask="bool", lse=True), derivative=True),
    "flash, additive mask": Engine("flash", Attention(MANY, mask="additive"), derivative=True),
    "flash, additive mask, logarithms": Engine("flash", Attention(MANY, mask="additive", lse=True)),
    "flash, soft cap": Engine("flash", Attention(MANY, softcap=5.0, sinks=True, lse=True), derivative=True),
    "flash, all": Engine("flash", Attention(MANY, mask="additive", softcap=5.0, sinks=True, lse=True)),
    "flash 128, additive mask": Engine("flash", Attention((1, 4, 2, 150, 300, 128, 128), mask="additive"), mx.float16),
    "flash 192": Engine("flash", Attention((1, 4, 2, 70, 200, 192, 128), mask="additive", lse=True)),
    "flash 256": Engine("flash", Attention((1, 4, 2, 70, 200, 256, 256), sinks=True, lse=True)),
    "flash 576": Engine("flash", Attention((1, 4, 1, 40, 200, 576, 512), mask="additive", sinks=True, lse=True)),
    "flash float32": Engine("flash", Attention(MANY, mask="additive", sinks=True, lse=True), mx.float32, derivative=True),
    "flash float32, soft cap": Engine("flash", Attention((1, 4, 2, 40, 100, 128, 128), softcap=5.0, lse=True), mx.float32),
    "cudnn": Engine("cudnn", Attention((1, 4, 2, 128, 128, 64, 64)), derivative=True),
    "cudnn, logarithms": Engine("cudnn", Attention((1, 4, 2, 128, 128, 128, 128), sinks=True, lse=True), mx.float16),
    "cudnn, window": Engine("cudnn", Attention((1, 4, 2, 64, 200, 128, 128), window=(-1, 0), lse=True)),
}


def by_engine(engine: Engine, q: mx.array, k: mx.array, v: mx.array, **given: Any) -> Sequence[mx.array]:
    """Whatever the dispatch would choose."""
    form, on = engine.form, mx.default_stream(mx.gpu)
    window = None if form.window == (-1, -1) else (None if form.window[0] < 0 else form.window[0], form.window[1])
    with mx.stream(on):
        arrays = operands(
            q, k, v, mask=given.get("mask", given.get("seen")), window_size=window, softcap=form.softcap or None, sinks=given.get("sinks"),
            return_lse=form.lse,
        )  # fmt: skip
        return run(*arrays, Choice(engine.name, "the test asks for it"), force_fused=False, stream=on)


def kernel_of(engine: Engine) -> str:
    """What a failure is told of."""
    on, (arrays, options, _) = mx.default_stream(mx.gpu), engine.form.draw(engine.dtype)
    mask = arrays.get("mask", options.get("seen") if engine.form.mask != "none" else None)
    with mx.stream(on):
        q, k, v, checked = operands(
            arrays["q"], arrays["k"], arrays["v"], mask=mask, softcap=engine.form.softcap or None, sinks=arrays.get("sinks"),
            return_lse=engine.form.lse,
        )  # fmt: skip
        return str(native.module(on).attention_kernel(engine.name, q, k, v, spread(q, k, checked), on))


def inputs(derivative: bool) -> list[tuple[str, str]]:
    return [(name, array) for name, engine in ENGINES.items() for array in engine.form.inputs if engine.derivative or not derivative]


@pytest.mark.parametrize(("engine", "name"), inputs(derivative=False))
def test_attention(engine: str, name: str) -> None:
    chosen = ENGINES[engine]
    if max(chosen.form.sizes[5:]) > 256 and has_small_memory():
        pytest.skip("its blocks have too little memory for heads this wide")
    about = chosen.name if chosen.name == "cudnn" else kernel_of(chosen)
    check(chosen.form.call(partial(by_engine, chosen), chosen.dtype), name, about)


@pytest.mark.parametrize(("engine", "name"), inputs(derivative=True))
def test_gradients_of_attention(engine: str, name: str) -> None:
    chosen = ENGINES[engine]
    check(chosen.form._replace(lse=False).call(partial(by_engine, chosen), chosen.dtype), name, chosen.name, derivative=True)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_packed_sequences(name: str) -> None:
    def ours(q: mx.array, k: mx.array, v: mx.array) -> Sequence[mx.array]:
        rows = [each[0].swapaxes(0, 1) for each in (q, k, v)]
        ends: Any = [mx.array([0, each.shape[0]], mx.int32) for each in rows[:2]]
        result, lse = mlx_cuda.attention_varlen(*rows, *ends, max_seqlen_q=70, max_seqlen_k=200, return_lse=True)
        return [result.swapaxes(0, 1)[None], lse[None]]

    check(Attention(MANY, lse=True).call(ours, mx.bfloat16), name, "varlen")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_pages(name: str, dim: int, rows: int) -> None:
    page: int = 16
    paged: Any = mlx_cuda.paged_attention  # overloads do not let pages through

    def ours(q: mx.array, k: mx.array, v: mx.array) -> Sequence[mx.array]:
        pages: Any = [mx.contiguous(each[0].reshape(each.shape[1], -1, page, dim).swapaxes(0, 1)) for each in (k, v)]
        table, lengths = mx.arange(304 // page, dtype=mx.int32)[None], mx.array([304], mx.int32)
        return list(paged(q, *pages, table, lengths, return_lse=True, force_fused=True))

    form = Attention((1, 8, 2, rows, 304, dim, dim), window=(-1, 0), lse=True)
    check(form.call(ours, mx.bfloat16), name, "paged")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", ["q", "k_scales", "k_biases", "v_scales", "v_biases"])
def test_quantized_keys(name: str, dim: int, bits: int) -> None:
    drawn = Attention((1, 8, 2, 2, 300, dim, dim)).draw(mx.bfloat16)[0]
    (k, *k_parts), (v, *v_parts) = (mx.quantize(drawn[each], group_size=64, bits=bits) for each in ("k", "v"))
    arrays = dict(zip(("q", "k_scales", "k_biases", "v_scales", "v_biases"), (drawn["q"], *k_parts, *v_parts), strict=True))
    attend: Any = mlx_cuda.quantized_attention

    def ours(q: mx.array, *parts: mx.array) -> Sequence[mx.array]:
        return list(attend(q, (k, *parts[:2]), (v, *parts[2:]), group_size=64, bits=bits, return_lse=True))

    def unfused(q: mx.array, *parts: mx.array) -> Sequence[mx.array]:
        keys, values = weights(bits, k, *parts[:2]), weights(bits, v, *parts[2:])
        return attention(q, keys, values, scale=dim**-0.5)

    check(Call(ours, unfused, arrays, {"q": (0, 3, 1, 2), **dict.fromkeys(list(arrays)[1:], (0, 1, 7, 1))}), name, "quantized")


def weights(bits: int, w: mx.array, scales: mx.array, biases: mx.array, *, group: int = 64) -> mx.array:
    """Affine weights in float32, of operations that have gradients."""
    codes = mx.dequantize(w, mx.ones(scales.shape), mx.zeros(scales.shape), group_size=group, bits=bits)
    return codes * mx.repeat(scales, group, axis=-1) + mx.repeat(biases, group, axis=-1)


# --------------------------------------------------------------------------------------------------------- linear attention
LINEAR = {  # tokens, the one of the number, dtype, decays of channels
    "recurrent, a few tokens": (3, 1, mx.bfloat16, False),
    "recurrent": (40, 21, mx.float16, False),
    "recurrent float32": (150, 70, mx.float32, False),
    "recurrent, channels": (30, 17, mx.bfloat16, True),
    "recurrent, a few tokens with channels": (2, 1, mx.float32, True),
    "chunked": (150, 70, mx.bfloat16, False),
    "chunked float16": (150, 149, mx.float16, False),
}
NAMES = ("q", "k", "v", "g", "beta", "state")


@derivatives
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", LINEAR)
def test_gated_delta(engine: str, name: str, *, derivative: bool) -> None:
    tokens, token, dtype, channels = LINEAR[engine]

    def ours(*arrays: mx.array) -> Sequence[mx.array]:
        return mlx_cuda.gated_delta(*arrays[:5], state=arrays[5])

    # Gradients are by chunks of matmuls, in which the number reaches other tokens of its own.
    call = linear_call(ours, tokens, dtype, channels=channels, token=token, loose=derivative and not channels)
    *arrays, state = call.arrays.values()
    chosen = mlx_cuda.explain(mlx_cuda.gated_delta, *arrays, state=state).engine
    assert chosen == engine.split(maxsplit=1)[0].rstrip(",")
    check(call, name, engine, derivative=derivative)


@pytest.mark.parametrize(("name", "derivative"), [
    *[(name, False) for name in ("x", "dt", "a", "b", "c", "state")],
    *[(name, True) for name in ("x", "dt", "b", "c", "state")],  # of a, every chunk has the number
])  # fmt: skip
@pytest.mark.parametrize("tokens", [3, 40, 150])
def test_ssd(tokens: int, name: str, *, derivative: bool) -> None:
    token = min(70, tokens // 2)
    drawn = linear_call(list, tokens, mx.bfloat16, token=token)
    q, k, v, _, beta, state = drawn.arrays.values()
    arrays = {"x": v, "dt": beta, "a": mx.array([-0.3, -0.5]), "b": k, "c": q, "state": state}
    places = {"x": "v", "dt": "beta", "b": "k", "c": "q", "state": "state"}

    def ours(x: mx.array, dt: mx.array, a: mx.array, b: mx.array, c: mx.array, state: mx.array) -> Sequence[mx.array]:
        return mlx_cuda.ssd(x, dt, a, b, c, state=state)

    def unfused(x: mx.array, dt: mx.array, a: mx.array, b: mx.array, c: mx.array, state: mx.array) -> Sequence[mx.array]:
        return linear_attention(c, b, x, mx.exp(dt * a), dt, state, delta=False)

    where = {"a": (1,), **{mine: drawn.places[theirs] for mine, theirs in places.items()}}
    call = Call(ours, unfused, arrays, where, token if derivative else -1, ("x", "dt", "b", "c"))
    check(call, name, "ssd", derivative=derivative)


def test_a_masked_token_gives_zeros_after_nan() -> None:
    for tokens in (4, 40, 150):
        q, k, v, g, beta, state = linear_call(list, tokens, mx.bfloat16, token=1).arrays.values()
        v[0, 1] = float("nan")
        mask = mx.array(np.arange(tokens) != tokens - 2)[None]
        y = mlx_cuda.gated_delta(q, k, v, g, beta, state=state, mask=mask)[0]
        assert not y[0, tokens - 2].any(), tokens
        assert mx.isnan(y[0, tokens - 1]).all(), tokens


# ----------------------------------------------------------------------------------------------------------------- matmuls
@derivatives
@pytest.mark.parametrize("activation", [None, "relu", "gelu_approx"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_linear(rng: np.random.Generator, name: str, dtype: mx.Dtype, activation: Any, *, derivative: bool) -> None:
    def activated(y: mx.array) -> mx.array:
        if activation == "relu":
            return mx.maximum(y, 0)
        return y if activation is None else 0.5 * y * (1 + mx.tanh(0.7978845608 * (y + 0.044715 * y**3)))

    arrays = {"x": normal(rng, (40, 64), dtype), "w": normal(rng, (48, 64), dtype), "bias": normal(rng, (48,), dtype)}
    call = Call(
        lambda x, w, b: [mlx_cuda.linear(x, w, b, activation=activation)],
        lambda x, w, b: [activated(x @ w.T + b)],
        arrays,
        {"x": (20, 3), "w": (4, 1), "bias": (2,)},
    )
    check(call, name, ("linear", activation), derivative=derivative)


# Rows, columns and what is summed up over: as each engine has them on Hopper.
MATMULS = {"gemv": (1, 256, 512), "small_m": (6, 256, 512), "small_m, odd": (3, 100, 192), "dequantize": (1000, 256, 512)}


@derivatives
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("engine", MATMULS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_quantized_matmul(rng: np.random.Generator, dtype: mx.Dtype, engine: str, bits: int, *, derivative: bool) -> None:
    rows, columns, inner = MATMULS[engine]
    w, scales, biases = mx.quantize(normal(rng, (columns, inner), dtype), group_size=64, bits=bits)
    call = Call(
        lambda x, s, b: [mlx_cuda.quantized_matmul(x, w, s, b, group_size=64, bits=bits)],
        lambda x, *parts: [x @ weights(bits, w, *parts).T],
        {"x": normal(rng, (rows, inner), dtype), "scales": scales, "biases": biases},
        {"x": (rows // 2, 70), "scales": (90, 1), "biases": (33, 0)},
    )
    for name in call.places:
        check(call, name, (engine, name), derivative=derivative)


@pytest.mark.parametrize("form", [Form("mxfp4", 4, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)], ids=str)
@pytest.mark.parametrize("engine", MATMULS)
def test_small_floats(rng: np.random.Generator, engine: str, form: Form) -> None:
    rows, columns, inner = MATMULS[engine]
    w, scales, *_ = mx.quantize(normal(rng, (columns, inner), mx.bfloat16), **form.options)
    scales[5, 2] = 127 if form.mode == "nvfp4" else 255  # NaN
    mx.eval(scales)
    exact = mx.dequantize(w, scales, **form.options, dtype=mx.float32)
    call = Call(
        lambda x: [mlx_cuda.quantized_matmul(x, w, scales, **form.options)],
        lambda x: [x @ exact.T],
        {"x": normal(rng, (rows, inner), mx.bfloat16)},
        {"x": (rows // 2, 70)},
    )
    assert not mx.isfinite(exact[5]).all()
    check(call, "x", engine)


@derivatives
@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("name", ["x", "scales", "biases"])
def test_gather_qmm(rng: np.random.Generator, name: str, rows: int, *, derivative: bool) -> None:
    w, scales, biases = mx.quantize(normal(rng, (8, 128, 256), mx.bfloat16), group_size=64, bits=4)
    chosen = mx.array(rng.integers(0, 8, rows), mx.uint32)
    chosen[0] = 3
    call = Call(
        lambda x, s, b: [mlx_cuda.gather_qmm(x, w, s, b, rhs_indices=chosen, group_size=64, bits=4)],
        lambda x, *parts: [x @ weights(4, w, *parts)[chosen].swapaxes(1, 2)],
        {"x": normal(rng, (rows, 1, 256), mx.bfloat16), "scales": scales, "biases": biases},
        {"x": (2, 0, 70), "scales": (3, 90, 1), "biases": (3, 33, 0)},
    )
    check(call, name, rows, derivative=derivative)


@derivatives
@pytest.mark.parametrize("name", ["x", "w"])
@pytest.mark.parametrize("function", ["grouped_matmul", "gather_mm"])
def test_experts(rng: np.random.Generator, function: str, name: str, *, derivative: bool) -> None:
    """Groups end within tiles: the gradient of an expert's weights is none of the rows of others."""
    owners = mx.array(np.sort(rng.integers(0, 4, 90)), mx.uint32)
    offsets = mx.array([int((owners < i).sum()) for i in range(5)], mx.int32)
    ours: dict[str, Any] = {
        "grouped_matmul": lambda x, w: [mlx_cuda.grouped_matmul(x, w, offsets)],
        "gather_mm": lambda x, w: [mlx_cuda.gather_mm(x[:, None], w.swapaxes(1, 2), rhs_indices=owners, sorted_indices=True)[:, 0]],
    }

    def unfused(x: mx.array, w: mx.array) -> Sequence[mx.array]:
        ends = np.array(offsets)
        return [mx.concatenate([x[ends[i] : ends[i + 1]] @ w[i].T for i in range(4)])]

    arrays = {"x": normal(rng, (90, 64), mx.bfloat16), "w": normal(rng, (4, 96, 64), mx.bfloat16)}
    check(Call(ours[function], unfused, arrays, {"x": (40, 5), "w": (2, 11, 7)}), name, function, derivative=derivative)


@pytest.mark.parametrize("name", ["scale_a", "scale_b", "bias"])
def test_fp8_matmul(rng: np.random.Generator, name: str) -> None:
    (a, scale_a), (b, scale_b) = (mlx_cuda.quantize_fp8(normal(rng, (128, 256), mx.bfloat16), axis=-1) for _ in range(2))
    left, right = (mx.from_fp8(each, mx.float32) for each in (a, b))
    call = Call(
        lambda s, t, c: [mlx_cuda.fp8_matmul(a, b, scale_a=s, scale_b=t, bias=c)],
        lambda s, t, c: [(left * s) @ (right * t).T + c],
        {"scale_a": scale_a, "scale_b": scale_b, "bias": normal(rng, (128,), mx.bfloat16)},
        {"scale_a": (9, 0), "scale_b": (77, 0), "bias": (3,)},
    )
    check(call, name, "fp8")


# ------------------------------------------------------------------------------------------------------------------- others
@derivatives
@pytest.mark.parametrize("name", ["gate", "up"])
@pytest.mark.parametrize("columns", [64, 61])
def test_swiglu(rng: np.random.Generator, columns: int, name: str, *, derivative: bool) -> None:
    call = Call(
        lambda gate, up: [mlx_cuda.swiglu(gate, up)],
        lambda gate, up: [gate * mx.sigmoid(gate) * up],
        {each: normal(rng, (8, columns), mx.bfloat16) for each in ("gate", "up")},
        {"gate": (2, 3), "up": (4, 1)},
    )
    check(call, name, "swiglu", derivative=derivative)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("name", ["x", "weight", "bias", "state"])
def test_short_conv(rng: np.random.Generator, name: str, tokens: int) -> None:
    def unfused(x: mx.array, weight: mx.array, bias: mx.array, state: mx.array) -> Sequence[mx.array]:
        rows = mx.concatenate([state, x], axis=1)
        y = bias + sum(rows[:, k : k + tokens] * weight[:, k] for k in range(4))
        return [y * mx.sigmoid(y), rows[:, tokens:]]

    shapes = {"x": (2, tokens, 96), "weight": (96, 4), "bias": (96,), "state": (2, 3, 96)}
    call = Call(
        lambda x, weight, bias, state: mlx_cuda.short_conv(x, weight, bias=bias, state=state, activation="silu"),
        unfused,
        {each: normal(rng, shape, mx.bfloat16) for each, shape in shapes.items()},
        {"x": (1, tokens // 2, 5), "weight": (7, 1), "bias": (9,), "state": (0, 2, 11)},
    )
    check(call, name, "short_conv")


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("mixture", [None, (16, 4, "qwen3_moe"), (16, 4, "olmoe"), (16, 4, "mixtral")], ids=str)
@pytest.mark.parametrize("form", [None, Form("affine", 4, 64), Form("affine", 8, 64), Form("mxfp8", 8, 32)], ids=str)
def test_captured_steps(rng: np.random.Generator, form: Form | None, mixture: Any) -> None:
    """A token whose embedding is not finite, after steps that were: its logits, and those of the tokens that see it."""
    bad, at = 7, 20
    for number, value in NUMBERS.items():
        model = make(rng, mx.float16 if form is None or form.mode == "affine" else mx.bfloat16, form, mixture=mixture)
        name = "scales" if "scales" in model.embed else "weight"
        model.embed[name][bad, 0] = value
        mx.eval(model.parameters())
        tokens = words(rng, 1, 26)
        tokens = mx.where(tokens == bad, 8, tokens)
        tokens[0, at] = bad
        own, ours = (run_model(model, fresh(model), tokens, step(model)) for step in (as_it_is, replayed))
        assert mlx_cuda.explain(mlx_cuda.decode_step, model).engine == "replay"
        expected, found = finite([own, ours])
        assert expected[:, : at - 11].all(), number
        assert np.array_equal(expected, found), number
