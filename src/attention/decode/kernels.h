// Which kernels of attention for few queries there are: device code instantiates these tables, and the host chooses from them.
#pragma once

namespace mlx_cuda {

// The layout of the keys of decode.cu.
enum class Keys {
  plain,   // in one piece
  even,    // and the same ones in all units, without a mask: these kernels begin sooner
  masked,  // and a bool mask of one row hides some: tiles that it hides are never read
  paged,
};

// decode.cu. EACH(name, dtype, width, team, keys): for rows that one warp holds, or for more; MERGE(name, dtype).
#define MLX_CUDA_DECODE_KERNELS(EACH, MERGE)     \
  MLX_CUDA_DECODE_OF_DTYPE(EACH, MERGE, float16) \
  MLX_CUDA_DECODE_OF_DTYPE(EACH, MERGE, bfloat16)
#define MLX_CUDA_DECODE_OF_DTYPE(EACH, MERGE, dtype)                           \
  MLX_CUDA_DECODE_OF_WIDTH(EACH, dtype, 64)                                    \
  MLX_CUDA_DECODE_OF_WIDTH(EACH, dtype, 128)                                   \
  MLX_CUDA_DECODE_OF_WIDTH(EACH, dtype, 256)                                   \
  EACH(decode_##dtype##_256_masked, dtype, 256, false, mlx_cuda::Keys::masked) \
  MERGE(decode_##dtype##_merge, dtype)
#define MLX_CUDA_DECODE_OF_WIDTH(EACH, dtype, D)                             \
  EACH(decode_##dtype##_##D, dtype, D, false, mlx_cuda::Keys::plain)         \
  EACH(decode_##dtype##_##D##_even, dtype, D, false, mlx_cuda::Keys::even)   \
  EACH(decode_##dtype##_##D##_paged, dtype, D, false, mlx_cuda::Keys::paged) \
  EACH(decode_##dtype##_##D##_rows, dtype, D, true, mlx_cuda::Keys::plain)   \
  EACH(decode_##dtype##_##D##_rows_paged, dtype, D, true, mlx_cuda::Keys::paged)

// decode_direct.cu. EACH(name, dtype, width, masked).
#define MLX_CUDA_DIRECT_KERNELS(EACH) MLX_CUDA_DIRECT_OF_DTYPE(EACH, float16) MLX_CUDA_DIRECT_OF_DTYPE(EACH, bfloat16)
#define MLX_CUDA_DIRECT_OF_DTYPE(EACH, dtype)       \
  EACH(direct_##dtype##_64, dtype, 64, false)       \
  EACH(direct_##dtype##_64_masked, dtype, 64, true) \
  EACH(direct_##dtype##_128, dtype, 128, false)     \
  EACH(direct_##dtype##_128_masked, dtype, 128, true)

// decode_sm90.cu. EACH(name, dtype, width).
#define MLX_CUDA_DECODE_SM90_KERNELS(EACH)      \
  EACH(decode_bfloat16_64_rows, bfloat16, 64)   \
  EACH(decode_bfloat16_128_rows, bfloat16, 128) \
  EACH(decode_float16_64_rows, float16, 64)     \
  EACH(decode_float16_128_rows, float16, 128)

// decode_wide.cu. EACH(name, dtype, rows, values are columns of the keys).
#define MLX_CUDA_WIDE_KERNELS(EACH) MLX_CUDA_WIDE_OF_DTYPE(EACH, float16) MLX_CUDA_WIDE_OF_DTYPE(EACH, bfloat16)
#define MLX_CUDA_WIDE_OF_DTYPE(EACH, dtype) \
  MLX_CUDA_WIDE_OF_ROWS(EACH, dtype, 16)    \
  MLX_CUDA_WIDE_OF_ROWS(EACH, dtype, 32)    \
  MLX_CUDA_WIDE_OF_ROWS(EACH, dtype, 64)
#define MLX_CUDA_WIDE_OF_ROWS(EACH, dtype, ROWS)  \
  EACH(wide_##dtype##_##ROWS, dtype, ROWS, false) \
  EACH(wide_##dtype##_##ROWS##_shared, dtype, ROWS, true)

// decode_quantized.cu. EACH(name, dtype, width, floats, bits); float16 holds few of the scales of floats.
#define MLX_CUDA_DECODE_QUANTIZED_KERNELS(EACH)                     \
  MLX_CUDA_DECODE_QUANTIZED_OF_DTYPE(EACH, float16, affine, false)  \
  MLX_CUDA_DECODE_QUANTIZED_OF_DTYPE(EACH, bfloat16, affine, false) \
  MLX_CUDA_DECODE_QUANTIZED_OF_DTYPE(EACH, bfloat16, floats, true)
#define MLX_CUDA_DECODE_QUANTIZED_OF_DTYPE(EACH, dtype, format, floats) \
  EACH(quantized_##dtype##_128_##format##4, dtype, 128, floats, 4)      \
  EACH(quantized_##dtype##_128_##format##8, dtype, 128, floats, 8)      \
  EACH(quantized_##dtype##_256_##format##4, dtype, 256, floats, 4)      \
  EACH(quantized_##dtype##_256_##format##8, dtype, 256, floats, 8)

}  // namespace mlx_cuda
