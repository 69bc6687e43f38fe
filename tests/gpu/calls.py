"""Random calls of the functions that MLX has too, right ones and wrong ones: a seed gives a call."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .formats import FORMS, Form

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

    def size(self) -> float:
        """How large a number of the result is when its terms have random signs: what rounding errors are relative to."""
        named: dict[str, Any] = dict(zip(PLACES[self.name], self.arguments, strict=False)) | self.options
        x, w = (named[one] for one in PLACES[self.name][:2])
        with mx.stream(mx.cpu):
            if self.name != "gather_mm":
                form = named.get("group_size"), named.get("bits"), named.get("mode", "affine")
                w = mx.dequantize(w, named["scales"], named.get("biases"), *form, dtype=mx.float32)
            squares = (x.astype(mx.float32).square().mean(), w.astype(mx.float32).square().mean())
            return math.sqrt((squares[0] * squares[1]).item() * x.shape[-1])


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
