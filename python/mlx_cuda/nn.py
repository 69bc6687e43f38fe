"""Layers with the parameters of :mod:`mlx.nn` and mlx-lm, computed by mlx-cuda."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear as MlxLinear
from mlx.nn.layers.quantized import QuantizedLinear as MlxQuantizedLinear

from ._matmul.formats import FORMATS
from ._matmul.gather import gather_dense, gather_qmm
from ._matmul.linear import linear
from ._matmul.quantized import quantized_matmul

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Linear", "QuantizedLinear", "QuantizedSwitchLinear", "SwitchLinear"]


class Linear(MlxLinear):
    """:class:`mlx.nn.Linear` computed by :func:`mlx_cuda.linear`, with the bias in the GEMM's epilogue."""

    def __call__(self, x: mx.array) -> mx.array:
        return linear(x, self["weight"], self.get("bias"))

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", quantize_input: bool = False
    ) -> Module:
        """Return this layer with quantized weights; with ``quantize_input`` it is MLX's own layer."""
        form: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        if quantize_input:
            return cast("Module", super().to_quantized(**form, quantize_input=True))
        return cast("Module", QuantizedLinear.from_linear(self, **form))


class QuantizedLinear(MlxQuantizedLinear):
    """:class:`mlx.nn.QuantizedLinear` computed by :func:`mlx_cuda.quantized_matmul`."""

    def __call__(self, x: mx.array) -> mx.array:
        x = quantized_matmul(
            x, self["weight"], self["scales"], self.get("biases"), True, self.group_size, self.bits, self.mode
        )  # fmt: skip
        return x + self["bias"] if "bias" in self else x


class _Experts(Module):
    """A linear layer per MoE expert, whose ``weight`` is ``[E, N, …]``."""

    @property
    def output_dims(self) -> int:
        return int(self["weight"].shape[1])

    @property
    def num_experts(self) -> int:
        return int(self["weight"].shape[0])

    def _with_bias(self, out: mx.array, indices: mx.array) -> mx.array:
        return out + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else out


def _random_weight(input_dims: int, output_dims: int, num_experts: int) -> mx.array:
    bound = math.sqrt(1 / input_dims)
    return mx.random.uniform(-bound, bound, (num_experts, output_dims, input_dims))


class SwitchLinear(_Experts):
    """A linear layer per MoE expert, with the parameters of mlx-lm's: ``weight`` ``[E, N, K]`` and ``bias`` ``[E, N]``.

    Args:
        input_dims: Input size, K.
        output_dims: Output size, N.
        num_experts: Number of experts, E.
        bias: Whether to add a bias.
    """

    def __init__(self, input_dims: int, output_dims: int, num_experts: int, bias: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = _random_weight(input_dims, output_dims, num_experts)
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))

    @property
    def input_dims(self) -> int:
        return self.weight.shape[2]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Apply the experts ``indices`` to x ``[..., M, K]``; the indices broadcast with the leading dimensions of x."""
        out = gather_dense(x, self["weight"], None, indices, sorted_indices=sorted_indices, transpose=True).result()
        return self._with_bias(out, indices)

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str = "affine", global_scale: bool = False
    ) -> QuantizedSwitchLinear:
        """Return this layer with quantized weights."""
        return QuantizedSwitchLinear.from_linear(self, group_size, bits, mode, global_scale=global_scale)


class QuantizedSwitchLinear(_Experts):
    """:class:`SwitchLinear` with quantized weights, with the parameters of mlx-lm's ``QuantizedSwitchLinear``.

    Args:
        input_dims: Input size, K.
        output_dims: Output size, N.
        num_experts: Number of experts, E.
        bias: Whether to add a bias.
        group_size: Values that share a scale; default: that of the mode.
        bits: Bits of a value; default: that of the mode.
        mode: As in :func:`mlx.core.quantize`.
        global_scale: Whether each expert has one more scale (``"nvfp4"`` on the GPU).
    """

    def __init__(
        self, input_dims: int, output_dims: int, num_experts: int, bias: bool = True, group_size: int | None = None,
        bits: int | None = None, mode: str = "affine", global_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        groups, widths = FORMATS.get(mode, ((64,), (4,)))  # mx.quantize says what is wrong with a mode
        self.group_size, self.bits, self.mode = group_size or groups[0], bits or widths[0], mode
        self._quantize(_random_weight(input_dims, output_dims, num_experts), global_scale=global_scale)
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))
        self.freeze()

    @classmethod
    def from_linear(
        cls, layer: Any, group_size: int | None = None, bits: int | None = None, mode: str = "affine", *, global_scale: bool = False
    ) -> Self:
        """Return the quantized form of a :class:`SwitchLinear`, or of mlx-lm's."""
        experts, output_dims, input_dims = layer.weight.shape
        result = cls(input_dims, output_dims, experts, False, group_size, bits, mode)
        result._quantize(layer.weight, global_scale=global_scale)
        if "bias" in layer:
            result.bias = layer.bias
        return result

    def _quantize(self, weight: mx.array, *, global_scale: bool) -> None:
        form: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        if not global_scale:
            self.weight, self.scales, *biases = mx.quantize(weight, **form)
            self.biases, self.global_scale = (biases[0] if biases else None), None
            return
        if self.mode != "nvfp4":
            raise ValueError(f"[QuantizedSwitchLinear] global_scale needs the mode 'nvfp4', got {self.mode!r}.")
        self.global_scale = mx.abs(weight).max(axis=(1, 2)).astype(mx.float32)
        parts = [mx.quantize(expert, global_scale=scale, **form) for expert, scale in zip(weight, self.global_scale, strict=True)]
        self.weight, self.scales = (mx.stack([part[i] for part in parts]) for i in (0, 1))
        self.biases = None

    @property
    def input_dims(self) -> int:
        return int(self.scales.shape[2]) * self.group_size

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Apply the experts, as :class:`SwitchLinear` does."""
        out = gather_qmm(
            x, self["weight"], self["scales"], self.get("biases"), None, indices, True, self.group_size, self.bits, self.mode,
            self.get("global_scale"), sorted_indices=sorted_indices,
        )  # fmt: skip
        return self._with_bias(out, indices)
