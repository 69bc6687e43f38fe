// What the kernel of pairs of rows and quantised experts takes by value; filled by matmul/quantized/moe.cpp.
#pragma once

namespace mlx_cuda {

// Out [pairs, columns]: rows of x times the transposed experts that the pairs name.
struct PairsParams {
  const void* x;            // rows
  const void* w;            // packed [experts, columns, inner]
  const void* scales;       // the same with a number for each group of the last
  const void* biases;       // the same, or null
  const unsigned* x_index;  // which row of x each pair takes, one after the last being the last; null: its own number
  const unsigned* w_index;  // which expert, likewise
  void* out;
  long long x_distance;      // elements from one row of x to the next
  long long w_distance;      // bytes from one expert to the next
  long long scale_distance;  // the same of scales and biases
  long long row_bytes;       // of w: from one of its rows to the next
  int matrices;              // rows of x
  int experts;
  int columns;      // a multiple of kTileRows
  int inner;        // a multiple of kSlice
  int row_scales;   // bytes of a row's scales
  int group_shift;  // log2 of a group's values
  int pairs;        // kMost at most
  int together;     // most pairs of one expert that are computed as columns of one product

  static constexpr int kTileRows = 32;
  static constexpr int kSlice = 256;
  static constexpr int kMost = 64;
  static constexpr int kBlocks = 4;               // on a multiprocessor
  static constexpr int kMostWarps = 4;            // of a block: they have different slices
  static constexpr int kScaleBytes = 2048;        // of a warp: those of two slices
  static constexpr int kTableBytes = 2 * 64 * 4;  // of a warp: its block's units
  static constexpr int kMemberBytes = 20 * 4;     // of a warp: the pairs of a unit
  static constexpr int kResultStride = kTileRows + 4;

  // Of a block: x, and for each warp its scales, two tiles' results, its table of units and the pairs of one.
  constexpr int shared_bytes(int warps) const {
    const int warp_bytes = kScaleBytes + 2 * together * kResultStride * 4 + kTableBytes + kMemberBytes;
    return inner * 2 * together + warps * warp_bytes;
  }
};

}  // namespace mlx_cuda
