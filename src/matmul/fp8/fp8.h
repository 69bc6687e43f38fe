// Quantization to FP8 (e4m3, stored as uint8) and FP8 GEMMs.
#pragma once

#include "runtime/fused.h"

#include <utility>

namespace mlx_cuda {

// The granularity of scales: the tensor, a row (the last axis), 1 x 128 of a row, or 128 x 128 of a matrix.
enum class Fp8Part { tensor, row, block, tile };

// Values of x's shape and float32 scales: [1], [..., 1], [..., ceil(K / 128)] or, of a matrix [N, K], [ceil(N / 128), ceil(K /
// 128)]. A scale is the largest finite magnitude of its part over 448, at least 2^-126; a value is x / scale to the nearest, ties
// to even, where infinity saturates and NaN stays NaN. x is float16, bfloat16 or float32 [..., K], no dimension empty.
std::pair<mx::array, mx::array> quantize_fp8(const mx::array& x, Fp8Part part, const mx::Stream& stream);

// (scale_a * a) @ (scale_b * b).T + bias for a [..., M, K] and b [N, K] of uint8, in `out_dtype`: float16, bfloat16 or float32.
// Scales are float32: of one element, or as `quantize_fp8` gives them for a and for b, in any combination. Sums are float32. For
// GPUs from sm_89 on.
mx::array fp8_matmul(
    const mx::array& a,
    const mx::array& b,
    const MaybeArray& scale_a,
    const MaybeArray& scale_b,
    const MaybeArray& bias,
    mx::Dtype out_dtype,
    const mx::Stream& stream);

}  // namespace mlx_cuda
