"""A right call of every function that ``patch`` replaces, with each of its arguments replaced by others in turn: MLX raises and so do we.

Nothing is evaluated: MLX has kernels that fail for what it does not check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest

from .mlx_lm_parts import part
from .support import normal
from .transforms import DTYPE, case, quantized

OTHERS = (
    None, True, 1, 3, -1, 1.5, "x", "causal", "affine", [1.0], (1, 2), 1j, np.float32(2), np.int64(32), np.ones((2, 64), np.float32),
    mx.cpu, mx.float32, mx.array(1.0), mx.ones((64,)), mx.ones((1, 2, 3, 4, 5)),
)  # fmt: skip
IGNORED = {
    "force_fused: True",  # ours is, where MLX's is not
    "stream: True", "stream: 1",  # the GPU's number, which need not be there
}  # fmt: skip
DTYPES = (mx.float32, mx.bfloat16, mx.int32, mx.uint32, mx.uint8, mx.bool_, mx.complex64)


class Call(NamedTuple):
    """A function by where it is, and arguments: by place as far as MLX takes them only so."""

    owner: Callable[[], Any]
    name: str
    places: tuple[Any, ...]
    options: dict[str, Any]

    def outcome(self) -> object:
        """The error's type and text, or the results' shapes and dtypes."""
        places = [each[...] if isinstance(each, mx.array) else each for each in self.places]  # mlx-lm scales the queries in place
        try:
            results = getattr(self.owner(), self.name)(*places, **self.options)
        except Exception as error:  # mlx-lm's functions raise whatever comes
            return type(error), str(error)
        return [(each.shape, each.dtype) for each in (results if isinstance(results, (tuple, list)) else [results])]

    def others(self) -> Iterator[tuple[str, Call]]:
        """Each argument replaced, left out, or given another shape or dtype, and one too many."""
        for i, value in enumerate(self.places):
            for other in others_than(value):
                yield f"argument {i}: {text(other)}", self._replace(places=(*self.places[:i], other, *self.places[i + 1 :]))
            yield f"{i} arguments", self._replace(places=self.places[:i])
        for name, value in self.options.items():
            for other in others_than(value):
                yield f"{name}: {text(other)}", self._replace(options=self.options | {name: other})
            yield f"no {name}", self._replace(options={each: self.options[each] for each in self.options if each != name})
        yield "unknown", self._replace(options=self.options | {"unknown": 1})


def text(value: object) -> str:
    return f"{value.shape} {value.dtype}" if isinstance(value, (mx.array, np.ndarray)) else repr(value)


def others_than(value: object) -> Iterator[object]:
    yield from OTHERS
    if isinstance(value, mx.array):
        yield from (value.astype(dtype) for dtype in DTYPES if dtype != value.dtype)
        yield from (value[None], value[0], np.ones(value.shape, np.float32))
        yield from (mx.take(value, mx.array([0]), axis) for axis in range(value.ndim))
        yield from (mx.concatenate([value, value], axis) for axis in range(value.ndim))


def calls(rng: np.random.Generator) -> list[Call]:
    """Such as kernels of ours take, where there are some."""

    def array(*shape: int) -> mx.array:
        return normal(rng, shape, DTYPE)

    gates = [mx.sigmoid(normal(rng, (1, 3, 4), mx.float32)) for _ in range(2)]
    tokens = (array(1, 3, 2, 64), array(1, 3, 2, 64), array(1, 3, 4, 64), *gates)
    chosen, stream = mx.array([[0, 2], [1, 1]], mx.uint32), {"stream": None}
    flat = {"transpose": True, "group_size": 64, "bits": 4, "mode": "affine"}
    q, k, mask = array(1, 4, 3, 64), array(1, 2, 8, 64), mx.ones((1, 1, 3, 8), mx.bool_)
    attended = {"scale": 0.125, "mask": mask, "sinks": array(4), "force_fused": False} | stream
    once, twice = quantized(rng, 16, 64), quantized(rng, 4, 16, 64)
    cache = tuple(quantized(rng, 1, 2, 8, 64))
    per_head = [normal(rng, (4,), mx.float32) for _ in range(3)]
    scan = (array(1, 3, 4, 64), per_head[0], array(1, 3, 2, 64), array(1, 3, 2, 64), per_head[1], array(1, 3, 4), per_head[2])
    return [
        Call(lambda: mx.fast, "scaled_dot_product_attention", (q, k, k), attended),
        Call(lambda: mx.fast, "scaled_dot_product_attention", (q, k, k), attended | {"mask": array(1, 1, 3, 8)}),
        Call(lambda: mx, "quantized_matmul", (array(3, 64), *once[:2]), {"biases": once[2]} | flat | stream),
        Call(lambda: mx, "quantized_matmul", (array(2, 4, 3, 64), *twice[:2]), {"biases": twice[2]} | flat | stream),
        Call(lambda: mx, "gather_mm", (array(2, 1, 1, 64), array(4, 64, 8)), {"lhs_indices": None, "rhs_indices": chosen} | stream),
        Call(
            lambda: mx,
            "gather_qmm",
            (array(2, 1, 1, 64), *twice[:2]),
            {"biases": twice[2], "lhs_indices": None, "rhs_indices": chosen, "sorted_indices": False} | flat | stream,
        ),
        Call(lambda: mx.fast, "gated_delta_update", tokens, {"initial_state": mx.zeros((1, 4, 64, 64)), "mask": None} | stream),
        Call(lambda: mx, "conv1d", (array(1, 40, 8), array(8, 4, 1)), {"stride": 1, "padding": 0, "dilation": 1, "groups": 8} | stream),
        Call(lambda: mx.distributed, "all_sum", (array(2, 8),), {"group": None} | stream),
        Call(lambda: part("models.base"), "quantized_scaled_dot_product_attention", (q, cache, cache), {
            "scale": 0.125, "mask": None, "group_size": 64, "bits": 4
        }),
        Call(lambda: part("models.gated_delta"), "gated_delta_ops", tokens, {"state": mx.zeros((1, 4, 64, 64)), "mask": None}),
        Call(lambda: part("models.ssm"), "ssm_attn", scan, {"state": None, "mask": None, "lengths": None}),
    ]  # fmt: skip


NAMES = [call.name for call in calls(np.random.default_rng(0))]
every_call = pytest.mark.parametrize("index", [case(name, i, str(i)) for i, name in enumerate(NAMES)])


def differences(call: Call) -> list[str]:
    """The calls of which MLX takes others than we do, and what both say; patched once, as that looks into every module."""
    found, others = [], [(what, other) for what, other in call.others() if what not in IGNORED]
    of_mlx = [other.outcome() for _, other in others]
    with mlx_cuda.patch():
        patched = [other.outcome() for _, other in others]
    for (what, _), theirs, ours in zip(others, of_mlx, patched, strict=True):
        same = ours == theirs if call.owner() in {mx, mx.fast, mx.distributed} else ours == theirs or type(ours) is type(theirs) is tuple
        if not same:
            found.append(f"{call.name}, {what}: MLX {theirs}, patched {ours}"[:600])
    return found
