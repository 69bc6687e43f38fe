// Operands as Hopper's bulk tensor copy engine takes them.
#pragma once

#include <cuda.h>
#include <mlx/array.h>

namespace mlx_cuda {

namespace mx = mlx::core;

// Whether the engine takes an operand of 16-bit floats, [B, H, T, D] or packed [total, H, D]: it wants strides above 0 that are
// multiples of 16 bytes.
bool copyable(const mx::array& in);

// Boxes of `rows` rows of one head and 64 columns, swizzled over 128 bytes. Axes from the innermost: columns, rows, heads, batch.
CUtensorMap tensor_map(const mx::array& in, int rows);

// The same for an additive mask [B, H, Tq, Tk], in whose map what is broadcast is there once.
bool copyable_mask(const mx::array& mask);
CUtensorMap mask_tensor_map(const mx::array& mask, int rows);

}  // namespace mlx_cuda
