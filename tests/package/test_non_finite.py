"""NaN and infinity come out where they come out of MLX's operations, of everything that is composed of these: no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_cuda
import numpy as np
import pytest
from mlx_cuda._attention.composed import compose
from mlx_cuda._attention.options import Options
from mlx_cuda._recurrence.composed import composed
from mlx_cuda._recurrence.rules import Call as Linear

from tests.gpu.non_finite import Attention, Call, differences, linear_call

from .compiled import compiles
from .recurrence_scans import by_mlx
from .references import random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SIZES = (2, 4, 2, 9, 40, 16, 16)
FORMS = {
    "plain": Attention(SIZES),
    "bool mask": Attention(SIZES, mask="bool"),
    "additive mask": Attention(SIZES, mask="additive"),
    "additive mask, logarithms": Attention(SIZES, mask="additive", lse=True),
    "soft cap": Attention(SIZES, softcap=5.0, lse=True),
    "sinks": Attention(SIZES, sinks=True, lse=True),
    "all": Attention(SIZES, mask="additive", softcap=5.0, sinks=True, lse=True),
    "window": Attention(SIZES, window=(30, 0), lse=True),
}
INPUTS = [(form, name) for form, each in FORMS.items() for name in each.inputs]
attend: Any = mlx_cuda.attention  # overloads do not let options through
delta_or_plain = pytest.mark.parametrize(
    "delta", [pytest.param(True, id="delta rule"), pytest.param(False, id="plain", marks=pytest.mark.nightly)]
)
derivatives = pytest.mark.parametrize("derivative", [False, True], ids=["result", "gradient"])


def options_of(form: Attention, given: dict[str, Any]) -> Options:
    mask = given.get("mask", given.get("seen"))
    return Options(form.scale, form.softcap, form.window, mask=mask, sinks=given.get("sinks"), lse=True)


@derivatives
@pytest.mark.parametrize(("form", "name"), INPUTS)
def test_attention(form: str, name: str, *, derivative: bool) -> None:
    def ours(q: mx.array, k: mx.array, v: mx.array, **given: Any) -> Sequence[mx.array]:
        of = FORMS[form]
        mask = given.get("mask", given.get("seen"))
        window = None if of.window == (-1, -1) else of.window
        options: dict[str, Any] = {"softcap": of.softcap or None, "sinks": given.get("sinks"), "window_size": window}
        result = attend(q, k, v, mask=mask, return_lse=of.lse, **options)
        return result if of.lse else [result]

    assert differences(FORMS[form].call(ours, mx.float32), name, derivative=derivative) == []


@derivatives
@pytest.mark.parametrize(("form", "name"), INPUTS)
@pytest.mark.parametrize("how", ["python", pytest.param("native", marks=compiles)])
def test_what_attention_is_differentiated_as(request: pytest.FixtureRequest, how: str, form: str, name: str, *, derivative: bool) -> None:
    module = request.getfixturevalue("native") if how == "native" else None

    def ours(q: mx.array, k: mx.array, v: mx.array, **given: Any) -> Sequence[mx.array]:
        options = options_of(FORMS[form], given)
        if module is None:
            return compose(q, k, v, options)
        mask = options.mask
        options = options if mask is None else options._replace(mask=mx.broadcast_to(mask, (*q.shape[:3], k.shape[2])))
        found: list[mx.array] = module.composed_attention(q, k, v, options, mx.default_stream(mx.cpu))
        return found

    assert differences(FORMS[form]._replace(lse=True).call(ours, mx.float32), name, derivative=derivative) == []


@derivatives
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
@delta_or_plain
def test_linear_attention_by_chunks(name: str, *, delta: bool, derivative: bool) -> None:
    """The number may reach other tokens of its chunk, and no others."""

    def ours(*arrays: mx.array) -> Sequence[mx.array]:
        q, k, v, g, beta, state = arrays
        return composed(Linear(q, k, v, g, beta, state, None, None), delta=delta)

    call = linear_call(ours, 150, mx.float32, delta=delta, loose=True)
    assert differences(call, name, derivative=derivative) == []


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
@delta_or_plain
def test_formulas_of_the_gradients_of_linear_attention(name: str, *, delta: bool) -> None:
    """What the kernels compute, by MLX's operations."""

    def forward(*arrays: mx.array) -> Sequence[mx.array]:
        q, k, v, g, beta, state = arrays
        return composed(Linear(q, k, v, g, beta, state, None, None), delta=delta)

    ours: Any = mx.custom_function(forward)

    @ours.vjp  # type: ignore[untyped-decorator]
    def gradients(primals: Any, cotangents: Any, _: Any) -> Any:
        q, k, v, g, beta, state = primals
        return by_mlx(Linear(q, k, v, g, beta, state, None, None), cotangents, delta=delta)

    call = linear_call(ours, 150, mx.float32, delta=delta, loose=True)
    assert differences(call, name, derivative=True) == []


@derivatives
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_gated_delta(name: str, *, channels: bool, derivative: bool) -> None:
    def ours(*arrays: mx.array) -> Sequence[mx.array]:
        return mlx_cuda.gated_delta(*arrays[:5], state=arrays[5])

    assert differences(linear_call(ours, 20, mx.float32, channels=channels, token=7), name, derivative=derivative) == []


def activated(y: mx.array, activation: str | None) -> mx.array:
    if activation == "relu":
        return mx.maximum(y, 0)
    return y if activation is None else 0.5 * y * (1 + mx.tanh(0.7978845608 * (y + 0.044715 * y**3)))


@derivatives
@pytest.mark.parametrize("activation", [None, "relu", "gelu_approx"])
@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_linear(name: str, activation: Any, *, derivative: bool) -> None:
    arrays = {"x": random((6, 8), seed=1), "w": random((5, 8), seed=2), "bias": random((5,), seed=3)}
    call = Call(
        lambda x, w, b: [mlx_cuda.linear(x, w, b, activation=activation)],
        lambda x, w, b: [activated(x @ w.T + b, activation)],
        arrays,
        {"x": (2, 3), "w": (4, 1), "bias": (2,)},
    )
    assert differences(call, name, derivative=derivative) == []


@derivatives
@pytest.mark.parametrize("name", ["gate", "up"])
def test_swiglu(name: str, *, derivative: bool) -> None:
    arrays = {"gate": random((6, 8), seed=1), "up": random((6, 8), seed=2)}
    call = Call(
        lambda gate, up: [mlx_cuda.swiglu(gate, up)],
        lambda gate, up: [gate * mx.sigmoid(gate) * up],
        arrays,
        {"gate": (2, 3), "up": (4, 1)},
    )
    assert differences(call, name, derivative=derivative) == []


def test_a_query_that_sees_no_key_still_gives_zeros() -> None:
    q, k, v = (random((1, 2, 3, 8), seed=seed) for seed in range(3))
    for hidden in (mx.full((3, 3), -mx.inf), mx.zeros((3, 3), mx.bool_)):
        assert not mlx_cuda.attention(q, k, v, mask=hidden).any()
    lse = compose(q, k, v, Options(1.0, mask=mx.full((1, 2, 3, 3), -mx.inf), lse=True))[1]
    assert np.isneginf(np.array(lse)).all()
