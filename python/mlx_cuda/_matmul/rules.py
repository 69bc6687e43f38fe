"""Dispatch rules of matmul: pure functions of shapes, dtypes, quantization and GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

from .._common.choice import HALF, NATIVE, OLDEST_GPU, Choice, EngineName, Gpu, first_reason, sm
from .._common.limits import Matmul, by_limits, kind_of, limits

NATIVE_BITS = (2, 3, 4, 5, 6, 8)  # of affine weights; MLX packs 1 bit as well
OLDEST_FP8_GPU = (8, 9)
GROUPED_MULTIPLE = 8  # of k: the grouped kernels read rows of x 16 bytes at a time
HALF_MULTIPLE = 32  # of k: the kernels for few rows of 16 bits read as many weights of a row at a time
UNPACKED_MULTIPLE = 64  # of k: the grouped kernel that unpacks weights itself takes steps of these, and tiles of UNPACKED_COLUMNS of n
UNPACKED_COLUMNS = 256
UPSTREAM_TILE = 64  # MLX's CUDA kernels for many rows take multiples of this as k, or of the group size where that is more
UPSTREAM_COLUMNS = 128  # a multiple of N, for the kernel that dequantizes in its main loop, on sm_80 and newer, with these bits
UPSTREAM_BITS = (4, 8)
FEWEST_UPSTREAM_TILES = 3  # of k, which that kernel reads ahead of: with fewer, beyond the ends of x and of the weights


# One row of small 4-bit weights: MLX's kernel has less to do before it reads. It supports no vectors, and only row-contiguous
# arrays: the native module sees that when the call is evaluated, and runs a kernel of mlx-cuda then.
SMALL_WEIGHTS = 2**21
SMALL_MULTIPLE = 512  # of k, as measured


class Sharing(NamedTuple):
    """When few tokens share experts so much that the grouped GEMM, which dequantizes weights in its kernel, is faster."""

    read: float  # bytes in a microsecond by the kernels for few rows, which read an expert for each row again
    step: float  # microseconds of a step of the grouped kernel
    blocks: int  # tiles at once
    ordering: float  # microseconds for rows that are not in the order of their experts
    source: str


SHARING = {(9, 0): Sharing(3.7e6, 1.2, 132, 60, "H200: 64 rows of 8 experts of 14336 x 4096 in 4 bit")}


class QuantizedCase(NamedTuple):
    """The properties of a call of ``quantized_matmul``, or of ``gather_qmm`` with experts, that determine its engine."""

    rows: int  # in all
    n: int
    k: int
    dtype: str
    mode: str
    bits: int
    group_size: int
    transpose: bool
    capability: tuple[int, int] = (0, 0)
    batches: int = 1  # of weights, without indices
    experts: int = 0  # with indices
    ordered: bool = False  # the indices of the experts are sorted
    global_scale: bool = False
    tf32: bool = True  # whether float32 matmuls may run in TF32


class GroupedCase(NamedTuple):
    """The same for ``grouped_matmul`` and ``gather_mm``."""

    rows: int
    n: int
    k: int
    dtype: str
    transpose: bool
    experts: int
    capability: tuple[int, int] = (0, 0)
    gathered: bool = False  # by indices, as gather_mm
    ordered: bool = False


class Fp8Case(NamedTuple):
    """The same for ``fp8_matmul``."""

    rows: int
    n: int
    k: int
    out_dtype: str
    capability: tuple[int, int] = (0, 0)


Case = TypeVar("Case", QuantizedCase, GroupedCase, Fp8Case)


def chosen(rule: Callable[[Case], Choice], case: Case, gpu: Gpu, *, otherwise: EngineName) -> Choice:
    """Apply a rule on this device; return ``otherwise`` if MLX does not run on CUDA."""
    if gpu.capability == (0, 0):
        return Choice(otherwise, gpu.absent)
    if gpu.absent:  # no kernel of mlx-cuda supports a case without a capability
        return Choice(rule(case).engine, gpu.absent)
    return rule(case._replace(capability=gpu.capability))


@by_limits(4096)
def choose_quantized(case: QuantizedCase) -> Choice:
    """Choose among the small-M kernels or MLX's GEMV; for larger M MLX's kernel if it is faster on such a GPU, else dequantized weights and
    a dense GEMM; else MLX's.
    """
    small_m, dense = _against_small_m(case), _against_dequantize(case)
    if not small_m and _is_small(case):
        return Choice("gemv", "M = 1 and few weights: MLX's GEMV is faster if they are contiguous")
    if not small_m:
        return Choice("small_m", f"up to {_most_small_m(case)} tokens: each weight is read once")
    if not dense and _is_upstream(case):
        return Choice("mlx", f"{small_m}; up to {_thresholds(case).upstream} tokens MLX's kernel is faster")
    if not dense:
        return Choice("dequantize", small_m)
    return _upstream_quantized(case, small_m, dense)


@by_limits(4096)
def choose_gather_qmm(case: QuantizedCase) -> Choice:
    """The same for MoE: many tokens are sorted by expert first, unless they are sorted."""
    small_m, grouped = _against_small_m(case), _against_grouped_quantized(case)
    if not small_m:
        if not grouped and _shares_experts(case):
            return Choice("grouped", f"{case.rows} tokens share {case.experts} experts")
        return Choice("small_m", f"up to {_most_small_m(case)} tokens: the weights of their experts are read")
    if not grouped:
        return Choice("grouped", small_m)
    return _upstream_quantized(case, small_m, grouped)


@lru_cache(4096)
def choose_grouped(case: GroupedCase) -> Choice:
    """Choose the grouped GEMM, else MLX's gather_mm."""
    against = _against_grouped(case)
    if not against:
        return Choice("grouped", "one grouped GEMM for all experts")
    return Choice("mlx" if case.gathered else "fallback", against)


