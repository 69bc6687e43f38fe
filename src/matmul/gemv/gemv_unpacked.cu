// The same for weights that are dequantized to 16-bit numbers first, MoE or not.
#include "device/types.cuh"
#include "matmul/gemv/gemv.cuh"
#include "matmul/gemv/kernels.h"
#include "matmul/gemv/unpacked_rows.cuh"

#define MLX_CUDA_GEMV_UNPACKED(name, dtype, format) \
  MLX_CUDA_GEMV(name, mlx_cuda::UnpackedRows<mlx_cuda::types::dtype, mlx_cuda::formats::format, false>, true)
MLX_CUDA_GEMV_UNPACKED_KERNELS(MLX_CUDA_GEMV_UNPACKED)
