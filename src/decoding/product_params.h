// How the products of a step's few rows are called, and how they divide their work.
#pragma once

namespace mlx_cuda {

// What becomes of the sums.
enum class RowEpilogue : int {
  none,
  add,     // plus another array
  swiglu,  // silu of the first part times the second
};

// One matrix of several that the same rows are multiplied by.
struct RowPart {
  const void* w;       // [columns, inner], 16-bit or packed
  const void* scales;  // [columns, groups], and
  const void* biases;  // likewise, of packed ones
  void* out;           // [rows, columns]
  int columns;
  int first_tile;      // of all tiles
};

// x is [rows, inner], of which each row may be normalised first: x / sqrt(mean(x^2) + eps) * norm.
struct RowProductParams {
  static constexpr int kMostParts = 3;
  static constexpr int kMostRows = 8;   // columns of a tensor core product
  static constexpr int kTileRows = 16;  // of w
  static constexpr int kMostWarps = 16;

  const void* x;
  const void* norm;  // [inner], or null
  const void* added;  // [rows, columns], or null
  float eps;
  int rows;
  int inner;
  int groups;       // of a row of w
  int group_shift;  // log2 of a group's values
  int parts;
  int tiles;
  RowEpilogue epilogue;
  RowPart part[kMostParts];

  // Values of a row that a thread has in 16 bytes, steps of four threads, and how many steps a warp has under way.
  static constexpr int values(int bits) {
    return 128 / bits;
  }
  static constexpr int ahead(int bits, int tiles) {
    return (bits == 16 ? 8 : 4) / tiles;
  }
};

}  // namespace mlx_cuda
