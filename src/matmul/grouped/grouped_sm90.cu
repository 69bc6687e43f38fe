// Grouped GEMM on Hopper: rows of x, by group, times the transposed matrix of their group, with wgmma and TMA.
//
// Persistent kernel: as many blocks as SMs process tile after tile of all groups. One producer warp loads parts of x and w into
// pipeline stages for two consumer warpgroups. The loads of the next tile begin while one is written.
#include "device/types.cuh"
#include "matmul/grouped/kernels.h"
#include "matmul/grouped/tiles_sm90.cuh"

namespace mlx_cuda {

// The tensor maps of the operands.
struct Maps {
  const TensorMap* x;
  const TensorMap* few_x;  // in boxes of kFewRows rows
  const TensorMap* weights;
};

// Not transposed: the columns of w are adjacent in memory, not K.
template <int Columns, int Stages, bool Transposed>
__device__ inline void produce(const GroupTile& tile, int steps, const Maps& maps, Ring<Columns, Stages>& ring) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    Barrier* full = ring.full + ring.stage;
    const int depth = step * kDepth;
    ring.wait_empty();
    copy_rows(tile, depth, Ring<Columns, Stages>::kWeightBytes, maps.x, maps.few_x, ring);
    if (Transposed) {
      copy_box(ring.weight_part(), maps.weights, full, depth, tile.column0, tile.weights, 0);
    } else {
#pragma unroll
      for (int i = 0; i < Columns / 64; ++i) {
        copy_box(ring.weight_part() + i * kDepth * 128, maps.weights, full, tile.column0 + i * 64, depth, tile.weights, 0);
      }
    }
  }
}

template <typename T, int Columns, int Stages, bool Transposed>
__device__ inline void grouped(const GroupedParams& p, const Maps& maps) {
  extern __shared__ char memory[];
  Ring<Columns, Stages> ring(memory);
  if (threadIdx.x == 0) {
    ring.init(1, kConsumers * 4);
  }
  __syncthreads();
  const int steps = (p.depth + kDepth - 1) / kDepth;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  if (group < 0) {
    give_registers<40>();
    if (threadIdx.x < 32) {
      GroupWalk<kRows, Columns> walk(p);
      GroupTile tile;
      for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
        if (threadIdx.x == 0 && tile.weights >= 0) {
          produce<Columns, Stages, Transposed>(tile, steps, maps, ring);
        }
        __syncwarp();
      }
    }
  } else {
    take_registers<232>();
    consume<T, Columns, Stages, Transposed>(p, group, steps, ring);
  }
}

#define MLX_CUDA_GROUPED_SM90(name, dtype, COLUMNS, STAGES, TRANSPOSED)                                                           \
  extern "C" __global__ void __launch_bounds__(GroupedSm90Tile::kThreads, 1) name(                                                \
      const __grid_constant__ GroupedParams params, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap few_x, \
      const __grid_constant__ TensorMap weights) {                                                                                \
    grouped<types::dtype, COLUMNS, STAGES, TRANSPOSED>(params, Maps{&x, &few_x, &weights});                                       \
  }
MLX_CUDA_GROUPED_SM90_KERNELS(MLX_CUDA_GROUPED_SM90)

}  // namespace mlx_cuda
