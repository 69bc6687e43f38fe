// Which GEMV kernels there are: device code instantiates these tables, and the host chooses from them.
#pragma once

#include "matmul/quantized/formats.h"

// gemv.cu and gemv_moe.cu, whose rows name experts. PLAIN(name, dtype), of 16-bit weights, and INTEGERS(name, dtype, format,
// group).
#define MLX_CUDA_GEMV_KERNELS(PLAIN, INTEGERS) \
  PLAIN(gemv_plain_float16, float16)           \
  MLX_CUDA_GEMV_OF_DTYPE(INTEGERS, float16)    \
  PLAIN(gemv_plain_bfloat16, bfloat16)         \
  MLX_CUDA_GEMV_OF_DTYPE(INTEGERS, bfloat16)
#define MLX_CUDA_GEMV_OF_DTYPE(EACH, dtype)     \
  EACH(gemv_affine4_32_##dtype, dtype, 4, 32)   \
  EACH(gemv_affine4_64_##dtype, dtype, 4, 64)   \
  EACH(gemv_affine4_128_##dtype, dtype, 4, 128) \
  EACH(gemv_affine8_32_##dtype, dtype, 8, 32)   \
  EACH(gemv_affine8_64_##dtype, dtype, 8, 64)   \
  EACH(gemv_affine8_128_##dtype, dtype, 8, 128)

// gemv_many_sm90.cu. EACH(name, dtype).
#define MLX_CUDA_GEMV_MANY_KERNELS(EACH) EACH(gemv_many_affine4_float16, float16) EACH(gemv_many_affine4_bfloat16, bfloat16)

// gemv_unpacked.cu, MoE or not. EACH(name, dtype, format).
#define MLX_CUDA_GEMV_UNPACKED_KERNELS(EACH) \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, affine2)   \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, affine3)   \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, affine5)   \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, affine6)   \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, mxfp4)     \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, mxfp8)     \
  MLX_CUDA_GEMV_UNPACKED_OF(EACH, nvfp4)
#define MLX_CUDA_GEMV_UNPACKED_OF(EACH, format) \
  EACH(gemv_##format##_float16, float16, format) EACH(gemv_##format##_bfloat16, bfloat16, format)
