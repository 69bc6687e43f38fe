// Linear attention by chunks of tokens, on tensor cores: chunk_forward.cuh has the formulas.
#include "device/types.cuh"
#include "recurrence/chunk_forward.cuh"
#include "recurrence/kernels.h"

#define MLX_CUDA_CHUNK_PREPARE(name, dtype, Delta)                                                          \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kChunkThreads, 3)                                  \
      name(__grid_constant__ const mlx_cuda::Recurrence p, __grid_constant__ const mlx_cuda::Prepared to) { \
    mlx_cuda::chunk_prepare<mlx_cuda::types::dtype, Delta>(p, to);                                          \
  }
#define MLX_CUDA_CHUNK_SCAN(name, dtype, Delta)                                                               \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kChunkThreads)                                       \
      name(__grid_constant__ const mlx_cuda::Recurrence p, __grid_constant__ const mlx_cuda::Prepared from) { \
    mlx_cuda::chunk_scan<mlx_cuda::types::dtype, Delta, false>(blockIdx.x, p, from, {});                      \
  }
MLX_CUDA_CHUNKED_KERNELS(MLX_CUDA_CHUNK_PREPARE, MLX_CUDA_CHUNK_SCAN)
