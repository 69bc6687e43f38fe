// Products of a token with the matrices of some experts (product.cuh).
#include "decoding/product.cuh"

#define MLX_CUDA_EXPERTS(dtype, T, bits, group) \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype##_1, mlx_cuda::IntegerRows<T, bits, group, 1>, true)
#define MLX_CUDA_EXPERTS_ALL(dtype, T) \
  MLX_CUDA_EXPERTS(dtype, T, 4, 32)    \
  MLX_CUDA_EXPERTS(dtype, T, 4, 64)    \
  MLX_CUDA_EXPERTS(dtype, T, 4, 128)   \
  MLX_CUDA_EXPERTS(dtype, T, 8, 32)    \
  MLX_CUDA_EXPERTS(dtype, T, 8, 64)    \
  MLX_CUDA_EXPERTS(dtype, T, 8, 128)

MLX_CUDA_EXPERTS_ALL(float16, __half)
MLX_CUDA_EXPERTS_ALL(bfloat16, __nv_bfloat16)
