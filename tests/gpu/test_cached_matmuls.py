"""Calls that are answered with the graph of one before: the same bits as by Python's rules, and never those of another call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda import _patch, _swiglu
from mlx_cuda._loader import native as _native
from mlx_cuda._matmul import fp8 as _fp8
from mlx_cuda._matmul import gather as _gather
from mlx_cuda._matmul import grouped as _grouped
from mlx_cuda._matmul import linear as _linear
from mlx_cuda._matmul import quantized as _quantized

from tests.package.threads import in_threads

from .support import normal, primitives

Call = Callable[[], mx.array]
Make = Callable[[np.random.Generator], tuple[mx.array, ...]]

pytestmark = pytest.mark.gpu

HALF = mx.bfloat16
OURS: Any = mlx_cuda  # whose types know nothing of arguments that are given one after another
RULES = (
    (_quantized, "_plan"), (_gather, "_dense_plan"), (_gather, "_quantized_plan"), (_grouped, "_plan"), (_linear, "_plan"),
    (_swiglu, "_plan"), (_fp8, "_blocked"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _loaded() -> None:
    _native.load()


def rules_asked(call: Call) -> tuple[mx.array, int]:
    """The result, and how often Python's rules were asked for it."""
    asked = 0

    def watch(rule: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return rule(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in RULES:
            patch.setattr(module, name, partial(watch, getattr(module, name)))
        result = call()
    return result, asked


def by_python(call: Call) -> mx.array:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "loaded", None)
        result, asked = rules_asked(call)
    assert asked
    return result


def assert_same(one: mx.array, other: mx.array) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert mx.array_equal(one, other).item()  # no NaN equals itself


def quantised(rng: np.random.Generator, *shape: int, mode: str = "affine", dtype: mx.Dtype = HALF) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(normal(rng, shape, dtype), group_size={"mxfp4": 32, "nvfp4": 16}.get(mode, 64), bits=4, mode=mode))


def matmuls(rows: int, dtype: mx.Dtype = HALF) -> Make:
    return lambda rng: (normal(rng, (rows, 128), dtype), *quantised(rng, 40, 128, dtype=dtype))


def batches(rng: np.random.Generator) -> tuple[mx.array, ...]:
    return normal(rng, (2, 3, 128), HALF), *quantised(rng, 2, 40, 128)


def gathers(rows: int, *, mode: str = "affine") -> Make:
    def make(rng: np.random.Generator) -> tuple[mx.array, ...]:
        indices = mx.array(rng.integers(0, 4, (rows, 2)).astype(np.uint32))
        return normal(rng, (rows, 1, 1, 128), HALF), *quantised(rng, 4, 24, 128, mode=mode), indices

    return make


def experts(rows: int) -> Make:
    return lambda rng: (
        normal(rng, (rows, 1, 16), HALF), normal(rng, (4, 16, 24), HALF), mx.array(rng.integers(0, 4, rows).astype(np.uint32))
    )  # fmt: skip


def pair(*shape: int, dtype: mx.Dtype = HALF) -> Make:
    return lambda rng: (normal(rng, shape, dtype), normal(rng, shape, dtype))


def bytes_of_numbers(rng: np.random.Generator) -> tuple[mx.array, ...]:
    return mx.to_fp8(normal(rng, (5, 128), HALF)), mx.to_fp8(normal(rng, (16, 128), HALF)), normal(rng, (16,), mx.float32)


def quantized_matmul(*arrays: mx.array, **options: Any) -> Any:
    return OURS.quantized_matmul(*arrays, **options)


def gather_qmm(x: mx.array, w: mx.array, *rest: mx.array, **options: Any) -> Any:
    scales, biases, indices = (*rest[:-1], None, rest[-1])[:3] if len(rest) < 3 else rest
    return OURS.gather_qmm(x, w, scales, biases, rhs_indices=indices, **options)


def gather_mm(a: mx.array, b: mx.array, indices: mx.array, **options: Any) -> Any:
    return OURS.gather_mm(a, b, rhs_indices=indices, **options)


