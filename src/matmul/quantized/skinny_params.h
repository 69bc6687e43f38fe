// How the kernels for few rows of x are called, and how they divide their work and their shared memory.
#pragma once

#include "matmul/quantized/params.h"

namespace mlx_cuda {

// What a warp of the tensor core kernels computes at a time (quantized_skinny.cu, quantized_moe_sm90.cu).
struct SkinnyTile {
  static constexpr int kRows = 32;                              // of w
  static constexpr int kSlice = QuantizedProduct::kScaleRange;  // of inner
  static constexpr int kScaleStride = 12;                       // words of a row's scales (8 at most): 8 rows in different banks
  static constexpr int kScaleBytes = kRows * kScaleStride * 4;  // of a warp
  static constexpr int kResultStride = kRows + 4;               // floats of a row of x
};

struct SkinnyParams : SplitProduct {
  int row_warps;    // warps of a block that have different rows of w
  int inner_warps;  // warps that share rows of w and have different slices

  static constexpr int kMostThreads = 512;  // of a block
  static constexpr int kMostRowWarps = 8;   // each has a barrier, of which a block has 15 beside its own
  static constexpr int kChunk = 32;         // values, of which inner is a multiple

  // x and, for each warp, its scales and its sums of `rows` rows; x has `x_rows` of them.
  constexpr int shared_bytes(int rows, int x_rows) const {
    return range * 2 * x_rows + row_warps * inner_warps * warp_bytes(rows);
  }
  static constexpr int warp_bytes(int rows) {
    return SkinnyTile::kScaleBytes + rows * SkinnyTile::kResultStride * 4;
  }
};

// The kernels without tensor cores (quantized_plain.cu).
struct PlainKernel {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = 4;                                   // of x, of a block
  static constexpr int kColumns = 32 * 8;                           // of the result, of a block
  static constexpr int kWarpColumns = 4;                            // likewise of a warp with w transposed
  static constexpr int kTransposedColumns = kWarps * kWarpColumns;  // and of a block
};

}  // namespace mlx_cuda
