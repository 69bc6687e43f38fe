// Grouped GEMM on Hopper: loads of x into the stages, and the consumer warpgroups.
//
// Two warpgroups have 64 rows each of a tile of 128. Rows after the end of a tile's group are not written (they are another
// group's, zeros, or garbage), and a warpgroup without valid rows computes nothing.
#pragma once

#include "device/ptx.cuh"
#include "matmul/grouped/ring_sm90.cuh"
#include "matmul/grouped/tiles.cuh"

namespace mlx_cuda {

// One thread copies the rows of a tile, from element `depth` on, and says how many bytes besides these complete the stage.
template <typename Memory>
__device__ inline void copy_rows(
    const GroupTile& tile, int depth, int more, const TensorMap* x, const TensorMap* few_x, Memory& ring) {
  constexpr int kFewRows = GroupedSm90Tile::kFewRows;
  const int rows = min(tile.row_end - tile.row0, kRows);
  Barrier* full = ring.full + ring.stage;
  if (rows > kRows / 2) {
    barrier_expect(full, Memory::kRowBytes + more);
    copy_box(ring.row_part(), x, full, depth, tile.row0, 0, 0);
    return;
  }
  const int boxes = (rows + kFewRows - 1) / kFewRows;
  barrier_expect(full, boxes * kFewRows * kDepth * 2 + more);
  for (int i = 0; i < boxes; ++i) {
    copy_box(ring.row_part() + i * kFewRows * 128, few_x, full, depth, tile.row0 + i * kFewRows, 0, 0);
  }
}

template <typename T, int Columns, int Stages, bool Transposed>
__device__ inline void multiply(float (&sums)[Columns / 2], int group, int steps, Ring<Columns, Stages>& ring) {
  using Memory = Ring<Columns, Stages>;
  // Addresses in descriptors are in units of 16 bytes.
  const auto rows = descriptor(ring.rows + group * 64 * 128);
  const auto weights = descriptor(ring.weights, kDepth * 128);
  constexpr int kWeightStep = Transposed ? 32 / 16 : 16 * 128 / 16;
  int last = 0;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const auto a = rows + ring.stage * (Memory::kRowBytes / 16);
    const auto b = weights + ring.stage * (Memory::kWeightBytes / 16);
    ring.wait_full();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      wgmma_shared<0, !Transposed>(sums, a + i * 2, b + i * kWeightStep, 1, T{});
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) {
      release(ring.empty + last);
    }
    last = ring.stage;
  }
  wgmma_wait<0>();
  release(ring.empty + last);
}

template <typename T, int Columns>
__device__ inline void write(const GroupedParams& p, const GroupTile& tile, int group, const float (&sums)[Columns / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.row0 + group * 64 + thread / 32 * 16 + half * 8 + thread % 32 / 4;
    T* to = row < tile.row_end ? out_row<T>(p, row) : nullptr;
#pragma unroll
    for (int block = 0; block < Columns / 32; ++block) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = sums[(block * 4 + i / 2) * 4 + half * 2 + i % 2];
      }
      write_columns(to, p.columns, tile.column0 + block * 32, values);
    }
  }
}

// The warpgroup's part of all tiles of a block.
template <typename T, int Columns, int Stages, bool Transposed>
__device__ inline void consume(const GroupedParams& p, int group, int steps, Ring<Columns, Stages>& ring) {
  GroupWalk<kRows, Columns> walk(p);
  GroupTile tile;
  for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
    float sums[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      sums[i] = 0;
    }
    if (tile.weights < 0) {
      write<T, Columns>(p, tile, group, sums);
    } else if (tile.row0 + group * 64 < tile.row_end) {
      multiply<T, Columns, Stages, Transposed>(sums, group, steps, ring);
      write<T, Columns>(p, tile, group, sums);
    } else {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ring.wait_full();
        release(ring.empty + ring.stage);
      }
    }
  }
}

}  // namespace mlx_cuda
