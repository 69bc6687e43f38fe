// Products of many rows with quantised weights: the weights' values go to a workspace first.
#pragma once

#include "matmul/quantized/weights.h"

namespace mlx_cuda {

// x [..., inner] @ w^T, or with `transpose` false x @ w, where w is one matrix: its values and a product of cuBLASLt's. x, and
// scales and biases where there are biases, are of one type, float16, bfloat16 or float32; nothing is empty.
mx::array dequantize_then_gemm(const mx::array& x, const QuantizedWeights& weights, bool transpose, const mx::Stream& stream);

// x [rows, inner], grouped, times the matrix of each row's group of w [groups, ..], as grouped_matmul: by a kernel that
// unpacks the weights itself where there is one for them, else the values of the groups that have rows, and grouped products. x is
// float16 or bfloat16, inner a multiple of 8; nothing but the rows is empty.
mx::array grouped_quantized(
    const mx::array& x, const QuantizedWeights& weights, const mx::array& offsets, bool transpose, const mx::Stream& stream);

}  // namespace mlx_cuda
