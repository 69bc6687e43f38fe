// Rows of x times the quantised experts that they name, on Hopper (matmul/quantized/quantized_moe_sm90.cu).
#pragma once

#include "matmul/quantized/weights.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>

#include <optional>

namespace mlx_cuda {

// Whether the kernel is the one for so many pairs of a row and an expert on the current device. The rows have 16 bits.
bool quantized_pairs_takes(const Readable& in, int pairs);

// Encodes out = x[lhs_indices] @ w[rhs_indices]^T, with inputs and indices as in quantized_few, matrices of x of one row, in memory
// that kernels read, and an output that has memory.
void encode_quantized_pairs(
    const mx::array& x,
    const Readable& in,
    const std::optional<mx::array>& lhs_indices,
    const mx::array& rhs_indices,
    mx::array& out,
    mx::cu::CommandEncoder& encoder);

}  // namespace mlx_cuda
