// The tile scheduler of grouped GEMMs on the GPU, from offsets that the host does not know, and the output of tiles.
#pragma once

#include "matmul/grouped/params.h"

#include "device/mma.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// An offset, clamped to the number of rows; 0 without offsets.
__device__ inline int group_bound(const int* offsets, int at, int rows) {
  return at < 0 ? 0 : min(max(offsets[at], 0), rows);
}

struct GroupTile {
  int weights;  // number of the matrix; -1: rows of no group
  int row0;
  int row_end;  // of the group
  int column0;
};

// Numbers the tiles of all groups, one group after another. Every warp of a block has its own. Rows before the first group and
// after the last count as groups as well.
template <int TileRows, int TileColumns>
class GroupWalk {
 public:
  __device__ explicit GroupWalk(const GroupedParams& p) : p_(p), column_tiles_((p.columns + TileColumns - 1) / TileColumns) {}

  // Whether there is a tile of this number. All lanes of the warp call it together, for ascending numbers.
  __device__ bool find(int index, GroupTile& tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    while (chunk_ < p_.count + 2) {
      const int begin = bound(chunk_ + lane);
      const int end = bound(chunk_ + lane + 1);
      const int row_tiles = (max(end - begin, 0) + TileRows - 1) / TileRows;
      int upto = row_tiles * column_tiles_;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, upto, distance);
        upto += lane >= distance ? before : 0;
      }
      const unsigned later = __ballot_sync(~0u, index < before_ + upto);
      if (later) {
        const int owner = __ffs(static_cast<int>(later)) - 1;
        const int tiles = __shfl_sync(~0u, row_tiles, owner);
        const int first = before_ + __shfl_sync(~0u, upto, owner) - tiles * column_tiles_;
        const int group = chunk_ + owner - 1;
        tile.weights = group >= 0 && group < p_.count ? group : -1;
        tile.row_end = __shfl_sync(~0u, end, owner);
        place(index - first, tiles, __shfl_sync(~0u, begin, owner), tile);
        return true;
      }
      before_ += __shfl_sync(~0u, upto, 31);
      chunk_ += 32;
    }
    return false;
  }

 private:
  // Where piece i of a launch begins: piece 0 is what comes before the groups, the last one what follows them.
  __device__ int bound(int i) const {
    if (i == 0 && p_.first == 0) {
      return 0;
    }
    if (i >= p_.count + 2 && p_.first + p_.count == p_.groups) {
      return p_.rows;
    }
    return group_bound(p_.offsets, p_.first + min(max(i, 1), p_.count + 1) - 2 + p_.has_begin, p_.rows);
  }

  // Tiles that run at the same time share rows and weights in the L2 cache: bands of 16 tiles of rows, column by column.
  __device__ void place(int index, int row_tiles, int begin, GroupTile& tile) const {
    constexpr int kBand = 16;
    const int band = index / (kBand * column_tiles_) * kBand;
    const int in_band = min(kBand, row_tiles - band);
    const int rest = index - band * column_tiles_;
    tile.row0 = begin + (band + rest % in_band) * TileRows;
    tile.column0 = rest / in_band * TileColumns;
  }

  const GroupedParams& p_;
  int column_tiles_;
  int chunk_ = 0;   // first of the 32 pieces that are looked at
  int before_ = 0;  // tiles before them
};

// Of 32 adjacent columns of a row that a quad of lanes has: each lane gives pairs of columns 2 c, 8 + 2 c, 16 + 2 c and 24 + 2 c.
// A null row is not written.
template <typename T>
__device__ inline void write_columns(T* row, int columns, int column, const float (&values)[8]) {
  const int c = static_cast<int>(threadIdx.x) % 4;
  if (columns % 8 == 0) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack(values[2 * i], values[2 * i + 1], T{});
    }
    const uint4 adjacent = gather_quad(words);
    column += c * 8;
    if (row && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = adjacent;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = column + i / 2 * 8 + c * 2 + i % 2;
    if (row && at < columns) {
      row[at] = from_float<T>(values[i]);
    }
  }
}

// Where the result of a row of x goes.
template <typename T>
__device__ inline T* out_row(const GroupedParams& p, int row) {
  return static_cast<T*>(p.out) + static_cast<long long>(p.out_rows ? p.out_rows[row] : row) * p.columns;
}

}  // namespace mlx_cuda
