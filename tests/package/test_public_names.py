"""What programs rely on: the public names, each imported first, and the signatures behind them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import mlx_cuda
import pytest

NAMES = [
    "BackendError", "Calibration", "Choice", "ModelCheck", "Patched", "Tuning", "__version__", "all_sum", "attention", "attention_varlen",
    "calibrate", "check", "decode_step", "explain", "fp8_matmul", "gated_delta", "gather_mm", "gather_qmm", "grouped_matmul", "linear",
    "nn", "paged_attention", "paged_cache_update", "patch", "quantize_fp8", "quantized_attention", "quantized_matmul", "short_conv", "ssd",
    "swiglu", "tune", "unpatch",
]  # fmt: skip

RETURNED = {"Calibration", "Choice", "ModelCheck", "Patched", "Tuning"}  # classes of what functions return, for annotations

SIGNATURES = """
BackendError(message: str, *, fix: str = ) -> None

all_sum(x: mx.array, *, group: Any | None = None, stream: StreamOrDevice = None) -> mx.array

attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float | None = None, mask: str | mx.array | None = None,
    window_size: Window = None, softcap: float | None = None, sinks: mx.array | None = None, lengths: mx.array | None = None,
    left_padding: mx.array | None = None, return_lse: bool = False, deterministic: bool = False, force_fused: bool = False,
    stream: StreamOrDevice = None) -> mx.array | tuple[mx.array, mx.array]

attention_varlen(q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array, *, max_seqlen_q: int,
    max_seqlen_k: int, scale: float | None = None, mask: str | None = None, window_size: Window = None, softcap: float | None = None,
    sinks: mx.array | None = None, return_lse: bool = False, force_fused: bool = False, stream: StreamOrDevice = None)
    -> mx.array | tuple[mx.array, mx.array]

calibrate(*, seconds: float = 110.0, progress: Callable[[float, str], None] | None = None, path: Path | None = None) -> Calibration

check(model: str | os.PathLike[str], *, quick: bool = False, progress: Callable[[float, str], None] | None = None) -> ModelCheck

decode_step(model: Any, tokens: mx.array, cache: list[Any], *, stream: StreamOrDevice = None) -> mx.array

explain(*arguments: Any, **options: Any) -> Choice

fp8_matmul(a: mx.array, b: mx.array, *, scale_a: mx.array | None = None, scale_b: mx.array | None = None, bias: mx.array | None = None,
    out_dtype: mx.Dtype = mlx.core.bfloat16, stream: StreamOrDevice = None) -> mx.array

gated_delta(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, *, state: mx.array | None = None,
    mask: mx.array | None = None, cu_seqlens: mx.array | None = None, stream: StreamOrDevice = None) -> tuple[mx.array, mx.array]

gather_mm(a: mx.array, b: mx.array, /, lhs_indices: mx.array | None = None, rhs_indices: mx.array | None = None, *,
    sorted_indices: bool = False, stream: StreamOrDevice = None) -> mx.array

gather_qmm(x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None, transpose: bool = True, group_size: int | None = None, bits: int | None = None,
    mode: str = affine, global_scale: mx.array | None = None, *, sorted_indices: bool = False, stream: StreamOrDevice = None) -> mx.array

grouped_matmul(x: mx.array, w: mx.array, offsets: mx.array, *, transpose: bool = True, stream: StreamOrDevice = None) -> mx.array

linear(x: mx.array, w: mx.array, bias: mx.array | None = None, *, activation: Activation | None = None, stream: StreamOrDevice = None)
    -> mx.array

paged_attention(q: mx.array, k_pages: mx.array, v_pages: mx.array, block_table: mx.array, lengths: mx.array, *,
    scale: float | None = None, window_size: int | None = None, softcap: float | None = None, sinks: mx.array | None = None,
    return_lse: bool = False, force_fused: bool = False, stream: StreamOrDevice = None) -> mx.array | tuple[mx.array, mx.array]

paged_cache_update(k_pages: mx.array, v_pages: mx.array, keys: mx.array, values: mx.array, block_table: mx.array, lengths: mx.array, *,
    stream: StreamOrDevice = None) -> tuple[mx.array, mx.array]

