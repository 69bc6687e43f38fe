// Products of some rows of x and quantised weights on Hopper (matmul/quantized/quantized_sm90.cu).
#pragma once

#include "matmul/quantized/weights.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>

#include <optional>

namespace mlx_cuda {

// Whether the kernel is the one for so many rows of each matrix of x on the current device. They have 16 bits, and inner is a
// multiple of 32.
bool quantized_sm90_takes(int rows, int bits);

// Bytes on which its weights have to lie.
int quantized_sm90_alignment(int bits);

// Encodes out = x @ w^T, with inputs and indices as in quantized_few, in memory that kernels read, and an output that has memory.
void encode_quantized_sm90(
    const mx::array& x,
    int rows,
    const Readable& in,
    const std::optional<mx::array>& lhs_indices,
    const std::optional<mx::array>& rhs_indices,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

}  // namespace mlx_cuda
