"""The rules of matmuls as a table: one call, what is changed in it, who computes it, and the rule that says so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_cuda._common.choice import Choice, EngineName, Gpu
from mlx_cuda._matmul import linear
from mlx_cuda._matmul.rules import (
    Fp8Case,
    GroupedCase,
    QuantizedCase,
    choose_fp8,
    choose_gather_qmm,
    choose_grouped,
    choose_quantize_fp8,
    choose_quantized,
    chosen,
)

from .tables import rows, says

PREFILL = QuantizedCase(
    rows=512, n=14336, k=4096, dtype="bfloat16", mode="affine", bits=4, group_size=64, transpose=True, capability=(9, 0)
)
STEP = PREFILL._replace(rows=1)
EXPERTS = PREFILL._replace(rows=8192, experts=128)
DENSE = GroupedCase(rows=8192, n=2048, k=2048, dtype="bfloat16", transpose=True, experts=32, capability=(9, 0), gathered=True)
FP8 = Fp8Case(rows=8192, n=8192, k=8192, out_dtype="bfloat16", capability=(9, 0))

LARGER: list[dict[str, Any]] = [  # or another kind than where one row goes to MLX's kernel
    {"rows": 2}, {"n": 3072}, {"k": 992}, {"bits": 8}, {"mode": "mxfp4", "group_size": 32}, {"dtype": "float32"}, {"transpose": False},
]  # fmt: skip


@rows(
    [
        ({}, "small_m", "up to 512 tokens: each weight is read once"),
        ({"rows": 513}, "dequantize", "the small-M kernels support M up to 512"),
        ({"capability": (8, 6)}, "dequantize", "the small-M kernels support M up to 64"),
        ({"rows": 5, "transpose": False}, "dequantize", "the small-M kernels support M up to 4"),
        ({"rows": 65, "k": 4112, "mode": "nvfp4", "group_size": 16}, "dequantize", "the small-M kernels support M up to 64"),
        ({"rows": 65, "dtype": "float32"}, "dequantize", "the small-M kernels support M up to 64"),
        ({"rows": 65, "capability": (8, 9)}, "dequantize", "the small-M kernels support M up to 64"),
        ({"rows": 1}, "small_m", ""),
        ({"rows": 1, "dtype": "float32", "tf32": False}, "small_m", ""),
        ({"rows": 1, "n": 2048, "k": 1024}, "gemv", "M = 1 and few weights"),
        ({"rows": 1, "n": 1024, "k": 2048, "capability": (7, 5)}, "mlx", "mlx-cuda's kernels need sm_80 or newer"),
        *(({"rows": 1, "n": 2048, "k": 1024} | other, "small_m", "") for other in LARGER),
        ({"rows": 4, "transpose": False, "mode": "nvfp4", "group_size": 16}, "small_m", ""),
        ({"dtype": "float16", "bits": 3, "group_size": 128}, "small_m", ""),
        ({"dtype": "float32"}, "dequantize", ""),
        ({"dtype": "float32", "tf32": False}, "mlx", "MLX_ENABLE_TF32=0 requires float32 matmuls"),
        ({"capability": (8, 0)}, "dequantize", ""),
        ({"capability": (7, 5)}, "mlx", "mlx-cuda's kernels need sm_80 or newer, not sm_75"),
        ({"bits": 1}, "mlx", "mlx-cuda's kernels do not support 1 bit"),
        ({"batches": 4}, "mlx", "a batch of 4 weights without indices is MLX's"),
        ({"dtype": "float64"}, "mlx", "mlx-cuda's kernels compute float16, bfloat16, float32, not float64"),
        ({"rows": 0}, "mlx", "a dimension is 0"),
        # what MLX's CUDA kernels raise an error for
        ({"capability": (7, 5), "mode": "mxfp4", "group_size": 32, "k": 96}, "fallback", "take multiples of 64 as k, not 96"),
        ({"capability": (7, 5), "mode": "mxfp4", "group_size": 32, "k": 96, "transpose": False}, "mlx", ""),
        ({"capability": (7, 5), "k": 96}, "mlx", ""),
    ],
)
def test_quantised_weights(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_quantized(PREFILL._replace(**changed)), engine, reason)


@rows(
    [
        ({}, "grouped", "the small-M kernels support M up to 64"),
        ({"rows": 64}, "small_m", "up to 64 tokens: the weights of their experts are read"),
        ({"rows": 65, "ordered": True}, "grouped", ""),
        ({"rows": 64, "experts": 8}, "grouped", "64 tokens share 8 experts"),
        ({"rows": 32, "experts": 8}, "small_m", ""),
        ({"rows": 42, "experts": 8}, "small_m", ""),
        ({"rows": 42, "experts": 8, "ordered": True}, "grouped", "42 tokens share 8 experts"),
        ({"rows": 64, "experts": 8, "n": 512, "k": 256}, "small_m", ""),
        ({"rows": 64, "experts": 8, "transpose": False}, "small_m", ""),
        ({"rows": 64, "experts": 8, "dtype": "float32"}, "small_m", ""),
        ({"rows": 64, "experts": 8, "capability": (8, 0)}, "small_m", ""),
        ({"dtype": "float32"}, "mlx", "the grouped kernels compute float16 and bfloat16, not float32"),
        ({"k": 100, "transpose": False}, "mlx", "the grouped kernels need K a multiple of 8, not 100"),
        ({"rows": 64, "dtype": "float32", "k": 100, "transpose": False}, "small_m", ""),
        ({"global_scale": True}, "mlx", "scales per expert run on MLX"),
        ({"rows": 8, "global_scale": True}, "mlx", ""),
        ({"global_scale": True, "mode": "nvfp4", "group_size": 16, "k": 48}, "mlx", ""),
        ({"capability": (7, 5), "mode": "mxfp8", "bits": 8, "k": 32}, "fallback", "take multiples of 64 as k, not 32"),
    ],
)
def test_quantised_experts(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_gather_qmm(EXPERTS._replace(**changed)), engine, reason)


@rows(
    [
        ({}, "grouped", "one grouped GEMM for all experts"),
        ({"experts": 5000, "rows": 1}, "grouped", ""),
        ({"dtype": "float16", "transpose": False, "n": 33}, "grouped", ""),
        ({"dtype": "float32"}, "mlx", "the grouped kernels compute float16 and bfloat16, not float32"),
        ({"k": 100}, "mlx", "the grouped kernels need K a multiple of 8, not 100"),
        ({"capability": (7, 5), "gathered": False}, "fallback", "need sm_80 or newer, not sm_75"),
        ({"experts": 0}, "mlx", "a dimension is 0"),
    ],
)
def test_groups(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_grouped(DENSE._replace(**changed)), engine, reason)


@rows(
    [
        ({}, "cublaslt", "cuBLASLt multiplies e4m3"),
        ({"rows": 1, "n": 33, "k": 5}, "cublaslt", ""),
        ({"capability": (8, 9)}, "cublaslt", ""),
        ({"capability": (8, 6)}, "fallback", "FP8 matmuls need sm_89 or newer, not sm_86"),
        ({"rows": 0}, "fallback", "a dimension is 0"),
    ],
)
def test_fp8(changed: dict[str, Any], engine: str, reason: str) -> None:
    assert says(choose_fp8(FP8._replace(**changed)), engine, reason)


def test_quantizing_to_fp8() -> None:
    def chosen(gpu: Gpu, *, empty: bool = False, fits: bool = True) -> Choice:
        return choose_quantize_fp8(gpu, empty=empty, fits=fits)

    assert says(chosen(Gpu((8, 9))), "fused", "values are read once or twice")
    assert says(chosen(Gpu((8, 6))), "fallback", "kernels for e4m3 need sm_89 or newer, not sm_86")
    assert says(chosen(Gpu((9, 0), "there is none")), "fallback", "there is none")
    assert says(chosen(Gpu((9, 0)), empty=True), "fallback", "a dimension is 0")
    assert says(chosen(Gpu((9, 0)), fits=False), "fallback", "a grid has fewer blocks than scales are for")


@pytest.mark.parametrize(
    ("rule", "case", "engine"),
    [
        (choose_quantized, STEP, "mlx"),
        (choose_quantized, PREFILL, "mlx"),
        (choose_quantized, PREFILL._replace(mode="mxfp4", group_size=32, k=96), "fallback"),  # no kernel of MLX's takes it
        (choose_gather_qmm, EXPERTS._replace(rows=8), "mlx"),
        (choose_gather_qmm, EXPERTS, "mlx"),
        (choose_grouped, DENSE, "mlx"),
        (choose_grouped, DENSE._replace(gathered=False), "fallback"),
        (choose_fp8, FP8, "fallback"),
    ],
)
def test_without_a_native_module(rule: Any, case: Any, engine: EngineName) -> None:
    """As callers ask: the case names no capability."""
    asked = case._replace(capability=(0, 0))
    assert chosen(rule, asked, Gpu((9, 0), "there is none"), otherwise="small_m") == Choice(engine, "there is none")
    assert chosen(rule, asked, Gpu((9, 0)), otherwise="small_m") == rule(case)
    assert rule(case).engine not in {"mlx", "fallback"}


def test_without_a_gpu() -> None:
    """Nobody's CUDA kernels are asked, not even MLX's."""
    case = PREFILL._replace(mode="mxfp4", group_size=32, k=96, capability=(0, 0))
    assert chosen(choose_quantized, case, Gpu((0, 0), "on the CPU"), otherwise="mlx") == Choice("mlx", "on the CPU")


@pytest.mark.parametrize(
    ("rows", "bias", "activation", "engine"),
    [((1, 1), None, None, "mlx"), ((1, 2), None, None, "cublaslt"), ((1, 1), (4,), None, "cublaslt"), ((1, 1), None, "relu", "cublaslt")],
)
def test_a_bare_row_is_for_mlx(rows: tuple[int, ...], bias: tuple[int, ...] | None, activation: str | None, engine: str) -> None:
    dtype, choice = linear._plan((*rows, 8), (4, 8), bias, activation, mx.float16)
    assert (dtype, choice.engine) == (None, engine)