@lru_cache(1024)
def choose_fp8(case: Fp8Case) -> Choice:
    """Choose cuBLASLt if it multiplies FP8 with these scales, else MLX's operations in float32."""
    against = first_reason((
        (0 in (case.rows, case.n, case.k), "a dimension is 0"),
        (case.capability < OLDEST_FP8_GPU, f"FP8 matmuls need sm_89 or newer, not {sm(case.capability)}"),
    ))  # fmt: skip
    return Choice("fallback", against) if against else Choice("cublaslt", "cuBLASLt multiplies e4m3 and scales the result")


@lru_cache(1024)
def choose_quantize_fp8(gpu: Gpu, *, empty: bool, fits: bool) -> Choice:
    """Choose mlx-cuda's kernel. fits: whether the second dimension of a grid holds the blocks that share scales along it."""
    against = first_reason((
        (empty, "a dimension is 0"),
        (bool(gpu.absent), gpu.absent),
        (gpu.capability < OLDEST_FP8_GPU, f"kernels for e4m3 need sm_89 or newer, not {sm(gpu.capability)}"),
        (not fits, "a grid has fewer blocks than scales are for"),
    ))  # fmt: skip
    return Choice("fallback", against) if against else Choice("fused", "values are read once or twice")


def _against_quantized(case: QuantizedCase) -> str:
    """Return the first rule that excludes all of mlx-cuda's kernels for quantized weights."""
    return first_reason((
        (0 in (case.rows, case.n, case.k), "a dimension is 0"),
        (case.dtype not in NATIVE, f"mlx-cuda's kernels compute {', '.join(NATIVE)}, not {case.dtype}"),
        (case.mode == "affine" and case.bits not in NATIVE_BITS, f"mlx-cuda's kernels do not support {case.bits} bit"),
        (case.capability < OLDEST_GPU, f"mlx-cuda's kernels need sm_80 or newer, not {sm(case.capability)}"),
        (case.batches > 1, f"a batch of {case.batches} weights without indices is MLX's"),
        (case.global_scale, "scales per expert run on MLX"),
    ))  # fmt: skip


