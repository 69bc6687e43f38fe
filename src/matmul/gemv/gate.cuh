// The activations of gated epilogues.
#pragma once

#include "matmul/gemv/params.h"

namespace mlx_cuda {

// silu of x, geglu's tanh approximation, or exact gelu.
__device__ inline float activated(GemvEpilogue epilogue, float x) {
  if (epilogue == GemvEpilogue::geglu) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  }
  const float of = epilogue == GemvEpilogue::swiglu ? x : 1.5957691216f * fmaf(0.044715f * x * x, x, x);
  return __fdividef(x, 1.0f + __expf(-of));
}

}  // namespace mlx_cuda
