// The same for more rows of x, not MoE.
#include "device/types.cuh"
#include "matmul/gemv/gemv.cuh"
#include "matmul/gemv/kernels.h"
#include "matmul/gemv/unpacked_rows.cuh"

#define MLX_CUDA_GEMV_MANY(name, dtype) \
  MLX_CUDA_GEMV(name, mlx_cuda::UnpackedRows<mlx_cuda::types::dtype, mlx_cuda::formats::affine4, true>, false)
MLX_CUDA_GEMV_MANY_KERNELS(MLX_CUDA_GEMV_MANY)
