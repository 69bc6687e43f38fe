// Tensor maps of 16-bit operands for Hopper's TMA. Boxes are `rows` rows of 64 columns of one matrix, with 128-byte swizzle;
// outside of the array they are zero.
#pragma once

#include "runtime/arrays.h"

#include <cuda.h>

namespace mlx_cuda {

// A matrix, or a stack of them, with strides that are multiples of 16 bytes. Axes from the innermost: columns, rows, matrices.
CUtensorMap matrix_tensor_map(const mx::array& in, int rows);

// Whether TMA supports an operand of attention, [B, H, T, D] or packed [total, H, D]: strides above 0 that are multiples of 16
// bytes.
bool copyable(const mx::array& in);

// Axes from the innermost: columns, rows, heads, batch.
CUtensorMap tensor_map(const mx::array& in, int rows);

// The same for an additive mask [B, H, Tq, Tk], whose tensor map has broadcast dimensions once.
bool copyable_mask(const mx::array& mask);
CUtensorMap mask_tensor_map(const mx::array& mask, int rows);

}  // namespace mlx_cuda
