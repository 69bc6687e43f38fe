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
  int first_tile;  // of all tiles
};

// x is [rows, inner], of which each row may be normalised first: x / sqrt(mean(x^2) + eps) * norm.
struct RowProductParams {
  static constexpr int kMostParts = 3;
  static constexpr int kColumns = 8;     // of a tensor core product: rows of x, once for each scale of a step
  static constexpr int kTileRows = 16;   // of w
  static constexpr int kMostWarps = 10;  // of a block
  static constexpr int kBlocks = 2;      // of so many warps, that a multiprocessor holds at once
  static constexpr int kZeroBytes = 64;  // of shared memory, for columns that are no row's

  const void* x;
  const void* norm;   // [inner], or null
  const void* added;  // [rows, columns], or null
  float eps;
  int rows;
  int inner;
  int groups;       // of a row of w
  int scale_shift;  // log2 of how many steps share a scale
  int parts;
  int tiles;         // of all parts
  int block_tiles;   // of a block, 1 or 2, each with as many warps
  int warp_steps;    // of a tile's steps, each warp's, and
  int longer_warps;  // how many have one more: the first
  RowEpilogue epilogue;
  RowPart part[kMostParts];

  // Values of a row that a thread has in 16 bytes, those of the four threads of a step, and how many steps a warp has under way.
  static constexpr int values(int bits) {
    return 128 / bits;
  }
  static constexpr int step(int bits) {
    return 4 * values(bits);
  }
  static constexpr int ahead(int bits) {
    return bits == 16 ? 4 : 2;
  }

  // x as products read it, the sums of its units, and what the warps share at the end.
  constexpr int x_bytes() const {
    return (rows * inner * 2 + 15) / 16 * 16;
  }
  constexpr int units_bytes(int bits, int units) const {
    return bits == 16 ? 0 : (rows * (inner / step(bits) * units) * 4 + 15) / 16 * 16;
  }
  constexpr int shared_bytes(int bits, int units, int warps) const {
    return x_bytes() + kZeroBytes + units_bytes(bits, units) + warps * rows * (kTileRows + 1) * 4;
  }
};

}  // namespace mlx_cuda
