"""The types of the native modules; src/bindings has the arguments and their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx

Array: TypeAlias = "Callable[..., mx.array]"  # what gives an array
Arrays: TypeAlias = "Callable[..., list[mx.array]]"


class NativeModule(Protocol):
    """The functions of ``_cu12`` and ``_cu13``. Arrays are checked before: equal dtypes, valid shapes, no size of zero.

    Functions have their own gradients unless a comment says that Python composes them.
    """

    # Calls of a function given the graph that a call like it built. Alike are calls whose arguments have the same places and names, shapes,
    # dtypes and values, on the same stream; of growing ones (place, name, axis) the size may be any that the call says.
    # Calls that it cannot tell apart go to the function; so do arrays under a transformation, unless the graph is of the module alone.
    # Calls whose second argument is a batch of matrices go to the second function, if there is one, and those of a trace for arrays of any
    # size to the third. The fourth prepares calls, and is called instead of the first.
    cached: Callable[..., Callable[..., Any]]
    in_shapeless_trace: Callable[[], bool]  # whether there is such a trace
    forget_calls: Callable[[], None]  # that are kept so, because other rules hold
    traced: Callable[[list[mx.array]], bool]  # whether gradients, or other transformations, may be asked for
    evaluated: Callable[[list[mx.array]], bool]  # whether all have been, or are being

    # Attention, with the Options of _attention/options.py: the result and, if asked for, the log-sum-exp, float32 [B, H, Tq].
    cudnn_attention: Arrays  # a causal mask is aligned to the lower right
    cudnn_refusal: Callable[..., str]  # why cuDNN does not take these shapes; empty when it does
    decode_attention: Arrays  # few queries; masks have the scores' shape; with a block table, k and v are pages
    flash_attention: Arrays  # many queries
    flash_varlen: Arrays  # packed sequences [total, H, D], differentiated in Python; logarithms [H, total]
    quantized_attention: Callable[..., list[mx.array]]
    quantized_attention_kernel: Callable[..., str]
    attention_kernel: Callable[..., str]  # the source and kernel of decode_attention or flash_attention
    paged_cache_update: Arrays
    write_to_pages: Callable[..., None]
    row_sums: Callable[[list[mx.array], int, mx.Stream], mx.array]  # a uint64 for each row of all of these (src/attention/paged)

    # The all-reduce, or None where it is MLX's; why it would be, without asking the others (src/all_sum/all_sum.h).
    all_sum: Callable[[mx.array, Any, mx.Stream], mx.array | None]
    all_sum_refusal: Callable[[mx.array, Any], str]
    share_memory: Callable[[], None]  # has each GPU that this process sees reach what MLX allocates on the others

    linear: Array
    swiglu: Array

    # q, k, v, g, beta, then state, mask and offsets or None, whether with the delta rule, and in chunks: y and the state
    # (src/recurrence/linear_attention.h). Of packed sequences it writes their own rows of y alone; these, and what has no delta rule,
    # are differentiated in Python.
    linear_attention: Callable[..., tuple[mx.array, mx.array]]
    short_conv: Callable[..., tuple[mx.array, mx.array]]  # weights [C, taps, 1] (src/recurrence/short_conv.h)

    # With quantized weights, whose affine scales and biases have x's dtype.
    # SmallM: x [..., K] @ w.T with w in 2 dimensions; or with rhs_indices (uint32 [pairs]) the matrices x[lhs[p]] @ w[rhs[p]].T of
    # x [batches, M, K] and w [E, …] as [pairs, M, N], without lhs_indices x[p]. small: by MLX's kernel, where that takes the layouts.
    quantized_small_m: Array
    quantized_kernel: Callable[..., str]  # the source and kernel of the same call; empty where it is MLX's
    dequantize: Array  # [..., rows, K] of w, scales, biases or None, the three of the format, and a dtype: that of scales and biases
    dequantize_then_gemm: Array  # x [..., K] @ w.T with w in 2 dimensions, in tiles; differentiated in Python

    # MoE. A w whose last two dimensions are swapped in memory is read without a copy; offsets that do not rise are empty groups.
    expert_offsets: Array  # where each expert's rows begin, int32 [experts + 1], from rising uint32 [rows]
    grouped_matmul: Array  # x [M, K] in groups by w [E, N, K], or [E, K, N] without transpose; zeros beyond the last group
    grouped_quantized: Array  # the same with quantized w; differentiated in Python
    gather_mm: Array  # as quantized_small_m; without lhs_indices, each matrix of x in turn has pairs / batches of the pairs
    grouped_kernel: Callable[..., str]  # the source and kernel of grouped_matmul or, with indices of w, of gather_mm

    upstream_operand: Array  # matrices, and whether they are weights: as MLX's own matmuls read them right (src/matmul/grouped)

    fp8_matmul: Array  # e4m3 [..., M, K] by [N, K]; scales are float32, of one element or as quantize_fp8 gives them
    quantize_fp8: Callable[[mx.array, str, mx.Stream], tuple[mx.array, mx.array]]

    # A captured step of a model's decoding (src/decoding/capture/step.h), made from its tokens, how many places its caches stand at, and a
    # stream; what Python objects hold, which says whether that is unchanged() (src/bindings/watch.h); and whether arrays are the same
    # beneath their objects.
    step: Callable[..., Any]
    CaptureError: type[RuntimeError]  # the step cannot be captured, and nothing of the caller's arrays was consumed
    Watch: Callable[..., Any]
    lifetimes_between: Callable[[mx.array, mx.array], Any]  # of the arrays by which one leads to the other: are there any_left(), but these
    capture_refusal: Callable[[mx.Stream], str]  # why no step is; empty where MLX is inside what captures take it for
    same_arrays: Callable[[list[mx.array], list[mx.array]], bool]
    sum_with_residuals: Callable[[list[mx.array]], None]  # has additions to all-reduces be part of them (src/decoding/fusion/sums.h)

    build_info: Callable[[], dict[str, Any]]  # package, cuda, mlx, cudnn_headers, and the digest of its device_code
    library_versions: Callable[[], dict[str, Any]]  # those in use, dotted: cudnn, cublaslt, driver
    device_figures: Callable[[], dict[str, int]]  # of the first GPU: multiprocessors, clock_khz, memory_khz, memory_bits
    inject_fault: Callable[[str, int], bool]  # for tests (src/runtime/faults.h)
    add_device_code: Callable[[str, bytes], None]  # a source and its packed fatbin
    tuning: Callable[[bool], None]  # whether new matmuls are timed
    tuned: Callable[[], list[tuple[str, str, float, float]]]  # matmul, algorithm, microseconds of that and of the heuristic's choice
    set_tuned: Callable[[list[tuple[str, str, float, float]]], None]  # instead of all that are known
