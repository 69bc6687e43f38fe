// How a norm before a residual is called.
#pragma once

namespace mlx_cuda {

// out = added + x / sqrt(mean(x^2) + eps) * norm, of each row.
struct NormAddParams {
  static constexpr int kPiece = 8;  // values of a thread
  static constexpr int kMostThreads = 1024;

  const void* x;      // [rows, inner]
  const void* norm;   // [inner]
  const void* added;  // [rows, inner]
  void* out;          // [rows, inner]
  int inner;
  float eps;
};

}  // namespace mlx_cuda