def _thresholds(case: QuantizedCase) -> Matmul:
    return limits(case.capability).matmul[kind_of(case.mode, case.bits)]


def _is_upstream(case: QuantizedCase) -> bool:
    """Return whether MLX's kernel, which dequantizes in its main loop, supports the call and is faster."""
    tile = max(UPSTREAM_TILE, case.group_size)
    sizes = case.k % tile == 0 and case.k >= FEWEST_UPSTREAM_TILES * tile and case.n % UPSTREAM_COLUMNS == 0
    counts = case.rows * case.n < 2**31  # in an int
    takes = case.dtype in HALF and case.transpose and case.bits in UPSTREAM_BITS and sizes and counts
    return takes and case.rows <= _thresholds(case).upstream


def _most_small_m(case: QuantizedCase) -> int:
    """Return the largest M of the small-M kernels."""
    most = _thresholds(case)
    if case.experts:
        return most.gathered
    if not case.transpose:
        return most.not_transposed
    return most.half_precision if case.dtype in HALF and case.k % HALF_MULTIPLE == 0 else most.small_m


def _is_small(case: QuantizedCase) -> bool:
    measured = (case.mode, case.bits) == ("affine", 4) and case.dtype in HALF and case.transpose and case.k % SMALL_MULTIPLE == 0
    return measured and case.rows == 1 and case.n * case.k <= SMALL_WEIGHTS


def _against_small_m(case: QuantizedCase) -> str:
    most = _most_small_m(case)
    return _against_quantized(case) or (f"the small-M kernels support M up to {most}" if case.rows > most else "")


def _shares_experts(case: QuantizedCase) -> bool:
    about = SHARING.get(case.capability)
    if about is None or not case.transpose or case.k % UNPACKED_MULTIPLE:
        return False
    tiles = min(case.rows, case.experts) * math.ceil(case.n / UNPACKED_COLUMNS)
    ordering = 0.0 if case.ordered else about.ordering
    grouped = math.ceil(tiles / about.blocks) * case.k / UNPACKED_MULTIPLE * about.step + ordering
    return case.rows * case.n * case.k * case.bits / 8 / about.read > grouped


def _against_dequantize(case: QuantizedCase) -> str:
    exact = case.dtype == "float32" and not case.tf32
    return _against_quantized(case) or ("MLX_ENABLE_TF32=0 requires float32 matmuls" if exact else "")


def _against_grouped_quantized(case: QuantizedCase) -> str:
    return _against_quantized(case) or first_reason(_grouped_operands(case))


def _against_grouped(case: GroupedCase) -> str:
    return first_reason((
        (0 in (case.rows, case.n, case.k, case.experts), "a dimension is 0"),
        *_grouped_operands(case),
        (case.capability < OLDEST_GPU, f"the grouped kernels need sm_80 or newer, not {sm(case.capability)}"),
    ))  # fmt: skip


def _grouped_operands(case: QuantizedCase | GroupedCase) -> tuple[tuple[bool, str], ...]:
    return (
        (case.dtype not in HALF, f"the grouped kernels compute float16 and bfloat16, not {case.dtype}"),
        (bool(case.k % GROUPED_MULTIPLE), f"the grouped kernels need K a multiple of {GROUPED_MULTIPLE}, not {case.k}"),
    )


def _upstream_quantized(case: QuantizedCase, *against: str) -> Choice:
    """Choose MLX's function, unless its CUDA kernels raise an error for the call when they are evaluated."""
    reason = "; ".join(dict.fromkeys(against))
    if case.mode != "affine" and case.transpose and case.k % UPSTREAM_TILE and not case.global_scale:
        return Choice("fallback", f"{reason}; MLX's kernels take multiples of {UPSTREAM_TILE} as k, not {case.k}")
    return Choice("mlx", reason)
