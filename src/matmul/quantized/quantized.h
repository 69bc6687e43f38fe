// Weights as mx.quantize makes them: their values, and products with them.
#pragma once

#include "matmul/quantized/weights.h"

namespace mlx_cuda {

// Weights that `encode_dequantize` reads where they lie, so that copies add no nodes between those of their parts.
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
// Without indices w is one matrix, and x [..., inner] has any number of rows. With rhs_indices, uint32, the result has their shape
// and then [rows, columns]: each is the product of one matrix of x [..., rows, inner] and the matrix of w that the index names;
// which one of x lhs_indices name, of the same shape, and without them it is their own number. `sorted`: rhs_indices rise. Nothing
// is empty, 65535 products at most.
//
// `small`: there are no indices, and MLX's own kernel is called in place of these, where it reads what lies as it does. That is
// known only when the call is evaluated: elsewhere MLX raises an error.
mx::array quantized_small_m(
    const mx::array& x,
    const QuantizedWeights& weights,
    const MaybeArray& lhs_indices,
    const MaybeArray& rhs_indices,
    bool transpose,
    bool small,
    bool sorted,
    const mx::Stream& stream);

// The weights of an array that `quantized_small_m` has made of rows and transposed matrices, and which matrix each row goes to
// where there are several; nothing for any other array. Of several, x is one row, or has a row for each index.
struct RowWeights {
  QuantizedWeights weights;
  MaybeArray chosen;  // rhs_indices
};
std::optional<RowWeights> row_weights(const mx::array& out);

// Many rows: x [..., inner] @ w^T, or with `transpose` false x @ w, where w is one matrix: its values and a product of cuBLASLt's.
// x, and scales and biases where there are biases, are of one type, float16, bfloat16 or float32; nothing is empty.
mx::array dequantize_then_gemm(const mx::array& x, const QuantizedWeights& weights, bool transpose, const mx::Stream& stream);

// x [rows, inner], grouped, times the matrix of each row's group of w [groups, ..], as grouped_matmul: by a kernel that
// unpacks the weights itself where there is one for them, else the values of the groups that have rows, and grouped products. x is
// float16 or bfloat16, inner a multiple of 8; nothing but the rows is empty.
mx::array grouped_quantized(
    const mx::array& x, const QuantizedWeights& weights, const mx::array& offsets, bool transpose, const mx::Stream& stream);

}  // namespace mlx_cuda
