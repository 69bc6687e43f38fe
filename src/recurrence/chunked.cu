// Linear attention by chunks of tokens, on tensor cores: chunk_forward.cuh has the formulas.
#include "recurrence/chunk_forward.cuh"

#define MLX_CUDA_CHUNKED(name, T, Delta)                                                                                    \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kChunkThreads, 3)                                                  \
      chunk_prepare_##name(__grid_constant__ const mlx_cuda::Recurrence p, __grid_constant__ const mlx_cuda::Prepared to) { \
    mlx_cuda::chunk_prepare<T, Delta>(p, to);                                                                               \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kChunkThreads)                                                     \
      chunk_scan_##name(__grid_constant__ const mlx_cuda::Recurrence p, __grid_constant__ const mlx_cuda::Prepared from) {  \
    mlx_cuda::chunk_scan<T, Delta, false>(blockIdx.x, p, from, {});                                                         \
  }

MLX_CUDA_CHUNKED(delta_float16, __half, true)
MLX_CUDA_CHUNKED(delta_bfloat16, __nv_bfloat16, true)
MLX_CUDA_CHUNKED(plain_float16, __half, false)
MLX_CUDA_CHUNKED(plain_bfloat16, __nv_bfloat16, false)