patch(*, kv_bits: Literal[4, 8, 16] | None = None, kv_group_size: Literal[32, 64, 128] = 64, batch_invariant: bool | None = None) -> Patched

quantize_fp8(x: mx.array, *, axis: Axis = None, stream: StreamOrDevice = None) -> tuple[mx.array, mx.array]

quantized_attention(q: mx.array, k: tuple[mx.array, ...], v: tuple[mx.array, ...], *, group_size: int | None = None,
    bits: int | None = None, mode: str = affine, scale: float | None = None, mask: str | mx.array | None = None,
    window_size: Window = None, softcap: float | None = None, sinks: mx.array | None = None, lengths: mx.array | None = None,
    left_padding: mx.array | None = None, block_table: mx.array | None = None, return_lse: bool = False, force_fused: bool = False,
    stream: StreamOrDevice = None) -> mx.array | tuple[mx.array, mx.array]

quantized_matmul(x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, transpose: bool = True,
    group_size: int | None = None, bits: int | None = None, mode: str = affine, *, stream: StreamOrDevice = None) -> mx.array

short_conv(x: mx.array, weight: mx.array, *, bias: mx.array | None = None, state: mx.array | None = None,
    activation: Activation | None = None, stream: StreamOrDevice = None) -> tuple[mx.array, mx.array]

ssd(x: mx.array, dt: mx.array, a: mx.array, b: mx.array, c: mx.array, *, d: mx.array | None = None, state: mx.array | None = None,
    mask: mx.array | None = None, stream: StreamOrDevice = None) -> tuple[mx.array, mx.array]

swiglu(gate: mx.array, up: mx.array, *, stream: StreamOrDevice = None) -> mx.array

tune(enabled: bool = True, *, path: str | os.PathLike[str] | None = None) -> Tuning

unpatch() -> None

nn.Linear.__call__(self, x: mx.array) -> mx.array

nn.Linear.to_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = affine, quantize_input: bool = False)
    -> Module

nn.QuantizedLinear.__call__(self, x: mx.array) -> mx.array

nn.SwitchLinear(input_dims: int, output_dims: int, num_experts: int, bias: bool = True) -> None

nn.SwitchLinear.__call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array

nn.SwitchLinear.to_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = affine, global_scale: bool = False)
    -> QuantizedSwitchLinear

nn.QuantizedSwitchLinear(input_dims: int, output_dims: int, num_experts: int, bias: bool = True, group_size: int | None = None,
    bits: int | None = None, mode: str = affine, global_scale: bool = False) -> None

nn.QuantizedSwitchLinear.__call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array

nn.QuantizedSwitchLinear.from_linear(layer: Any, group_size: int | None = None, bits: int | None = None, mode: str = affine, *,
    global_scale: bool = False) -> Self
"""
PINNED = {text.partition("(")[0]: " ".join(text.split()) for text in SIGNATURES.strip().split("\n\n")}


def test_the_public_names() -> None:
    assert mlx_cuda.__all__ == dir(mlx_cuda) == NAMES
    assert sorted(mlx_cuda.nn.__all__) == ["Linear", "QuantizedLinear", "QuantizedSwitchLinear", "SwitchLinear"]
    assert {name for name in NAMES if callable(getattr(mlx_cuda, name))} - RETURNED == {name for name in PINNED if "." not in name}


@pytest.mark.parametrize("name", PINNED)
def test_the_signatures(name: str) -> None:
    what: Any = mlx_cuda
    for part in name.split("."):
        what = getattr(what, part)
    assert name + re.sub("'", "", str(inspect.signature(what))) == PINNED[name]


# A name that is imported first must not need another to have been.
EACH_FIRST = f"""\
import sys
for name in {NAMES}:
    for module in [module for module in sys.modules if module.partition(".")[0] == "mlx_cuda"]:
        del sys.modules[module]
    exec(f"from mlx_cuda import {{name}} as found; import mlx_cuda; assert found is getattr(mlx_cuda, name)")
    print(name)
"""


def test_each_name_is_imported_first() -> None:
    done = subprocess.run([sys.executable, "-c", EACH_FIRST], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (NAMES, "")
