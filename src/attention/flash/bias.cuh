// What both flash kernels know of an additive mask.
#pragma once

#include "attention/flash/params.h"

namespace mlx_cuda {

// What is taken off a row of an additive mask (attention/flash/mask_tiles.cu).
__device__ inline float shift_of(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.shift_strides;
  return p.mask.shifts ? p.mask.shifts[batch * strides[0] + head * strides[1] + row * strides[2]] : 0.0f;
}

}  // namespace mlx_cuda
