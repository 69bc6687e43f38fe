// Products of a step's few rows (product.cuh), for 16-bit weights and those that are multiplied as integers.
#include "decoding/product.cuh"

#define MLX_CUDA_ROW_PACKED(dtype, T, bits, group) \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype, mlx_cuda::IntegerRows<T, bits, group>, false)
#define MLX_CUDA_ROW_ALL(dtype, T)                           \
  MLX_CUDA_ROW(plain_##dtype, mlx_cuda::PlainRows<T>, false) \
  MLX_CUDA_ROW_FORMS(MLX_CUDA_ROW_PACKED, dtype, T)

MLX_CUDA_ROW_ALL(float16, __half)
MLX_CUDA_ROW_ALL(bfloat16, __nv_bfloat16)