CALLS: dict[str, tuple[Callable[..., mx.array], Make, dict[str, Any]]] = {
    "one row": (quantized_matmul, matmuls(1), {"group_size": 64, "bits": 4}),
    "rows": (quantized_matmul, matmuls(7), {"mode": "affine"}),
    "dequantize": (quantized_matmul, matmuls(200), {"group_size": 64, "transpose": True}),
    "mixed dtypes": (quantized_matmul, lambda rng: (normal(rng, (3, 128), mx.float16), *quantised(rng, 40, 128)), {}),
    "upstream's": (quantized_matmul, batches, {}),
    "float32": (quantized_matmul, matmuls(3, mx.float32), {}),
    "on the CPU": (quantized_matmul, matmuls(3, mx.float32), {"stream": mx.cpu}),
    "without rows": (quantized_matmul, matmuls(0), {}),
    "gathered": (gather_qmm, gathers(3), {"transpose": True, "sorted_indices": False}),
    "gathered, floats": (gather_qmm, gathers(3, mode="mxfp4"), {"mode": "mxfp4", "group_size": 32}),
    "many gathered": (gather_qmm, gathers(90), {}),
    "experts": (gather_mm, experts(3), {}),
    "many experts": (gather_mm, experts(90), {"sorted_indices": False}),
    "swiglu": (OURS.swiglu, pair(3, 40), {}),
    "linear": (OURS.linear, lambda rng: (*pair(5, 16)(rng), normal(rng, (5,), HALF)), {"activation": "relu"}),
    "integers": (OURS.swiglu, lambda rng: (mx.array(rng.integers(0, 9, 8)), normal(rng, (8,), mx.float32)), {}),
    "8-bit numbers": (lambda a, b, bias, **options: OURS.fp8_matmul(a, b, bias=bias, **options), bytes_of_numbers, {"out_dtype": HALF}),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_values_are_answered_with_the_same_bits(rng: np.random.Generator, name: str) -> None:
    operation, make, options = CALLS[name]
    operation(*make(rng), **options)
    for _ in range(3):
        call = partial(operation, *make(rng), **options)
        result, asked = rules_asked(call)
        assert not asked
        assert_same(result, by_python(call))


def test_no_call_is_taken_for_another(rng: np.random.Generator) -> None:
    """Each differs in one thing, and comes while all others are remembered."""
    x, w, scales, biases = matmuls(3)(rng)
    square = quantised(rng, 128, 128)
    gate, up = pair(4, 8)(rng)
    stream = mx.new_stream(mx.gpu)
    calls: list[Call] = [
        *(partial(OURS.quantized_matmul, x, *square, turned) for turned in (True, False)),
        partial(OURS.quantized_matmul, x, *square, transpose=False),
        partial(OURS.quantized_matmul, x, square[0], biases=square[1], scales=square[2]),
        partial(OURS.quantized_matmul, x, square[0], scales=square[1], biases=square[2]),
        partial(OURS.quantized_matmul, x[:2], w, scales, biases),
        partial(OURS.quantized_matmul, x[None], w, scales, biases),
        partial(OURS.quantized_matmul, x[::-1], w, scales, biases),
        partial(OURS.quantized_matmul, x.astype(mx.float32), w, scales, biases),
        partial(OURS.quantized_matmul, x.astype(mx.float16), w, scales, biases),
        partial(OURS.quantized_matmul, x, w, scales, biases, stream=stream),
        partial(OURS.quantized_matmul, x[:, :64], w, scales, biases, bits=8, group_size=32),
        partial(OURS.swiglu, gate, up),
        partial(OURS.swiglu, up, gate),
        partial(OURS.swiglu, gate, gate),
        partial(OURS.swiglu, gate=gate, up=up),
        partial(OURS.swiglu, up=up, gate=gate),
        partial(OURS.linear, gate, up),
        partial(OURS.linear, gate, up, activation="relu"),
        partial(OURS.linear, gate, up, activation="gelu_approx"),
    ]
    expected = [by_python(call) for call in calls]
    for _ in range(3):
        for call, exact in zip(calls, expected, strict=True):
            assert_same(call(), exact)
        with mx.stream(stream):
            assert_same(calls[0](), expected[0])


def test_one_array_twice_is_not_taken_for_two(rng: np.random.Generator) -> None:
    gate, up = pair(3, 24)(rng)
    for _ in range(2):
        assert_same(OURS.swiglu(gate, gate), by_python(lambda: OURS.swiglu(gate, gate)))
    for _ in range(2):
        assert_same(OURS.swiglu(gate, up), by_python(lambda: OURS.swiglu(gate, up)))
    assert_same(OURS.swiglu(up, up), by_python(lambda: OURS.swiglu(up, up)))


def test_the_stream_is_that_of_the_call(rng: np.random.Generator) -> None:
    inputs = matmuls(3, mx.float32)(rng)
    call = partial(OURS.quantized_matmul, *inputs)
    on_cpu = partial(OURS.quantized_matmul, *inputs, stream=mx.cpu)
    expected = by_python(call), by_python(on_cpu)
    for _ in range(3):
        assert_same(call(), expected[0])
        with mx.stream(mx.cpu):
            assert_same(call(), expected[1])
        assert_same(on_cpu(), expected[1])
        assert primitives(call()) == {"QuantizedSmallM"}
        with mx.stream(mx.cpu):
            assert primitives(call()) == primitives(on_cpu()) == {"QuantizedMatmul"}


@pytest.mark.parametrize("name", ["dequantize", "many gathered", "experts", "swiglu", "linear"])
def test_gradients_vmap_and_compile(rng: np.random.Generator, name: str) -> None:
    operation, make, options = CALLS[name]
    inputs = make(rng)
    call = partial(operation, **options)
    for _ in range(2):
        call(*make(rng))  # with other weights than those of the gradients

    def loss(x: mx.array) -> mx.array:
        return (call(x, *inputs[1:]).astype(mx.float32) ** 2).sum()

    assert_same(mx.grad(loss)(inputs[0]), by_python(lambda: mx.grad(loss)(inputs[0])))
    assert_same(mx.compile(call)(*inputs), call(*inputs))
    if name == "swiglu":
        stacked = mx.stack([inputs[0], 2 * inputs[0]])
        assert_same(mx.vmap(lambda x: call(x, *inputs[1:]))(stacked), by_python(lambda: mx.vmap(lambda x: call(x, *inputs[1:]))(stacked)))


def test_errors_are_those_of_python(rng: np.random.Generator) -> None:
    x, w, scales, biases = matmuls(3)(rng)
    for _ in range(2):
        OURS.quantized_matmul(x, w, scales, biases)
    bad: list[Callable[[], Any]] = [
        lambda: OURS.quantized_matmul(x, w, scales),
        lambda: OURS.quantized_matmul(x[:, :64], w, scales, biases),
        lambda: OURS.quantized_matmul(x, w, scales, biases, bits=7),
        lambda: OURS.quantized_matmul(x, w, scales, biases, bits=2**70),
        lambda: OURS.quantized_matmul(x, w, scales, biases, mode="\ud800"),
        lambda: OURS.quantized_matmul(x, w, scales, biases, stream="gpu"),
        lambda: OURS.quantized_matmul(x, w, scales.tolist(), biases),
        lambda: OURS.quantized_matmul(x, w, scales, biases, unknown=1),
        lambda: OURS.quantized_matmul(x),
        lambda: OURS.swiglu(x, [1.0]),
    ]
    for call in bad:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)) as natively:
                call()
            with pytest.raises((TypeError, ValueError)) as python:
                by_python(call)
            assert (natively.type, str(natively.value)) == (python.type, str(python.value))


