// MoE GEMVs of one token (gemv.cuh).
#include "device/types.cuh"
#include "matmul/gemv/gemv.cuh"
#include "matmul/gemv/kernels.h"

#define MLX_CUDA_GEMV_PLAIN(name, dtype) MLX_CUDA_GEMV(name, mlx_cuda::PlainRows<mlx_cuda::types::dtype>, true)
#define MLX_CUDA_GEMV_INTEGERS(name, dtype, bits, group) \
  MLX_CUDA_GEMV(name, mlx_cuda::IntegerRows<mlx_cuda::types::dtype, bits, group>, true)
MLX_CUDA_GEMV_KERNELS(MLX_CUDA_GEMV_PLAIN, MLX_CUDA_GEMV_INTEGERS)
