// Weights as mx.quantize makes them: their values, and products of few rows with them.
#pragma once

#include "matmul/quantized/weights.h"

#include <optional>

namespace mlx_cuda {

// Encodes the values of rows `first` to `first + rows` of each matrix into `out` [..., rows, inner], which has memory, is
// row-contiguous and has the dtype of `weights.scales` where there are biases. With `offsets`, int32 [matrices + 1], matrices whose
// offset is that of the next are left out. 65535 matrices at most.
void encode_dequantize(
    const QuantizedWeights& weights,
    int first,
    int rows,
    const std::optional<mx::array>& offsets,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

// The values of the weights, of 65535 matrices at most, in float16, bfloat16 or float32: bit for bit those of mx.dequantize on the
// GPU.
mx::array dequantize(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream);

// x @ w^T, or with `transpose` false x @ w, by kernels that read the weights once for each 32 rows (float16 and bfloat16 with
// `transpose`, compute capability 8.0 and newer) or each 4 rows (otherwise).
//
// Without indices w is one matrix, and x [..., inner] has any number of rows. With rhs_indices, uint32, the result has their shape
// and then [rows, columns]: each is the product of one matrix of x [..., rows, inner] and the matrix of w that the index names;
// which one of x lhs_indices name, of the same shape, and without them it is their own number. Nothing is empty, 65535 products at
// most.
//
// `small`: there are no indices, and MLX's own kernel is called in place of these, where it reads what lies as it does. That is
// known only when the call is evaluated: elsewhere MLX raises an error.
mx::array quantized_skinny(
    const mx::array& x,
    const QuantizedWeights& weights,
    const std::optional<mx::array>& lhs_indices,
    const std::optional<mx::array>& rhs_indices,
    bool transpose,
    bool small,
    const mx::Stream& stream);

}  // namespace mlx_cuda
