// Parameters of the kernels that quantize to FP8, and how they divide their work.
#pragma once

namespace mlx_cuda {

// A matrix whose rows have any stride, in elements.
template <typename T>
struct Fp8Matrix {
  const T* data;
  long long rows, columns, stride;
};

struct Fp8Shape {
  static constexpr int kThreads = 256;
  static constexpr int kBlock = 128;    // of a row, or a square of a matrix, that shares a scale
  static constexpr int kKept = 4;       // vectors of a row that a thread keeps in registers
  static constexpr int kBlockRows = 4;  // that lanes take of a column of blocks, as vectors
  static constexpr int kTogether = 4;   // vectors that a thread reads at once of a whole tensor
};

}  // namespace mlx_cuda

// fp8.cu. EACH(name, dtype, whether a thread has 16 bytes at a time, kernel).
#define MLX_CUDA_FP8_KERNELS(EACH)              \
  MLX_CUDA_FP8_OF(EACH, float32, vector, true)  \
  MLX_CUDA_FP8_OF(EACH, float16, vector, true)  \
  MLX_CUDA_FP8_OF(EACH, bfloat16, vector, true) \
  MLX_CUDA_FP8_OF(EACH, float32, scalar, false) \
  MLX_CUDA_FP8_OF(EACH, float16, scalar, false) \
  MLX_CUDA_FP8_OF(EACH, bfloat16, scalar, false)
#define MLX_CUDA_FP8_OF(EACH, dtype, width, VECTOR)                     \
  EACH(fp8_rows_##dtype##_##width, dtype, VECTOR, fp8_rows)             \
  EACH(fp8_short_rows_##dtype##_##width, dtype, VECTOR, fp8_short_rows) \
  EACH(fp8_blocks_##dtype##_##width, dtype, VECTOR, fp8_blocks)         \
  EACH(fp8_tiles_##dtype##_##width, dtype, VECTOR, fp8_tiles)           \
  EACH(fp8_largest_##dtype##_##width, dtype, VECTOR, fp8_largest)       \
  EACH(fp8_tensor_##dtype##_##width, dtype, VECTOR, fp8_tensor)
