// What the kernels that quantise to FP8 are called with, and how they divide their work.
#pragma once

namespace mlx_cuda {

// A matrix whose rows may lie any distance apart, in elements.
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
