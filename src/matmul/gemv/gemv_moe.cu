// Products of a token with the matrices of some experts (gemv.cuh).
#include "matmul/gemv/gemv.cuh"

#define MLX_CUDA_GEMV_MOE(dtype, T, bits, group) \
  MLX_CUDA_GEMV(affine##bits##_##group##_##dtype, mlx_cuda::IntegerRows<T, bits, group>, true)

MLX_CUDA_GEMV(plain_float16, mlx_cuda::PlainRows<__half>, true)
MLX_CUDA_GEMV(plain_bfloat16, mlx_cuda::PlainRows<__nv_bfloat16>, true)
MLX_CUDA_GEMV_FORMS(MLX_CUDA_GEMV_MOE, float16, __half)
MLX_CUDA_GEMV_FORMS(MLX_CUDA_GEMV_MOE, bfloat16, __nv_bfloat16)
