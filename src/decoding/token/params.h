// How a token's attention is divided: what its host code and its kernel both go by.
#pragma once

#include "attention/decode/params.h"
#include "attention/decode/traits.h"
#include "decoding/heads/params.h"

namespace mlx_cuda {

// Heads are made ready as `heads` says, but that queries stay on the chip; of `decode`, what says where keys and results are.
struct TokenParams {
  HeadsParams heads;
  DecodeParams decode;
  int rows;        // of a unit, at most: a kv head has
  int row_blocks;  // so many units
  int settled;     // whether all but the rows of the projections is there before the kernels before this one end
};

// A cluster of blocks shares the keys of a unit, and then the columns of its result.
struct TokenTraits {
  static constexpr int kParts = 8;  // blocks of a cluster
  static constexpr int kWarps = 8;  // of a block
  static constexpr int kSlices = kParts * kWarps;
  static constexpr int kSliceColumns = 16;
  static constexpr int kMostRows = 8;

  int width;  // head_dim rounded up: 64, 128 or 256

  constexpr int query_pitch() const {  // without bank conflicts
    return width + 32;
  }
  constexpr int query_bytes() const {
    return kMostRows * query_pitch() * 2;
  }
  // Queries, the token's key and value, and heads on their way.
  constexpr int part_bytes(int warps) const {
    return query_bytes() + 2 * width * 2 + warps * width * 4;
  }
  // The stride between the sums of adjacent slices, without bank conflicts.
  static constexpr int sums_pitch(int rows) {
    return rows * kSliceColumns + 4;
  }
  constexpr int column_slices() const {  // whose sums a block merges
    return (width / kSliceColumns + kParts - 1) / kParts;
  }
  constexpr int shared_bytes(int rows) const {
    return part_bytes(kWarps) + column_slices() * kSlices * sums_pitch(rows) * 4 + kSlices * rows * 8;
  }
};

}  // namespace mlx_cuda

// token_sm90.cu. EACH(name, dtype, width).
#define MLX_CUDA_TOKEN_KERNELS(EACH)      \
  EACH(token_float16_64, float16, 64)     \
  EACH(token_float16_128, float16, 128)   \
  EACH(token_float16_256, float16, 256)   \
  EACH(token_bfloat16_64, bfloat16, 64)   \
  EACH(token_bfloat16_128, bfloat16, 128) \
  EACH(token_bfloat16_256, bfloat16, 256)
