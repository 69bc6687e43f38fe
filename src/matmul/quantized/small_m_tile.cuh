// Tiles of 32 rows of w as the left operand of MMAs, a slice of 256 values of inner at a time.
//
// In a step of a slice each thread of a warp has adjacent values (a chunk) of four rows, directly from global memory. Any
// permutation of inner works as the k index as long as both operands agree: the values that a thread unpacks are its own part of
// the left operand, and x in shared memory is permuted to match.
#pragma once

#include "matmul/quantized/params.h"
#include "matmul/quantized/scales.cuh"

namespace mlx_cuda {

template <typename FormatOf, typename TypeOf>
struct SmallMSteps {
  using Format = FormatOf;
  using T = TypeOf;
  static constexpr int kBits = Format::kBits;
  static constexpr int kValues = kChunk<Format>;       // of a chunk
  static constexpr int kWords = kValues * kBits / 32;  // words of a chunk
  static constexpr int kStep = 4 * kValues;            // values of a row in a step, which four threads share
  static constexpr int kSteps = SmallMTile::kSlice / kStep;
  using Chunks = unsigned[4][kWords];  // of rows g, g + 8, g + 16, g + 24, where g is the lane / 4
};

// The address from which a thread reads x [inner / 128][rows][128], as x_place: one row of each 8. Every row is a column of its
// own in the results, so missing rows may have any values.
template <typename Steps>
class SmallMRow {
  using Format = typename Steps::Format;

 public:
  __device__ SmallMRow(const unsigned char* x, int rows, int lane)
      : pieces_{
            x + x_place<Format>(min(lane / 4, rows - 1), lane % 4 * (Steps::kValues / 8)),
            x + x_place<Format>(min(lane / 4, rows - 1), lane % 4 * (Steps::kValues / 8) + 1)} {}

  // Where a step of a slice of all rows begins.
  static __device__ int line(int rows, int slice, int step) {
    return (slice * 2 + step * Steps::kStep / 128) * rows * 256;
  }
  // The right operands of piece j of a chunk, of the row `eights` eights on.
  __device__ uint4 load(int line, int step, int j, int eights) const {
    const int turn = step * Steps::kStep % 128 / 32 + j / 2 * 2;
    return *reinterpret_cast<const uint4*>(pieces_[j % 2] + line + eights * 2048 + turn * 64);
  }

 private:
  const unsigned char* pieces_[2];
};

// 8 values of a row of x, piece `piece` of it, to where SmallMRow reads them; by whole warps, which take adjacent pieces.
template <typename Format>
__device__ inline void store_x(unsigned char* x, int rows, int row, int piece, const uint4& values) {
  *reinterpret_cast<uint4*>(x + piece / 16 * rows * 256 + x_place<Format>(row, piece % 16)) = order_pairs<Format>(values);
}

}  // namespace mlx_cuda
