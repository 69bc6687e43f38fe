// The types of elements, as kernels are named after them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlx_cuda::types {

using float32 = float;
using float16 = __half;
using bfloat16 = __nv_bfloat16;

}  // namespace mlx_cuda::types
