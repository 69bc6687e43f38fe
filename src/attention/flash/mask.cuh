// What a mask has for one row of queries.
#pragma once

#include "attention/flash/params.h"

namespace mlx_cuda {

__device__ inline const unsigned* mask_bits(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.bit_strides;
  return p.mask.bits + batch * strides[0] + head * strides[1] + row * strides[2];
}

template <typename T>
__device__ inline const T* mask_values(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.strides;
  return static_cast<const T*>(p.mask.values) + batch * strides[0] + head * strides[1] + row * strides[2];
}

// What is taken off a row of an additive mask (attention/flash/mask_tiles.cu).
__device__ inline float mask_shift(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.shift_strides;
  return p.mask.shifts ? p.mask.shifts[batch * strides[0] + head * strides[1] + row * strides[2]] : 0.0f;
}

}  // namespace mlx_cuda
