// Which operands each product of a call has.
#pragma once

#include "matmul/quantized/params.h"

namespace mlx_cuda {

__device__ inline long long x_matrix(const QuantizedProduct& p, int product) {
  return p.x_index ? min(p.x_index[product], static_cast<unsigned>(p.matrices - 1)) : product;
}
__device__ inline long long w_expert(const QuantizedProduct& p, int product) {
  return p.w_index ? min(p.w_index[product], static_cast<unsigned>(p.experts - 1)) : product;
}

}  // namespace mlx_cuda
