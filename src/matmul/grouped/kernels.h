// Which grouped GEMM kernels there are: device code instantiates these tables, and the host chooses from them.
#pragma once

// grouped.cu. EACH(name, dtype, transposed) and GRADIENT(name, dtype).
#define MLX_CUDA_GROUPED_KERNELS(EACH, GRADIENT) \
  MLX_CUDA_GROUPED_OF_DTYPE(EACH, GRADIENT, bfloat16) MLX_CUDA_GROUPED_OF_DTYPE(EACH, GRADIENT, float16)
#define MLX_CUDA_GROUPED_OF_DTYPE(EACH, GRADIENT, dtype) \
  EACH(grouped_##dtype, dtype, true)                     \
  EACH(grouped_##dtype##_not_transposed, dtype, false)   \
  GRADIENT(grouped_gradient_##dtype, dtype)

// grouped_sm90.cu: of its tiles, the widest first, USE(columns, stages, ...), and EACH(name, dtype, columns, stages, transposed).
#define MLX_CUDA_GROUPED_SM90_TILES(USE, ...) USE(256, 4, __VA_ARGS__) USE(128, 6, __VA_ARGS__) USE(64, 8, __VA_ARGS__)
#define MLX_CUDA_GROUPED_SM90_KERNELS(EACH)                                  \
  MLX_CUDA_GROUPED_SM90_TILES(MLX_CUDA_GROUPED_SM90_OF_TILE, EACH, bfloat16) \
  MLX_CUDA_GROUPED_SM90_TILES(MLX_CUDA_GROUPED_SM90_OF_TILE, EACH, float16)
#define MLX_CUDA_GROUPED_SM90_OF_TILE(COLUMNS, STAGES, EACH, dtype) \
  EACH(grouped_##dtype##_##COLUMNS, dtype, COLUMNS, STAGES, true)   \
  EACH(grouped_##dtype##_##COLUMNS##_not_transposed, dtype, COLUMNS, STAGES, false)

// grouped_gradient_sm90.cu, and of gather.cu. EACH(name, dtype).
#define MLX_CUDA_GROUPED_GRADIENT_KERNELS(EACH) EACH(grouped_gradient_bfloat16, bfloat16) EACH(grouped_gradient_float16, float16)
#define MLX_CUDA_GATHER_MV_KERNELS(EACH) EACH(gather_mv_bfloat16, bfloat16) EACH(gather_mv_float16, float16)
