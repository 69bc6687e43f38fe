// How the kernel of rows and the quantised experts that they name is called, and how it divides its shared memory.
#pragma once

#include "matmul/quantized/skinny_params.h"

namespace mlx_cuda {

// The pairs of a batch, as many as a product has columns: their rows of x, where their results begin if the batch's first tile has
// that number, and how many there are.
struct MoeBatch {
  unsigned x_rows[8];
  unsigned results[8];
  int rows;
  int unused[3];
};

// A product is one row of x times one expert: a pair. columns is a multiple of a tile's rows, inner of a slice, and scales are
// wide.
struct MoeParams : QuantizedProduct {
  int row_scales;  // bytes of a row's scales
  int pairs;       // kMostPairs at most
  int batch_rows;  // most pairs of one expert that are columns of one product, a batch

  static constexpr int kMostPairs = 64;
  static constexpr int kBlocks = 4;                       // on a multiprocessor
  static constexpr int kMostWarps = 4;                    // of a block: they have different slices
  static constexpr int kScaleBytes = 2048;                // of a warp: those of two slices
  static constexpr int kTableBytes = 2 * kMostPairs * 4;  // of a warp: the batches of the call

  // Of a block: x, and for each warp its scales, two tiles' results, its table of batches and the pairs of one.
  constexpr int shared_bytes(int warps) const {
    const int warp_bytes =
        kScaleBytes + 2 * batch_rows * SkinnyTile::kResultStride * 4 + kTableBytes + static_cast<int>(sizeof(MoeBatch));
    return inner * 2 * batch_rows + warps * warp_bytes;
  }
};

}  // namespace mlx_cuda