def test_patched_calls_as_programs_make_them(rng: np.random.Generator) -> None:
    form: dict[str, Any] = {"transpose": True, "group_size": 64, "bits": 4, "mode": "affine"}

    def qmm(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, w, scales=scales, biases=biases, **form)

    def gathered(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, indices: mx.array) -> mx.array:
        return mx.gather_qmm(x, w, scales, biases, rhs_indices=indices, **form, global_scale=None, sorted_indices=False)

    def of_experts(rng: np.random.Generator) -> tuple[mx.array, ...]:
        return normal(rng, (3, 1, 1, 128), HALF), *quantised(rng, 4, 24, 128), mx.array(rng.integers(0, 4, (3, 2)))

    with OURS.patch():
        assert mx.quantized_matmul.__name__ == "quantized_matmul"
        assert mx.quantized_matmul.__doc__
        for call, make in ((qmm, matmuls(3)), (qmm, batches), (gathered, of_experts)):
            call(*make(rng))
            for _ in range(2):
                inputs = make(rng)
                result, asked = rules_asked(partial(call, *inputs))
                assert not asked
                with pytest.MonkeyPatch.context() as patch:
                    for route in _patch.ROUTES:
                        patch.setattr(route.owner, route.name, route.ours)
                    assert_same(result, call(*inputs))
        x, w, scales, biases = matmuls(3)(rng)
        with pytest.raises(ValueError, match="quantized_matmul"):
            mx.quantized_matmul(x[:, :64], w, scales, biases, **form)


def test_what_is_exported_needs_no_kernel_of_ours(rng: np.random.Generator, tmp_path: Path) -> None:
    """Also where a call of these shapes was remembered before."""
    x, w, scales, biases = matmuls(3)(rng)
    q = normal(rng, (1, 4, 16, 128), HALF)
    file = str(tmp_path / "function.mlxfn")

    def function(x: mx.array, q: mx.array) -> tuple[mx.array, mx.array]:
        attention = mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1, mask="causal")
        return mx.quantized_matmul(x, w, scales, biases), attention

    with OURS.patch():
        mx.eval(function(x, q), function(x, q))
        mx.export_function(file, function, x, q)
        assert "QuantizedSmallM" in primitives(function(x, q)[0])
    imported: Any = mx.import_function(file)
    for got, expected in zip(imported(x, q), function(x, q), strict=True):
        assert_same(got, expected)


def test_threads_remember_for_themselves(rng: np.random.Generator) -> None:
    calls = [partial(operation, *make(rng), **options) for operation, make, options in (CALLS["rows"], CALLS["gathered"], CALLS["swiglu"])]
    expected = [np.array(by_python(call).astype(mx.float32)) for call in calls]

    def work() -> None:
        with mx.stream(mx.new_stream(mx.gpu)):
            for _ in range(50):
                for call, exact in zip(calls, expected, strict=True):
                    np.testing.assert_array_equal(np.array(call().astype(mx.float32)), exact)

    in_threads(4, work)


def test_arguments_and_results_are_let_go(rng: np.random.Generator) -> None:
    inputs = [each for _, make, _ in CALLS.values() for each in make(rng)]
    mx.eval(inputs)
    del inputs
    text, number = "".join(("aff", "ine")), int("64")
    arrays = matmuls(3)(rng)
    options = {"mode": text, "group_size": number}

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(each) for each in (*arrays, text, number, options)]

    call = partial(OURS.quantized_matmul, *arrays, **options)
    mx.eval(call())
    before, memory = counts(), mx.get_active_memory()
    for _ in range(20):
        mx.eval(call())
    assert counts() == before
    assert mx.get_active_memory() == memory
