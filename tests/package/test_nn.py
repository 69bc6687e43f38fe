"""The layers beside those of MLX, and of mlx-lm as far as their parameters go."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx_cuda
import pytest
from mlx.utils import tree_flatten

from .matmuls import Matmuls
from .references import assert_close, host, random

mlx_nn: Any = importlib.import_module("mlx.nn")  # whose names mypy does not see
ours_nn: Any = mlx_cuda.nn


def parameters(layer: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(layer.parameters()))


def same(ours: Any, theirs: Any) -> None:
    """Each loads the other's parameters, and then they compute the same."""
    assert {name: (a.shape, a.dtype) for name, a in parameters(ours).items()} == {
        name: (a.shape, a.dtype) for name, a in parameters(theirs).items()
    }
    assert repr(ours) == repr(theirs)
    x = random((3, 128), seed=5)
    ours.load_weights(list(parameters(theirs).items()))
    assert_close(ours(x), host(theirs(x)), slack=2)
    changed = {name: array * 2 if array.dtype == mx.float32 else array for name, array in parameters(ours).items()}
    theirs.load_weights(list(changed.items()))
    ours.update(changed)
    assert_close(ours(x), host(theirs(x)), slack=2)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    same(ours_nn.Linear(128, 9, bias), mlx_nn.Linear(128, 9, bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", [{}, {"group_size": 32, "bits": 6}, {"mode": "mxfp4"}, {"mode": "nvfp4"}], ids=str)
def test_quantised_linear(form: dict[str, Any], bias: bool) -> None:
    same(ours_nn.QuantizedLinear(128, 16, bias, **form), mlx_nn.QuantizedLinear(128, 16, bias, **form))
    plain = ours_nn.Linear(128, 16, bias)
    ours = plain.to_quantized(**form)
    assert type(ours) is ours_nn.QuantizedLinear
    theirs = mlx_nn.Linear.to_quantized(plain, **form)
    x = random((3, 128))
    assert_close(ours(x), host(theirs(x)), slack=2)


def test_a_model_is_quantised_as_ever() -> None:
    model = mlx_nn.Sequential(ours_nn.Linear(128, 64), ours_nn.Linear(64, 64))
    mlx_nn.quantize(model, group_size=32, bits=8)
    assert {type(layer) for layer in model.layers} == {ours_nn.QuantizedLinear}
    assert model(random((3, 128))).shape == (3, 64)


def test_quantised_inputs_are_left_to_mlx() -> None:
    layer = ours_nn.Linear(128, 16, bias=False).to_quantized(mode="nvfp4", quantize_input=True)
    assert type(layer) is mlx_nn.QQLinear


@pytest.mark.parametrize("bias", [True, False])
def test_switch_linear(bias: bool) -> None:
    layer = ours_nn.SwitchLinear(64, 9, 4, bias)
    assert {name: a.shape for name, a in parameters(layer).items()} == {"weight": (4, 9, 64)} | ({"bias": (4, 9)} if bias else {})
    assert (layer.input_dims, layer.output_dims, layer.num_experts) == (64, 9, 4)
    if bias:
        layer.bias = random((4, 9), seed=7)
    x, indices = random((2, 3, 1, 1, 64)), mx.array([[[0, 3], [1, 0], [2, 3]]] * 2)
    exact = host(x) @ host(layer.weight)[indices].swapaxes(-1, -2) + (host(layer.bias)[indices][..., None, :] if bias else 0)
    assert_close(layer(x, indices), exact)
    weights = random((80, 1, 64))
    rising = mx.arange(80) // 20
    exact = host(weights) @ host(layer.weight)[rising].swapaxes(-1, -2) + (host(layer.bias)[rising][:, None] if bias else 0)
    assert_close(layer(weights, rising, sorted_indices=True), exact)


@pytest.mark.parametrize("form", [{}, {"group_size": 32, "bits": 6}, {"mode": "mxfp8"}, {"mode": "nvfp4"}], ids=str)
def test_quantised_switch_linear(form: dict[str, Any]) -> None:
    layer = ours_nn.SwitchLinear(64, 8, 4)
    layer.bias = random((4, 8), seed=7)
    quantised = layer.to_quantized(**form)
    assert not quantised.trainable_parameters() or set(quantised.trainable_parameters()) == {"bias"}
    names = {"weight", "scales", "bias"} | ({"biases"} if "mode" not in form else set())
    assert set(parameters(quantised)) == names
    assert (quantised.input_dims, quantised.output_dims, quantised.num_experts) == (64, 8, 4)
    dense = mx.dequantize(
        quantised.weight,
        quantised.scales,
        quantised.get("biases"),
        quantised.group_size,
        quantised.bits,
        quantised.mode,
        dtype=mx.float32,
    )
    x, indices = random((2, 3, 1, 1, 64)), mx.array([[[0, 3], [1, 0], [2, 3]]] * 2)
    exact = host(x) @ host(dense)[indices].swapaxes(-1, -2) + host(layer.bias)[indices][..., None, :]
    assert_close(quantised(x, indices), exact, slack=2)
    other = ours_nn.QuantizedSwitchLinear(64, 8, 4, **form)
    assert not other.trainable_parameters()
    other.load_weights(list(parameters(quantised).items()))
    assert_close(other(x, indices), exact, slack=2)


def test_experts_of_nvfp4_may_have_scales_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"^\[QuantizedSwitchLinear\] global_scale needs the mode 'nvfp4', got 'mxfp4'\.$"):
        ours_nn.SwitchLinear(64, 8, 4).to_quantized(mode="mxfp4", global_scale=True)


def test_layers_use_the_native_module(matmuls: Matmuls) -> None:
    layer = ours_nn.SwitchLinear(64, 8, 4)
    quantised = layer.to_quantized()
    layer.set_dtype(mx.bfloat16)
    quantised.set_dtype(mx.bfloat16)
    rising, x = mx.arange(80) // 20, random((80, 1, 64), mx.bfloat16)
    layer(x, rising, sorted_indices=True)
    quantised(x, rising, sorted_indices=True)
    quantised(x[:8], rising[:8])
    ours_nn.QuantizedLinear(64, 8)(random((3, 64)))
    assert matmuls.calls == [
        "gather (80, 1, 64) (4, 8, 64) None (80,) True True",
        "grouped quantised (80, 64) True",
        "small_m (8, 1, 64) None (8,)",
        "small_m (3, 64) None None",
    ]
