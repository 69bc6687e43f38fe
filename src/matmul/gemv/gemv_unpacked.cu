// The same for weights that are unpacked to 16-bit numbers first, of experts or not.
#include "matmul/gemv/gemv.cuh"
#include "matmul/gemv/unpacked_rows.cuh"

#define MLX_CUDA_GEMV_UNPACKED(name, Format)                                  \
  MLX_CUDA_GEMV(name##_float16, mlx_cuda::UnpackedRows<__half, Format>, true) \
  MLX_CUDA_GEMV(name##_bfloat16, mlx_cuda::UnpackedRows<__nv_bfloat16, Format>, true)

MLX_CUDA_GEMV_UNPACKED(affine2, mlx_cuda::Affine<2>)
MLX_CUDA_GEMV_UNPACKED(affine3, mlx_cuda::Affine<3>)
MLX_CUDA_GEMV_UNPACKED(affine5, mlx_cuda::Affine<5>)
MLX_CUDA_GEMV_UNPACKED(affine6, mlx_cuda::Affine<6>)
MLX_CUDA_GEMV_UNPACKED(mxfp4, mlx_cuda::Mxfp4)
MLX_CUDA_GEMV_UNPACKED(mxfp8, mlx_cuda::Mxfp8)
MLX_CUDA_GEMV_UNPACKED(nvfp4, mlx_cuda::Nvfp4)
