// Products of a step's few rows (product.cuh), for each form of w and as many columns as rows need.
#include "decoding/product.cuh"

#define MLX_CUDA_ROW_PACKED(dtype, T, bits, group)                                                    \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype##_1, mlx_cuda::IntegerRows<T, bits, group, 1>, false) \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype##_2, mlx_cuda::IntegerRows<T, bits, group, 2>, false) \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype##_4, mlx_cuda::IntegerRows<T, bits, group, 4>, false)
#define MLX_CUDA_ROW_ALL(dtype, T)                           \
  MLX_CUDA_ROW(plain_##dtype, mlx_cuda::PlainRows<T>, false) \
  MLX_CUDA_ROW_FORMS(MLX_CUDA_ROW_PACKED, dtype, T)

MLX_CUDA_ROW_ALL(float16, __half)
MLX_CUDA_ROW_ALL(bfloat16, __nv_bfloat16)
