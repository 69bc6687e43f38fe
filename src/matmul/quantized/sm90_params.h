// How the kernel for some rows of x on Hopper is called, and how it divides its work and its shared memory.
#pragma once

#include "matmul/quantized/params.h"

namespace mlx_cuda {

// out = x @ w^T; `partial` is [products, row blocks, tiles of columns, splits, block rows, columns of a tile].
struct QuantizedSm90Params : SplitProduct {
  void* ordered;      // x as products read it
  unsigned* arrived;  // splits that have written theirs, of each result of a block; unused with one
  int results;        // of blocks
};

struct QuantizedSm90 {
  static constexpr int kConsumers = 2;               // warpgroups, each with 64 rows of w
  static constexpr int kTileRows = kConsumers * 64;  // of w, of a block
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kPart = 128;        // of inner: what is copied and multiplied at once
  static constexpr int kRange = 256;       // of inner: what blocks share begins at multiples of this
  static constexpr int kScaleParts = 4;    // whose scales a warp loads at once
  static constexpr int kScaleStride = 20;  // words of a row's scales of these (16 at most): 8 rows in different banks
  static constexpr int kScaleBytes = 16 * kScaleStride * 4;  // of a warp: 16 rows of w
  static constexpr int kOrderWarps = 4;                      // of a block that puts x in order, each with 8 rows of a part

  int block_rows;

  constexpr int stages() const {  // parts of x in shared memory
    return block_rows == 128 ? 4 : 6;
  }
  constexpr int depth() const {  // parts of w
    return block_rows == 128 ? 5 : 6;
  }
  constexpr int stage_bytes() const {
    return block_rows * kPart * 2;
  }
  static constexpr int slot_bytes(int bits) {
    return kTileRows * kPart / 8 * bits;
  }
  constexpr int shared_bytes(int bits) const {
    return 1024 + stages() * (stage_bytes() + 16) + depth() * slot_bytes(bits) + kConsumers * 4 * kScaleBytes;
  }
};

}  // namespace mlx_cuda
