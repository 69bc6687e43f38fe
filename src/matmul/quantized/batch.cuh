// Which operands each batch of a call has.
#pragma once

#include "matmul/quantized/params.h"

namespace mlx_cuda {

__device__ inline long long x_matrix(const QuantizedGemmParams& p, int batch) {
  return p.x_index ? min(p.x_index[batch], static_cast<unsigned>(p.matrices - 1)) : batch;
}
__device__ inline long long w_expert(const QuantizedGemmParams& p, int batch) {
  return p.w_index ? min(p.w_index[batch], static_cast<unsigned>(p.experts - 1)) : batch;
}

}  // namespace mlx_cuda
