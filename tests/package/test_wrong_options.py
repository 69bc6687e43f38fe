"""An argument of a wrong type raises an error that begins with the operation and names the argument: each of every operation."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._operations import OPERATIONS

pytestmark = pytest.mark.usefixtures("on_the_cpu")

Call = tuple[tuple[Any, ...], dict[str, Any]]

OF_MLX = {"all_sum"}  # whose errors are MLX's
ANOTHER = object()
WRONG: dict[str, list[Any]] = {  # by annotation
    "float | None": ["x", "3", b"3", [1.0], {}, ANOTHER, 1j, (1,), mx.array(1.0), mx.ones(2), 10**400],
    "int": ["x", "3", 2.5, [1], {}, ANOTHER, 1j, None, mx.array(1)],
    "int | None": ["x", "3", 2.5, [1], {}, ANOTHER, 1j, mx.array(1), mx.array(1.0)],
    "Window": ["x", 2.5, [1, 1], {}, ANOTHER, ("x", 1), (1, 2.5), (1, 1, 1), mx.array(1)],
    "bool": ["x", "", 1, 0, 2.5, None, [], {}, ANOTHER, mx.array(1), mx.ones(2)],
    "str": ["x", 1, b"affine", ["affine"], {}, ANOTHER, None, mx.array(1), mx.ones(2)],
    "str | None": ["x", 1, b"causal", ["causal"], {}, ANOTHER, True, mx.array(1), mx.ones(2)],
    "Activation | None": ["x", 1, b"silu", ["silu"], {}, ANOTHER, True, mx.array(1), mx.ones(2)],
    "Axis": ["x", 1, -1.0, b"block128", [-1], {}, ANOTHER, (-1,), mx.array(1), mx.ones(2)],
    "mx.Dtype": ["bfloat16", 1, None, ["x"], {}, ANOTHER, mx.array(1)],
    "mx.array": ["x", 1, 2.5, None, [1.0], {}, ANOTHER],
    "mx.array | None": ["x", 1, 2.5, [1.0], {}, ANOTHER],
    "str | mx.array | None": ["x", 1, 2.5, b"causal", ["causal"], {}, ANOTHER, True],
    "tuple[mx.array, ...]": ["x", 1, None, (), {}, ANOTHER, mx.ones(2)],
}
OTHERS = {"StreamOrDevice"}  # mx.stream says what is wrong


def calls() -> dict[str, Call]:
    """A right call of each."""
    q, k, packed = mx.ones((1, 4, 3, 64)), mx.ones((1, 2, 5, 64)), mx.ones((8, 4, 64))
    pages, table, lengths = mx.ones((4, 2, 16, 64)), mx.array([[0, 1]], mx.int32), mx.array([20], mx.int32)
    ends, one = mx.array([0, 3, 8], mx.int32), mx.ones((1, 2, 1, 64))
    weights, quantized = mx.quantize(mx.ones((64, 64))), tuple(mx.quantize(k))
    x, heads, indices = mx.ones((2, 3, 64)), mx.ones((1, 3, 2, 64)), {"rhs_indices": mx.array([0, 0], mx.uint32)}
    e4m3 = mx.to_fp8(mx.ones((16, 32)))
    return {
        "attention": ((q, k, k), {}),
        "attention_varlen": ((packed, packed, packed, ends, ends), {"max_seqlen_q": 5, "max_seqlen_k": 5}),
        "paged_attention": ((q, pages, pages, table, lengths), {}),
        "paged_cache_update": ((pages, pages, one, one, table, lengths), {}),
        "quantized_attention": ((q, quantized, quantized), {}),
        "linear": ((x, mx.ones((8, 64))), {}),
        "swiglu": ((x, x), {}),
        "quantized_matmul": ((x, *weights), {}),
        "gather_mm": ((x, mx.ones((1, 64, 8))), indices),
        "gather_qmm": ((x, *(each[None] for each in weights)), indices),
        "grouped_matmul": ((mx.ones((8, 64)), mx.ones((2, 8, 64)), ends), {}),
        "fp8_matmul": ((e4m3, e4m3), {}),
        "quantize_fp8": ((x,), {}),
        "gated_delta": ((heads, heads, heads, heads[..., 0], heads[..., 0]), {}),
        "ssd": ((heads, heads[..., 0], mx.ones(2), mx.ones((1, 3, 1, 16)), mx.ones((1, 3, 1, 16))), {}),
        "short_conv": ((mx.ones((1, 3, 8)), mx.ones((8, 4))), {}),
    }


with mx.stream(mx.cpu):
    CALLS = calls()
    mx.eval(CALLS)


def test_every_operation_and_type_is_in_the_tables() -> None:
    assert {*CALLS, *OF_MLX} == {*OPERATIONS}
    types = {each.annotation for name in CALLS for each in inspect.signature(OPERATIONS[name]).parameters.values()}
    assert types == {*WRONG, *OTHERS}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name: str) -> None:
    operation: Any = OPERATIONS[name]
    given, options = CALLS[name]
    operation(*given, **options)
    for i, parameter in enumerate(inspect.signature(operation).parameters.values()):
        for wrong in WRONG.get(parameter.annotation, []):
            if i < len(given):
                call: Call = (*given[:i], wrong, *given[i + 1 :]), options
            else:
                call = given, {**options, parameter.name: wrong}
            with pytest.raises((TypeError, ValueError), match=rf"^\[{name}\] .*(?i:\b{parameter.name}\b)"):
                operation(*call[0], **call[1])
    operation(*given, **options)
