"""What a captured step's fusion takes for a gate or for an addition, compiled for MLX's CPU backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from .compiled import compiled, compiles
from .references import random

nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), compiles]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory.mktemp("native"), "fusion_on_cpu", ("decoding/fusion/gates.cpp", "decoding/graph/views.cpp"))


def matmuls(dtype: mx.Dtype = mx.bfloat16) -> tuple[mx.array, mx.array]:
    """Two that are not computed yet."""
    x = random((1, 1, 16), seed=1).astype(dtype)
    one, other = (x @ random((16, 24), seed=seed).astype(dtype) for seed in (2, 3))
    return one, other


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up  # type: ignore[no-any-return]


@mx.compile
def clamped(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    return mx.clip(nn.silu(gate), None, limit) * mx.clip(up, -limit, limit)


@partial(mx.compile, shapeless=True)
def swiglu_of_gpt_oss(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = mx.clip(gate, None, 7.0), mx.clip(up, -7.0, 7.0)
    return gate * mx.sigmoid(1.702 * gate) * (up + 1)


GATES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "swiglu": swiglu,
    "swiglu of silu": lambda gate, up: nn.silu(gate) * up,
    "swiglu the other way round": lambda gate, up: up * nn.silu(gate),
    "swiglu of sigmoid": mx.compile(lambda gate, up: gate * mx.sigmoid(gate) * up),
    "swiglu of another shape": lambda gate, up: (nn.silu(gate[0]) * up[0])[None],
    "geglu": lambda gate, up: nn.gelu(gate) * up,
    "geglu in one": mx.compile(lambda gate, up: nn.gelu(gate) * up),
    "geglu_tanh": lambda gate, up: nn.gelu_approx(gate) * up,
    "geglu_tanh in one": partial(mx.compile, shapeless=True)(lambda gate, up: nn.gelu_approx(gate) * up),
}
OTHERS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "a factor near 1": mx.compile(lambda gate, up: 1.01 * nn.silu(gate) * up),
    "a factor near 1, by itself": lambda gate, up: nn.silu(gate) * mx.array(0.99, up.dtype) * up,
    "a factor of four dimensions": lambda gate, up: nn.silu(gate) * mx.ones((1, 1, 1, 1), up.dtype) * up,
    "another factor": lambda gate, up: nn.gelu_fast_approx(gate) * up,
    "clamped at 7": lambda gate, up: clamped(gate, up, 7.0),
    "clamped at 16": lambda gate, up: clamped(gate, up, 16.0),
    "gpt-oss": swiglu_of_gpt_oss,
    "relu": lambda gate, up: nn.relu(gate) * up,
    "relu, squared": lambda gate, up: nn.relu2(gate) * up,
    "tanh": lambda gate, up: mx.tanh(gate) * up,
    "no activation": lambda gate, up: gate * up,
    "sigmoid": lambda gate, up: mx.sigmoid(gate) * up,
    "of itself": lambda gate, up: nn.silu(gate) * gate + 0 * up,
    "and the gate": lambda gate, up: nn.silu(gate) * up + gate,
    "and up": lambda gate, up: nn.silu(gate) * up + up,
    "and the activation": lambda gate, up: nn.silu(gate) * up + nn.silu(gate),
    "of several rows": lambda gate, up: nn.silu(gate) * up.reshape(24, 1),
    "of a vector": mx.compile(lambda gate, up: nn.silu(gate) * up * mx.array([1.0] * 20 + [2.0] * 4, up.dtype)),
    "of another matmul": lambda gate, up: nn.silu(gate) * up * (up @ mx.ones((24, 24), up.dtype)),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_gates_are_recognised_however_they_are_written(native: Any, name: str, dtype: mx.Dtype, swapped: bool) -> None:
    pair = matmuls(dtype)
    gate, up = reversed(pair) if swapped else pair
    expected = None if "shape" in name else (name.split(maxsplit=1)[0], int(swapped))
    assert native.gate(GATES[name](gate, up), *pair) == expected


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_gate_is_not_taken_for_one(native: Any, name: str, dtype: mx.Dtype) -> None:
    gate, up = matmuls(dtype)
    assert native.gate(OTHERS[name](gate, up), gate, up) is None


def test_a_gate_that_somebody_else_reads_stays(native: Any) -> None:
    gate, up = matmuls()
    activated = nn.silu(gate)
    assert native.gate(activated * up + activated.sum(), gate, up) is None
    assert native.gate(swiglu(gate, up) + gate.sum(), gate, up) is None


@partial(mx.compile, shapeless=True)
def residual(x: mx.array, y: mx.array) -> mx.array:
    return x + y


@partial(mx.compile, shapeless=True)
def clipped(x: mx.array, y: mx.array) -> mx.array:
    return mx.clip(x.astype(mx.float32) + y.astype(mx.float32), -65504, 65504).astype(x.dtype)


@mx.compile
def two(x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    total = x + y
    return total, total * 2


ADDITIONS: dict[str, tuple[Callable[[mx.array, mx.array], mx.array], bool]] = {
    "an addition": (lambda x, y: x + y, True),
    "compiled": (residual, True),
    "clipped": (clipped, False),
    "of one value, broadcast": (lambda x, y: x + y[..., :1], True),
    "of another type": (lambda x, y: x + y.astype(mx.float32), False),
    "of itself": (lambda x, _: x + x, False),
    "subtracted": (lambda x, y: x - y, False),
    "compiled, and more": (mx.compile(lambda x, y: 2 * x + y), False),
    "compiled, to several rows": (lambda x, y: residual(x, mx.broadcast_to(y, (3, 1, 24))), False),
    "with another result": (lambda x, y: two(x, y)[0], False),
    "of three": (mx.compile(lambda x, y: x + y + y), False),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_additions(native: Any, name: str) -> None:
    (x, y), (function, expected) = matmuls(), ADDITIONS[name]
    assert native.adds(function(x, y), x) == expected


def power(x: mx.array, exponent: int) -> mx.array:
    """Of two's powers, without a constant."""
    return x if exponent == 1 else power(mx.square(x), exponent // 2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("function", "is_one"), [
    (nn.silu, True),
    (mx.compile(lambda x: mx.sigmoid(x) * x), True),
    (nn.gelu, False),
    (nn.gelu_approx, False),
    (mx.compile(lambda x: mx.maximum(x, 0) * 1.0), False),
    (mx.compile(lambda x: mx.sigmoid(x) * x * 1.1), False),
    (mx.compile(lambda x: mx.sigmoid(x) * x + power(mx.sigmoid(x), 128)), False),  # within 2 % of it: 61 of 60
    (mx.sigmoid, False),
    (lambda x: nn.silu(x).astype(mx.float32) if x.dtype != mx.float32 else x * 1.0, False),
])  # fmt: skip
def test_silu(native: Any, function: Callable[[mx.array], mx.array], dtype: mx.Dtype, is_one: bool) -> None:
    one, _ = matmuls(dtype)
    assert native.is_silu(function(one)) == is_one
