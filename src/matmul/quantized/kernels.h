// Which kernels of quantized weights there are: device code instantiates these tables, and the host chooses from them.
#pragma once

#include "matmul/quantized/formats.h"

// dequantize.cu. EACH(name, dtype, format).
#define MLX_CUDA_DEQUANTIZE_KERNELS(EACH) MLX_CUDA_EACH_FORMAT(MLX_CUDA_DEQUANTIZE_OF_FORMAT, EACH)
#define MLX_CUDA_DEQUANTIZE_OF_FORMAT(format, EACH)    \
  EACH(dequantize_##format##_float32, float32, format) \
  EACH(dequantize_##format##_float16, float16, format) \
  EACH(dequantize_##format##_bfloat16, bfloat16, format)

// grouped_quantized_sm90.cu. EACH(name, dtype, format).
#define MLX_CUDA_GROUPED_QUANTIZED_KERNELS(EACH) MLX_CUDA_EACH_FORMAT(MLX_CUDA_GROUPED_QUANTIZED_OF_FORMAT, EACH)
#define MLX_CUDA_GROUPED_QUANTIZED_OF_FORMAT(format, EACH) \
  EACH(grouped_##format##_bfloat16, bfloat16, format) EACH(grouped_##format##_float16, float16, format)

// quantized_moe_sm90.cu. EACH(name, dtype, format); other bits have quantized_small_m.cu.
#define MLX_CUDA_MOE_KERNELS(EACH)      \
  MLX_CUDA_MOE_OF_FORMAT(EACH, affine2) \
  MLX_CUDA_MOE_OF_FORMAT(EACH, affine4) \
  MLX_CUDA_MOE_OF_FORMAT(EACH, affine8) \
  MLX_CUDA_MOE_OF_FORMAT(EACH, mxfp4)   \
  MLX_CUDA_MOE_OF_FORMAT(EACH, mxfp8)   \
  MLX_CUDA_MOE_OF_FORMAT(EACH, nvfp4)
#define MLX_CUDA_MOE_OF_FORMAT(EACH, format) \
  EACH(quantized_moe_##format##_float16, float16, format) EACH(quantized_moe_##format##_bfloat16, bfloat16, format)

// quantized_plain.cu. TRANSPOSED and PLAIN(name, dtype, format, rows of x); the last for rows of w that are no whole number of
// quantized_small_m.cu's chunks.
#define MLX_CUDA_PLAIN_KERNELS(TRANSPOSED, PLAIN)                     \
  MLX_CUDA_EACH_FORMAT(MLX_CUDA_PLAIN_OF_FORMAT, TRANSPOSED, PLAIN)   \
  TRANSPOSED(quantized_transposed_nvfp4_float16_4, float16, nvfp4, 4) \
  TRANSPOSED(quantized_transposed_nvfp4_bfloat16_4, bfloat16, nvfp4, 4)
#define MLX_CUDA_PLAIN_OF_FORMAT(format, TRANSPOSED, PLAIN)                 \
  TRANSPOSED(quantized_transposed_##format##_float32_1, float32, format, 1) \
  TRANSPOSED(quantized_transposed_##format##_float32_4, float32, format, 4) \
  PLAIN(quantized_plain_##format##_float32_4, float32, format, 4)           \
  PLAIN(quantized_plain_##format##_float16_4, float16, format, 4)           \
  PLAIN(quantized_plain_##format##_bfloat16_4, bfloat16, format, 4)
// And EACH(name, dtype).
#define MLX_CUDA_QUANTIZED_MERGE_KERNELS(EACH) \
  EACH(quantized_merge_float32, float32) EACH(quantized_merge_float16, float16) EACH(quantized_merge_bfloat16, bfloat16)

// quantized_small_m.cu. EACH(name, dtype, format, tiles of 8 rows). NOT_SM90's are not compiled for Hopper, which uses
// quantized_sm90.cu for more rows, and for 2, 3, 5 and 6 bits sooner.
#define MLX_CUDA_SMALL_M_KERNELS(EACH, NOT_SM90)                \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, NOT_SM90, NOT_SM90, affine2) \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, NOT_SM90, NOT_SM90, affine3) \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, EACH, NOT_SM90, affine4)     \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, NOT_SM90, NOT_SM90, affine5) \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, NOT_SM90, NOT_SM90, affine6) \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, EACH, NOT_SM90, affine8)     \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, EACH, NOT_SM90, mxfp4)       \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, EACH, NOT_SM90, mxfp8)       \
  MLX_CUDA_SMALL_M_OF_FORMAT(EACH, EACH, NOT_SM90, nvfp4)
#define MLX_CUDA_SMALL_M_OF_FORMAT(ONE, TWO, FOUR, format) \
  MLX_CUDA_SMALL_M_OF_TILES(ONE, format, 1) MLX_CUDA_SMALL_M_OF_TILES(TWO, format, 2) MLX_CUDA_SMALL_M_OF_TILES(FOUR, format, 4)
#define MLX_CUDA_SMALL_M_OF_TILES(EACH, format, tiles)                       \
  EACH(quantized_small_m_##format##_float16_##tiles, float16, format, tiles) \
  EACH(quantized_small_m_##format##_bfloat16_##tiles, bfloat16, format, tiles)

// quantized_sm90.cu. ORDER(name, format), which puts x in order, and EACH(name, dtype, format, rows of x).
#define MLX_CUDA_QUANTIZED_SM90_KERNELS(ORDER, EACH) MLX_CUDA_EACH_FORMAT(MLX_CUDA_QUANTIZED_SM90_OF_FORMAT, ORDER, EACH)
#define MLX_CUDA_QUANTIZED_SM90_OF_FORMAT(format, ORDER, EACH) \
  ORDER(quantized_sm90_order_##format, format)                 \
  MLX_CUDA_QUANTIZED_SM90_OF_DTYPE(EACH, format, float16)      \
  MLX_CUDA_QUANTIZED_SM90_OF_DTYPE(EACH, format, bfloat16)
#define MLX_CUDA_QUANTIZED_SM90_OF_DTYPE(EACH, format, dtype)     \
  EACH(quantized_sm90_##format##_##dtype##_32, dtype, format, 32) \
  EACH(quantized_sm90_##format##_##dtype##_64, dtype, format, 64) \
  EACH(quantized_sm90_##format##_##dtype##_128, dtype, format, 128)
