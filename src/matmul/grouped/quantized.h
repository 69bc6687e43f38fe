// The node of a grouped product with quantised weights that become 16 bits on their way to the tensor cores, on Hopper.
#pragma once

#include "matmul/quantized/weights.h"

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

// Whether the kernel takes these transposed weights [groups, columns, inner] on this GPU, for x of 16-bit floats.
bool can_unpack(const QuantizedWeights& weights);

// Weights as the kernel reads them; copies what does not fit.
Readable unpackable(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder, const mx::Stream& stream);

// Adds the node that writes out [rows, columns], x [rows, inner] (as from as_rows) times the transposed matrix of each row's group;
// offsets: int32 [groups + 1]. Rows of no group are zeros.
void encode_unpacked(
    const mx::array& x, const mx::array& offsets, const Readable& weights, mx::array& out, mx::cu::CommandEncoder& encoder);

}  // namespace mlx_cuda
