// The same for weights that are unpacked to 16-bit numbers first, of experts or not.
#include "decoding/product.cuh"
#include "decoding/unpacked_rows.cuh"

#define MLX_CUDA_UNPACKED(name, Format)                                      \
  MLX_CUDA_ROW(name##_float16, mlx_cuda::UnpackedRows<__half, Format>, true) \
  MLX_CUDA_ROW(name##_bfloat16, mlx_cuda::UnpackedRows<__nv_bfloat16, Format>, true)

MLX_CUDA_UNPACKED(affine2, mlx_cuda::Affine<2>)
MLX_CUDA_UNPACKED(affine3, mlx_cuda::Affine<3>)
MLX_CUDA_UNPACKED(affine5, mlx_cuda::Affine<5>)
MLX_CUDA_UNPACKED(affine6, mlx_cuda::Affine<6>)
MLX_CUDA_UNPACKED(mxfp4, mlx_cuda::Mxfp4)
MLX_CUDA_UNPACKED(mxfp8, mlx_cuda::Mxfp8)
MLX_CUDA_UNPACKED(nvfp4, mlx_cuda::Nvfp4)
