"""The linear layer, with bias and activation in the GEMM's epilogue."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, get_args

import mlx.core as mx

from .._common.arrays import CACHED_SHAPES, cast, dtype_text, require_arrays, resolve, shape_text, value_text
from .._common.choice import Choice, against_native, dtype_name
from .._common.errors import WrongValue
from .._loader import native
from .._operation import DirectCall, operation

if TYPE_CHECKING:
    from .._common.arrays import Shape, StreamOrDevice

upstream_matmul = mx.matmul  # not what patch(batch_invariant=True) puts there: results of linear are cached
Activation = Literal["relu", "gelu_approx"]


@operation()
def linear(
    x: mx.array, w: mx.array, bias: mx.array | None = None, *, activation: Activation | None = None, stream: StreamOrDevice = None
) -> DirectCall[mx.array]:
    """Compute ``activation(x @ w.T + bias)``, as one cuBLASLt call with a fused epilogue on a CUDA GPU.

    Args:
        x: Inputs, ``[..., K]``.
        w: Weights, ``[N, K]``, in the layout of :class:`mlx.nn.Linear`.
        bias: Bias, ``[N]``; default none.
        activation: ``"relu"``, ``"gelu_approx"`` (the tanh form, as :func:`mlx.nn.gelu_approx`) or None.
        stream: Stream or device to run on.

    Returns:
        An array ``[..., N]`` in the dtype that x, w and bias promote to.

    Raises:
        ValueError: Shapes do not fit, the promoted dtype is neither floating point nor complex, or the activation is unknown
            or undefined for complex numbers.
        TypeError: An argument is not an MLX array.

    On a CUDA GPU, float16, bfloat16 and float32 run in cuBLASLt. Other calls run on MLX's operations.
    """
    try:
        if bias is None:
            dtype, choice = _plan(x.shape, w.shape, None, activation, x.dtype, w.dtype)
        else:
            dtype, choice = _plan(x.shape, w.shape, bias.shape, activation, x.dtype, w.dtype, bias.dtype)
    except (AttributeError, TypeError, ValueError):  # which may be of what is no array
        require_arrays("linear", ("bias",), x=x, w=w, bias=bias)
        _require_activation(activation)  # which may have no hash
        raise
    on = resolve(stream)
    if choice.engine == "mlx" and isinstance(found := native.engine(on), str):
        choice = Choice("fallback", found)
    if dtype is not None:
        x, w, bias = cast(x, dtype, on), cast(w, dtype, on), None if bias is None else cast(bias, dtype, on)
    return DirectCall(choice, "linear", _composed, (x, w, bias, activation), on)


@lru_cache(CACHED_SHAPES)
def _plan(x: Shape, w: Shape, bias: Shape | None, activation: str | None, *dtypes: mx.Dtype) -> tuple[mx.Dtype | None, Choice]:
    """Return the dtype to compute in (None: that of all arguments), and the engine if there is a native module."""
    _require_activation(activation)
    if len(x) < 1 or len(w) != 2 or x[-1] != w[1]:
        raise WrongValue(f"[linear] Shapes must be x [..., K] and w [N, K], got {shape_text(x, w)}.")
    if bias is not None and bias != w[:1]:
        raise WrongValue(f"[linear] bias must have the shape ({w[0]},) of w's rows, got {shape_text(bias)}.")
    dtype = mx.result_type(*dtypes)
    if not mx.issubdtype(dtype, mx.inexact):
        raise WrongValue(f"[linear] Only inexact types are supported, got {dtype_text(*dtypes)}.")
    if activation and mx.issubdtype(dtype, mx.complexfloating):
        raise WrongValue(f"[linear] Activation {activation!r} needs a real type, got {dtype_name(dtype)}.")
    against = against_native(dtype_name(dtype), (*x, *w))
    if against:
        choice = Choice("fallback", against)
    elif math.prod(x[:-1]) == 1 and bias is None and activation is None:
        choice = Choice("mlx", "M = 1 without bias and activation: MLX's GEMV is faster than cuBLASLt")
    else:
        choice = Choice("cublaslt", "bias and activation are in the epilogue, where cuBLASLt has an algorithm with it")
    return None if {*dtypes} == {dtype} else dtype, choice


def _require_activation(activation: object) -> None:
    if activation is not None and not (isinstance(activation, str) and activation in get_args(Activation)):
        names = ", ".join(repr(name) for name in get_args(Activation))
        raise WrongValue(f"[linear] Activation must be None or one of {names}, got {value_text(activation)}.")


def _composed(x: mx.array, w: mx.array, bias: mx.array | None, activation: str | None) -> mx.array:
    # MLX's CUDA operations do not all provide for arrays without numbers.
    y = upstream_matmul(x, w.T) if x.size and w.size else mx.zeros((*x.shape[:-1], w.shape[0]), x.dtype)
    if y.size == 0:
        return y
    if bias is not None:
        y = y + bias  # not addmm, which cannot be vectorised over the bias alone
    if activation == "relu":
        return mx.maximum(y, 0)
    return _gelu_approx(y) if activation == "gelu_approx" else y


@partial(mx.compile, shapeless=True)
def _gelu_approx(x: mx.array) -> mx.array:
    # In float32, because x**3 and its gradient overflow float16 from |x| = 40 on and then give NaN gradients.
    wide = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
    return (0.5 * wide * (1 + mx.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).astype(x.dtype)
