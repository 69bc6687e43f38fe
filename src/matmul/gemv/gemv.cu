// Products of a step's few rows (gemv.cuh), for 16-bit weights and those that are multiplied as integers.
#include "matmul/gemv/gemv.cuh"

#define MLX_CUDA_GEMV_PACKED(dtype, T, bits, group) \
  MLX_CUDA_GEMV(affine##bits##_##group##_##dtype, mlx_cuda::IntegerRows<T, bits, group>, false)
#define MLX_CUDA_GEMV_ALL(dtype, T)                           \
  MLX_CUDA_GEMV(plain_##dtype, mlx_cuda::PlainRows<T>, false) \
  MLX_CUDA_GEMV_FORMS(MLX_CUDA_GEMV_PACKED, dtype, T)

MLX_CUDA_GEMV_ALL(float16, __half)
MLX_CUDA_GEMV_ALL(bfloat16, __nv_bfloat16)
