"""What ``patch`` replaces, called as mlx-lm's models and MLX's layers call it: beside MLX's own function in float32 on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._patch import EXPORTERS, ROUTES

from .calls import Call
from .formats import Form
from .support import TOLERANCE, assert_close, host, normal

Build = Callable[[np.random.Generator, mx.Dtype], Call]

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
FORM, EIGHT_BITS = Form("affine", 4, 64), Form("affine", 8, 64)
MXFP4, MXFP8, NVFP4 = Form("mxfp4", 4, 32), Form("mxfp8", 8, 32), Form("nvfp4", 4, 16)
OWNERS = {route.name: route.owner for route in ROUTES}
gpu = pytest.mark.gpu
halves = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


class Case(NamedTuple):
    """Who calls like that, and a call."""

    form: str
    build: Build


def attention(
    q_len: int,
    k_len: int,
    *,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    mask: str | None = None,
    sinks: bool = False,
    dtype: mx.Dtype | None = None,
) -> Build:
    """``mask``: "array" is ``create_causal_mask``'s with a window, "padded" the one of prompts of different lengths."""

    def build(rng: np.random.Generator, half: mx.Dtype) -> Call:
        kind = dtype or half
        q, k, v = (
            normal(rng, (2, count, length, dim), kind)
            for count, length, dim in ((heads[0], q_len, dims[0]), (heads[1], k_len, dims[0]), (heads[1], k_len, dims[1]))
        )
        rows, columns = mx.arange(k_len - q_len, k_len)[:, None], mx.arange(k_len)[None]
        masks: dict[str | None, Any] = {
            None: None,
            "causal": "causal",
            "array": (columns <= rows) & (rows < columns + 20),
            "padded": mx.array([0, k_len // 3]).reshape(2, 1, 1, 1) <= columns,
            "additive": normal(rng, (q_len, k_len), kind),
        }
        more = {"sinks": normal(rng, heads[:1], kind) if sinks else None}
        return Call("scaled_dot_product_attention", (q, k, v), {"scale": dims[0] ** -0.5, "mask": masks[mask], **more})

    return build


def quantized(rng: np.random.Generator, shape: tuple[int, ...], form: Form, dtype: mx.Dtype) -> dict[str, Any]:
    """Weights ``[..., numbers]`` as a layer holds them."""
    with mx.stream(mx.cpu):
        w, scales, *biases = mx.quantize(normal(rng, shape, dtype, shape[-1] ** -0.5), **form.options)
    return {"w": w, "scales": scales, "biases": biases[0] if biases else None}


def matmul(
    x: tuple[int, ...], w: tuple[int, ...], form: Form = FORM, *, transpose: bool = True, layer: bool = True, spare: int = 0
) -> Build:
    """A ``layer`` names its scales and mode, attention to a quantised cache does not, which has room for ``spare`` more rows."""

    def build(rng: np.random.Generator, dtype: mx.Dtype) -> Call:
        *lead, rows, inner = w
        parts = quantized(rng, (*lead, rows + spare, inner), form, dtype)
        if spare:
            parts = {name: part[..., :rows, :] for name, part in parts.items()}
        options = {"transpose": transpose, **form.options}
        arrays = (normal(rng, x, dtype), parts.pop("w"))
        if layer:
            return Call("quantized_matmul", arrays, parts | options)
        del options["mode"]
        return Call("quantized_matmul", (*arrays, *parts.values()), options)

    return build


def experts(x: tuple[int, ...], indices: tuple[int, ...], form: Form | None = FORM, *, n: int = 96, count: int = 8) -> Build:
    """Rows sorted by expert where there is one index for each."""

    def build(rng: np.random.Generator, dtype: mx.Dtype) -> Call:
        chosen = rng.integers(0, count, indices).astype(np.uint32)
        is_sorted = len(indices) == 1
        options = {"rhs_indices": mx.array(np.sort(chosen) if is_sorted else chosen), "sorted_indices": is_sorted}
        rows, shape = normal(rng, x, dtype), (count, n, x[-1])
        if form is None:
            return Call("gather_mm", (rows, normal(rng, shape, dtype, x[-1] ** -0.5).swapaxes(-1, -2)), options)
        parts = quantized(rng, shape, form, dtype)
        return Call("gather_qmm", (rows, *parts.values()), options | {"transpose": True, **form.options, "global_scale": None})

    return build


CASES = [
    Case("prefill", attention(130, 130, mask="causal")),
    Case("prefill in chunks", attention(40, 170, mask="causal")),
    Case("prefill, every head its own keys", attention(130, 130, heads=(4, 4), mask="causal")),
    Case("bidirectional", attention(70, 70)),
    Case("decode", attention(1, 300)),
    Case("decode, padded", attention(1, 300, mask="padded")),
    Case("decode, 28 heads of 4", attention(1, 300, heads=(28, 4))),
    Case("speculative decoding", attention(4, 300, mask="causal")),
    Case("window", attention(130, 130, mask="array")),
    Case("window, decode", attention(1, 130, mask="array")),
    Case("additive", attention(70, 130, mask="additive")),
    Case("gpt-oss", attention(130, 130, heads=(16, 2), dims=(64, 64), mask="array", sinks=True)),
    Case("gpt-oss, decode", attention(1, 300, heads=(16, 2), dims=(64, 64), sinks=True)),
    Case("phi: 80", attention(130, 130, heads=(4, 4), dims=(80, 80), mask="causal")),
    Case("phi 3: 96", attention(130, 130, heads=(4, 4), dims=(96, 96), mask="causal")),
    Case("gemma: 256", attention(130, 130, heads=(4, 2), dims=(256, 256), mask="causal")),
    Case("gemma: 256, decode", attention(1, 300, heads=(4, 2), dims=(256, 256))),
    Case("gemma 4: 512", attention(70, 70, heads=(4, 2), dims=(512, 512), mask="causal")),
    Case("deepseek 3: 192/128", attention(70, 70, heads=(4, 4), dims=(192, 128), mask="causal")),
    Case("deepseek 3: latent, additive", attention(1, 130, heads=(16, 1), dims=(512, 512), mask="additive")),
    Case("deepseek 4: float32", attention(1, 130, heads=(16, 1), mask="padded", sinks=True, dtype=mx.float32)),
    *(
        Case(f"QuantizedLinear {form}, {rows} rows", matmul((1, rows, 256), (192, 256), form))
        for form in (FORM, EIGHT_BITS, Form("affine", 3, 32), Form("affine", 2, 128), MXFP4, MXFP8, NVFP4)
        for rows in (1, 40)
    ),
    Case("QuantizedEmbedding.as_linear", matmul((2, 1, 256), (1003, 256))),
    Case("QuantizedMultiLinear, 1 token", matmul((2, 4, 1, 128), (4, 192, 128), EIGHT_BITS)),
    Case("QuantizedMultiLinear", matmul((2, 4, 40, 128), (4, 192, 128))),
    Case("QuantizedMultiLinear, not transposed", matmul((2, 4, 1, 128), (4, 128, 192), transpose=False)),
    *(
        Case(
            f"quantised cache, {name}, {form}, {queries} queries, room for {spare}",
            matmul(x, w, form, transpose=transpose, layer=False, spare=spare),
        )
        for form in (FORM, EIGHT_BITS)
        for queries in (1, 20)
        for spare in (0, 64)
        for name, x, w, transpose in (
            ("scores", (2, 4, queries, 128), (2, 4, 256, 128), True),
            ("values", (2, 4, queries, 256), (2, 4, 256, 128), False),
            ("scores of groups", (2, 2, 4, queries, 128), (2, 2, 1, 256, 128), True),
            ("values of groups", (2, 2, 4, queries, 256), (2, 2, 1, 256, 128), False),
        )
    ),
    *(
        Case(f"{name}, {'dense' if form is None else form}", experts(x, indices, form))
        for form in (None, FORM, EIGHT_BITS, MXFP4, NVFP4)
        for name, x, indices in (
            ("SwitchGLU, up", (1, 5, 1, 1, 128), (1, 5, 2)),
            ("SwitchGLU, down", (1, 5, 2, 1, 128), (1, 5, 2)),
            ("SwitchGLU, sorted", (200, 1, 128), (200,)),
        )
    ),
    Case("LoRASwitchLinear, into rank 8", experts((200, 1, 128), (200,), None, n=8)),
    Case("LoRASwitchLinear, out of rank 8", experts((1, 5, 2, 1, 8), (1, 5, 2), None)),
]
X, Q = mx.ones((3, 64)), mx.ones((1, 4, 3, 16))
W, S, B = mx.quantize(mx.ones((4, 8, 64)), group_size=32)
STORED = {"group_size": 32, "bits": 4}
WRONG = [
    Call("scaled_dot_product_attention", (Q, Q, Q), {}),
    Call("scaled_dot_product_attention", (Q[0], Q, Q), {"scale": 1.0}),
    Call("scaled_dot_product_attention", (Q, Q[:, :3], Q[:, :3]), {"scale": 1.0}),
    Call("scaled_dot_product_attention", (Q, Q, Q), {"scale": 1.0, "mask": mx.zeros((5, 7))}),
    Call("quantized_matmul", (X, W[0], S[0]), STORED),
    Call("quantized_matmul", (X[:, :32], W[0], S[0], B[0]), STORED),
    Call("quantized_matmul", (X, W[0], S[0], B[0]), {**STORED, "transpose": "no"}),
    Call("gather_mm", (X, X), {"rhs_indices": mx.array([0])}),
    Call("gather_mm", (X, X.T), {"rhs_indices": mx.array([0.5])}),
    Call("gather_mm", (X,), {}),
    Call("gather_qmm", (X, W, S), {**STORED, "rhs_indices": mx.array([0])}),
    Call("gather_qmm", (X, W, S, B), {**STORED, "rhs_indices": mx.array([0.5])}),
    Call("gather_qmm", (X, W, S, B), {**STORED, "experts": mx.array([0])}),
]


def export_at_once(file: str, function: Callable[..., Any], x: mx.array) -> None:
    mx.export_function(file, function, x)


def export_by_exporter(file: str, function: Callable[..., Any], x: mx.array) -> None:
    with mx.exporter(file, function) as export:
        export(x)


EXPORTED = {"export_function": export_at_once, "exporter": export_by_exporter}


def wide(value: Any) -> Any:
    return value.astype(mx.float32) if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating) else value


def right(call: Call) -> mx.array:
    """What MLX gives in float32."""
    arguments, options = tuple(map(wide, call.arguments)), {name: wide(value) for name, value in call.options.items()}
    mx.eval(*(value for value in (*arguments, *options.values()) if isinstance(value, mx.array)))
    with mx.stream(mx.cpu):
        return call._replace(arguments=arguments, options=options).of(OWNERS[call.name])


def test_each_route_has_calls(rng: np.random.Generator) -> None:
    built = {case.build(rng, mx.float16).name for case in CASES}
    assert built == {call.name for call in WRONG} == OWNERS.keys()
    assert EXPORTED.keys() == {route.name for route in EXPORTERS}


@gpu
@halves
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.form)
def test_a_call_gives_what_mlx_gives(rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> None:
    call = case.build(rng, dtype)
    exact, theirs = host(right(call)), getattr(OWNERS[call.name], call.name)(*call.arguments, **call.options)
    try:
        with mlx_cuda.patch():
            result = call.of(OWNERS[call.name])
    except (RuntimeError, TypeError, ValueError) as ours:  # where MLX has no kernel either
        with pytest.raises(type(ours)):
            mx.eval(theirs)
        return
    assert (result.shape, result.dtype) == (theirs.shape, theirs.dtype)
    weights_rounded = 1.0 if call.name == "scaled_dot_product_attention" else 1.5  # to 16 bits, before a dense matmul
    assert_close(result, exact, tolerance=weights_rounded * TOLERANCE[result.dtype])


@pytest.mark.parametrize("call", WRONG, ids=lambda call: call.name)
def test_a_wrong_call_raises_what_mlx_raises(call: Call) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        call.of(OWNERS[call.name])
    with mlx_cuda.patch(), pytest.raises(type(theirs.value)):
        call.of(OWNERS[call.name])


@gpu
@pytest.mark.parametrize("name", EXPORTED)
def test_a_quantised_layer_is_exported(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    layer, x, file = nn.QuantizedLinear(256, 192), normal(rng, (3, 256), mx.float16), str(tmp_path / "layer.mlxfn")
    layer.set_dtype(mx.float16)
    with mlx_cuda.patch():
        EXPORTED[name](file, layer, x)
        imported: Any = mx.import_function(file)
        (result,) = imported(x)
        assert_close(result, host(layer(x)), tolerance=2 * TOLERANCE[mx.float16])


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("arguments", [(), ("layer.mlxfn",), ("layer.mlxfn", 3)], ids=["nothing", "a file", "no function"])
def test_a_wrong_export_raises_what_mlx_raises(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        getattr(mx, name)(*arguments)
    with mlx_cuda.patch(), pytest.raises(type(theirs.value)):
        getattr(mx, name)(*arguments)
