"""Random calls of the functions that MLX has too, right ones and wrong ones: where MLX computes ours do the same, elsewhere both refuse."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu.formats import FORMS, Form

from .references import host

pytestmark = pytest.mark.usefixtures("on_the_cpu")

OURS: Any = mlx_cuda
MLX: Any = mx
NATIVE_ONLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-2, mx.bfloat16: 8e-2}  # on the CPU MLX sums in 16 bits

FORMS_AND_ONE_BIT = [*FORMS, Form("affine", 1, 32)]
OPTIONS = ("transpose", "group_size", "bits", "mode")
PLACES = {  # arguments that may be given by their place
    "quantized_matmul": ("x", "w", "scales", "biases", *OPTIONS),
    "gather_qmm": ("x", "w", "scales", "biases", "lhs_indices", "rhs_indices", *OPTIONS, "global_scale"),
    "gather_mm": ("a", "b", "lhs_indices", "rhs_indices"),
}
NO_ARRAYS = (1.0, [1.0], np.ones((2, 64), np.float32), "x", True)
OPERANDS = (*NO_ARRAYS, None, mx.array(1.0), mx.ones((2, 7)), mx.ones((2, 64), mx.complex64), mx.ones((64,)))
WRONG: dict[str, tuple[Any, ...]] = {  # some of these are right in some calls
    **dict.fromkeys(("x", "a", "b"), OPERANDS),
    **dict.fromkeys(("w", "scales", "biases"), (*NO_ARRAYS, None, mx.ones((64,)))),
    **dict.fromkeys(
        ("lhs_indices", "rhs_indices"), (*NO_ARRAYS, None, mx.zeros((3,)), mx.zeros((3,), mx.bool_), mx.zeros((11, 7), mx.int64))
    ),
    **dict.fromkeys(("transpose", "sorted_indices"), (0, 1, None, "yes", np.True_, [True])),
    "group_size": (None, 16, 48, 256, True, 64.0, "64", np.int64(64), [64]),
    "bits": (None, 1, 7, 16, 4.0, "4", np.int32(4)),
    "mode": ("Affine", "", None, 4, "affine", np.str_("affine"), ["affine"]),  # MLX does not see each wrong number of bits in other modes
    "global_scale": (1.0, mx.ones(4)),
    "stream": (None, mx.cpu, mx.Device(mx.cpu, 0), mx.default_stream(mx.cpu), "cpu", 3),
    "unknown": (1,),
}


class Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def of(self, module: Any) -> mx.array:
        result: mx.array = getattr(module, self.name)(*self.arguments, **self.options)
        mx.eval(result)
        return result


def draw(seed: int) -> Call:
    chance, rng = random.Random(seed), np.random.default_rng(seed)  # noqa: S311
    name = chance.choice(list(PLACES))

    def normal(shape: tuple[int, ...], dtypes: tuple[mx.Dtype, ...]) -> mx.array:
        return mx.array((4 * rng.standard_normal(shape)).astype(np.float32)).astype(chance.choice(dtypes))

    given: dict[str, Any]
    left: tuple[int, ...]
    right: tuple[int, ...]
    dtypes = (*[mx.float32] * 6, *[mx.float16, mx.bfloat16] * 2, mx.int32)
    if name == "gather_mm":
        k = chance.choice((1, 8, 16))
        left, right = chance.choice(((), (5,), (2, 3, 1), (4,))), chance.choice(((), (4,), (2, 2)))
        given = {"a": normal((*left, chance.choice((1, 3)), k), dtypes), "b": normal((*right, k, chance.choice((1, 9))), dtypes)}
        given |= {one: normal((k,), dtypes) for one in given if chance.random() < 0.1}
    else:
        form, transpose = chance.choice(FORMS_AND_ONE_BIT), chance.random() < 0.6
        right = chance.choice(((), (), (1,), (3,), (2, 2)) if name == "quantized_matmul" else ((4,), (2, 2), ()))
        rows, columns = chance.choice((1, 7, 8)), max(form.group_size, 32) * chance.choice((1, 2, 3))
        parts = mx.quantize(normal((*right, rows, columns), (mx.float32, mx.float32, mx.float16)), form.group_size, form.bits, form.mode)
        left = chance.choice(((), (1,), (5,), (3, 5), (2, 2, 5), (2, 3, 1, 1)))
        given = {"x": normal((*left, columns if transpose else rows), dtypes), **dict(zip(("w", "scales", "biases"), parts, strict=False))}
        given |= {"transpose": transpose, **form.options}
        for option in [option for option in OPTIONS if chance.random() < 0.08]:
            del given[option]  # which may be the default, or wrong
    if name != "quantized_matmul":
        _name_matrices(chance, rng, given)
    if chance.random() < 0.35:
        wrong = chance.choice([option for option in WRONG if option in given or option in {*OPTIONS, "stream", "unknown"}])
        given[wrong] = chance.choice(WRONG[wrong])
    count = chance.randrange(len(PLACES[name]) + 1)
    places = list(itertools.takewhile(given.__contains__, PLACES[name][:count]))
    return Call(name, tuple(given.pop(place) for place in places), given)


def _name_matrices(chance: random.Random, rng: np.random.Generator, given: dict[str, Any]) -> None:
    operands = list(given)[:2]
    shape = chance.choice(((), (1,), (5,), (7, 1), *[given[operand].shape[:-2] for operand in operands] * 2))
    for side, operand in zip(("lhs_indices", "rhs_indices"), operands, strict=True):
        if chance.random() < 0.6:
            count = int(np.prod(given[operand].shape[:-2]))
            given[side] = mx.array(rng.integers(0, count, shape)).astype(chance.choice((mx.uint32, mx.int32, mx.int64)))
    if chance.random() < 0.2:
        given["sorted_indices"] = False


def check(call: Call) -> str:
    """Returns what MLX did."""
    try:
        theirs = call.of(mx)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if "only supports float32" in str(error):  # of dense matrices on the CPU
            return "less"
        with pytest.raises((TypeError, ValueError)) as ours:
            call.of(OURS)
        assert isinstance(ours.value, TypeError) or str(ours.value).startswith("[")
        return "error"
    result = call.of(OURS)
    assert (result.shape, result.dtype) == (theirs.shape, theirs.dtype)
    off, size = (float(np.linalg.norm(each)) for each in (host(result) - host(theirs), host(theirs)))
    assert off <= TOLERANCE[theirs.dtype] * max(size, 1e-3)
    return "result"


@given(seed=st.integers(0, 2**31))
@NATIVE_ONLY
def test_any_call(seed: int) -> None:
    check(draw(seed))


@given(seed=st.integers(0, 2**31))
@NATIVE_ONLY
@pytest.mark.usefixtures("products")
def test_any_call_natively(seed: int) -> None:
    check(draw(seed))


def test_the_calls_reach_everything() -> None:
    done = [check(draw(seed)) for seed in range(300)]
    assert min(done.count(outcome) for outcome in ("result", "error")) > 100


def test_an_option_of_another_type_is_not_taken_for_an_equal_one() -> None:
    """Nor does it spoil the calls that come after it."""
    x, parts = mx.ones((3, 96)), mx.quantize(mx.ones((8, 96)), group_size=32)
    for size in 32.0, "32", [32]:
        with pytest.raises(TypeError, match=r"^\[quantized_matmul\] group_size must be an integer or None, got "):
            OURS.quantized_matmul(x, *parts, group_size=size)
    for size in np.int64(32), 32:
        assert OURS.quantized_matmul(x, *parts, group_size=size).shape == (3, 8)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] group_size must be an integer or None, got 32\.0\.$"):
        OURS.quantized_matmul(x, *parts, group_size=32.0)
    with pytest.raises(TypeError, match=r"^\[gather_qmm\] transpose must be True or False, got 1\.$"):
        OURS.gather_qmm(x, *parts, None, mx.array([0]), 1, 32)
    with pytest.raises(TypeError, match=r"^\[gather_qmm\] sorted_indices must be True or False, got None\.$"):
        OURS.gather_qmm(x, *parts, group_size=32, sorted_indices=None)
    with pytest.raises(TypeError, match=r"^\[gather_mm\] sorted_indices must be True or False, got 0\.$"):
        OURS.gather_mm(x, x.T, sorted_indices=0)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] mode must be a string, got None\.$"):
        OURS.quantized_matmul(x, *parts, group_size=32, mode=None)
    with pytest.raises(TypeError, match=r"^\[grouped_matmul\] transpose must be True or False, got 1\.$"):
        OURS.grouped_matmul(x, mx.ones((1, 8, 96)), mx.array([0, 3]), transpose=1)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] x must be an mlx\.core\.array, got ndarray\.$"):
        OURS.quantized_matmul(np.ones((3, 96), np.float32), *parts, group_size=32)
