// Products of a token with the matrices of some experts (product.cuh).
#include "decoding/product.cuh"

#define MLX_CUDA_EXPERTS(dtype, T, bits, group) \
  MLX_CUDA_ROW(affine##bits##_##group##_##dtype, mlx_cuda::IntegerRows<T, bits, group>, true)

MLX_CUDA_ROW(plain_float16, mlx_cuda::PlainRows<__half>, true)
MLX_CUDA_ROW(plain_bfloat16, mlx_cuda::PlainRows<__nv_bfloat16>, true)
MLX_CUDA_ROW_FORMS(MLX_CUDA_EXPERTS, float16, __half)
MLX_CUDA_ROW_FORMS(MLX_CUDA_EXPERTS, bfloat16, __nv_bfloat16)
