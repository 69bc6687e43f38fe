// Operands of 16-bit floats as tensor maps of Hopper's bulk tensor copy engine. Boxes are `rows` rows of 64 columns of one matrix,
// swizzled over 128 bytes; what lies outside of the array is zero.
#pragma once

#include "runtime/arrays.h"

#include <cuda.h>

namespace mlx_cuda {

// A matrix, or a stack of them, with strides that are multiples of 16 bytes. Axes from the innermost: columns, rows, matrices.
CUtensorMap matrix_tensor_map(const mx::array& in, int rows);

// Whether the engine takes an operand of attention, [B, H, T, D] or packed [total, H, D]: it wants strides above 0 that are
// multiples of 16 bytes.
bool copyable(const mx::array& in);

// Axes from the innermost: columns, rows, heads, batch.
CUtensorMap tensor_map(const mx::array& in, int rows);

// The same for an additive mask [B, H, Tq, Tk], in whose map what is broadcast is there once.
bool copyable_mask(const mx::array& mask);
CUtensorMap mask_tensor_map(const mx::array& mask, int rows);

}  // namespace mlx_cuda
