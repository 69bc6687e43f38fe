// Weights in the format of mx.quantize: dequantization, and matmuls with them.
#pragma once

#include "matmul/quantized/weights.h"

namespace mlx_cuda {

// Weights that `encode_dequantize` reads without a copy, so that copies add no nodes between those of their tiles.
QuantizedWeights dequantizable(const QuantizedWeights& weights, CommandEncoder& encoder, const mx::Stream& stream);

// `size` of the matrices of dequantizable weights, or, where they are one, of its rows, from `first` on.
QuantizedWeights part_of(const QuantizedWeights& weights, int first, int size);

// Encodes the values into `out` [..., rows, inner], which has memory, is row-contiguous and has the dtype of `weights.scales` where
// there are biases. With `offsets`, int32 [matrices + 1], matrices whose offset is that of the next are left out. 65535 matrices at
// most.
void encode_dequantize(
    const QuantizedWeights& weights, const MaybeArray& offsets, mx::array& out, CommandEncoder& encoder, const mx::Stream& stream);

// The values of the weights, of 65535 matrices at most, in float16, bfloat16 or float32: bit for bit those of mx.dequantize on the
// GPU.
mx::array dequantize(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream);

// x @ w^T, or with `transpose` false x @ w, by kernels that read the weights once for each 32 rows (float16 and bfloat16 with
// `transpose`, compute capability 8.0 and newer) or each 4 rows (otherwise).
//
// Without indices w is one matrix, and x [..., inner] has any number of rows. With rhs_indices, uint32, the result has their
// shape and then [rows, columns]: each entry is one matrix of x [..., rows, inner] times the matrix of w that the index names;
// lhs_indices of the same shape name that of x, and default to their own number. `sorted`: rhs_indices are ascending. Nothing is
// empty, at most 65535 matmuls.
//
// `small`: there are no indices, and MLX's own kernel is called instead, if it can read the operands. That is known only when the
// call is evaluated: otherwise MLX raises an error.
mx::array quantized_small_m(
    const mx::array& x,
    const QuantizedWeights& weights,
    const MaybeArray& lhs_indices,
    const MaybeArray& rhs_indices,
    bool transpose,
    bool small,
    bool sorted,
    const mx::Stream& stream);

// The weights of an array that `quantized_small_m` has made of rows and transposed matrices, and each row's matrix if there are
// several; none for any other array. With several, x is one row, or has a row for each index.
struct RowWeights {
  QuantizedWeights weights;
  MaybeArray chosen;  // rhs_indices
};
std::optional<RowWeights> row_weights(const mx::array& out);

// Many rows: x [..., inner] @ w^T, or with `transpose` false x @ w, with one matrix w: dequantize, then a GEMM of cuBLASLt's. x,
// and scales and biases if there are biases, are of one type, float16, bfloat16 or float32; nothing is empty.
mx::array dequantize_then_gemm(const mx::array& x, const QuantizedWeights& weights, bool transpose, const mx::Stream& stream);

// x [rows, inner], by group, times the matrix of each row's group of w [groups, ..], as grouped_matmul: by a kernel that
// dequantizes the weights itself if there is one, otherwise the groups that have rows are dequantized for a grouped GEMM. x is
// float16 or bfloat16, inner a multiple of 8; nothing but the rows is empty.
mx::array grouped_quantized(
    const mx::array& x, const QuantizedWeights& weights, const mx::array& offsets, bool transpose, const mx::Stream& stream);

}  // namespace mlx_cuda
