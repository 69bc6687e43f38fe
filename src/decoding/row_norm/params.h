// How a norm is called with what alone reads it.
#pragma once

namespace mlx_cuda {

// out = added + x / sqrt(mean(x^2) + eps) * norm * scale, of each row.
struct RowNormParams {
  static constexpr int kPiece = 8;  // values of a thread
  static constexpr int kMostThreads = 1024;

  const void* x;      // [rows, inner]
  const void* norm;   // [inner], or null
  const void* scale;  // one value, or null
  const void* added;  // [rows, inner], or null
  void* out;          // [rows, inner]
  int inner;
  float eps;
};

}  // namespace mlx_cuda

// row_norm.cu. EACH(name, dtype).
#define MLX_CUDA_ROW_NORM_KERNELS(EACH) EACH(row_norm_float16, float16) EACH(row_norm_bfloat16, bfloat16)
