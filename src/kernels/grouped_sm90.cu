// Grouped matrix product on Hopper: rows of x, grouped, times the transposed matrix of their group, with wgmma and the bulk tensor
// copy engine.
//
// As many blocks as there are multiprocessors take tile after tile of all groups. One producer warp copies parts of x and w into a
// ring; two consumer warpgroups have 64 rows each of a tile of 128. The copies of the next tile begin while one is written. What is
// behind the end of a tile's group is not written (it is another group's, zeros, or left over), and a warpgroup that has no other
// rows computes nothing.
#include "kernels/grouped.cuh"
#include "kernels/grouped_ring.cuh"
#include "kernels/wgmma.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kConsumers = 2;
[[maybe_unused]] constexpr int kFewRows = 16;  // copied at once where a tile has few

// What the copy engine knows of the operands.
struct Maps {
  const TensorMap* x;
  const TensorMap* few_x;  // in boxes of kFewRows rows
  const TensorMap* weights;
};

// Turned: the columns of w are adjacent in memory, not what is summed over.
template <int Columns, int Stages, bool Turned>
__device__ inline void produce(const GroupTile& tile, int steps, const Maps& maps, Ring<Columns, Stages>& ring) {
  using Memory = Ring<Columns, Stages>;
  const int rows = min(tile.row_end - tile.row0, kRows);
  const bool few = rows <= kRows / 2;
  const int boxes = (rows + kFewRows - 1) / kFewRows;
  const int bytes = (few ? boxes * kFewRows * kDepth * 2 : Memory::kRowBytes) + Memory::kWeightBytes;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    Barrier* full = ring.full + ring.stage;
    const int depth = step * kDepth;
    barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
    barrier_expect(full, bytes);
    if (few) {
      for (int i = 0; i < boxes; ++i) {
        copy_box(ring.row_part() + i * kFewRows * 128, maps.few_x, full, depth, tile.row0 + i * kFewRows, 0, 0);
      }
    } else {
      copy_box(ring.row_part(), maps.x, full, depth, tile.row0, 0, 0);
    }
    if (Turned) {
#pragma unroll
      for (int i = 0; i < Columns / 64; ++i) {
        copy_box(ring.weight_part() + i * kDepth * 128, maps.weights, full, tile.column0 + i * 64, depth, tile.weights, 0);
      }
    } else {
      copy_box(ring.weight_part(), maps.weights, full, depth, tile.column0, tile.weights, 0);
    }
  }
}

// A warp has read a part.
__device__ inline void release(Barrier* empty) {
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(empty);
  }
}

template <typename T, int Columns, int Stages, bool Turned>
__device__ inline void multiply(float (&sums)[Columns / 2], int group, int steps, Ring<Columns, Stages>& ring) {
  using Memory = Ring<Columns, Stages>;
  // Addresses in descriptors are in units of 16 bytes.
  const auto rows = descriptor(ring.rows + group * 64 * 128);
  const auto weights = descriptor(ring.weights, kDepth * 128);
  constexpr int kWeightStep = Turned ? 16 * 128 / 16 : 32 / 16;
  int last = 0;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const auto a = rows + ring.stage * (Memory::kRowBytes / 16);
    const auto b = weights + ring.stage * (Memory::kWeightBytes / 16);
    barrier_wait(ring.full + ring.stage, ring.parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      wgmma_shared<0, Turned>(sums, a + i * 2, b + i * kWeightStep, 1, T{});
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

template <typename T, int Columns, int Stages, bool Turned>
__device__ inline void grouped(const GroupedParams& p, const Maps& maps) {
  extern __shared__ char memory[];
  Ring<Columns, Stages> ring(memory);
  if (threadIdx.x == 0) {
    ring.init(kConsumers * 4);
  }
  __syncthreads();
  const int steps = (p.depth + kDepth - 1) / kDepth;
  GroupWalk<kRows, Columns> walk(p);
  GroupTile tile;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  if (group < 0) {
    give_registers<40>();
    if (threadIdx.x < 32) {
      for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
        if (threadIdx.x == 0 && tile.weights >= 0) {
          produce<Columns, Stages, Turned>(tile, steps, maps, ring);
        }
        __syncwarp();
      }
    }
  } else {
    take_registers<232>();
    for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
      float sums[Columns / 2];
#pragma unroll
      for (int i = 0; i < Columns / 2; ++i) {
        sums[i] = 0;
      }
      if (tile.weights < 0) {
        write<T, Columns>(p, tile, group, sums);
      } else if (tile.row0 + group * 64 < tile.row_end) {
        multiply<T, Columns, Stages, Turned>(sums, group, steps, ring);
        write<T, Columns>(p, tile, group, sums);
      } else {
        for (int step = 0; step < steps; ++step, ring.advance()) {
          barrier_wait(ring.full + ring.stage, ring.parity);
          release(ring.empty + ring.stage);
        }
      }
    }
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_GROUPED_KERNEL(name, T, COLUMNS, STAGES, TURNED)                                               \
  extern "C" __global__ void __launch_bounds__(384, 1) name(                                                    \
      const __grid_constant__ mlx_cuda::GroupedParams params, const __grid_constant__ mlx_cuda::TensorMap x,    \
      const __grid_constant__ mlx_cuda::TensorMap few_x, const __grid_constant__ mlx_cuda::TensorMap weights) { \
    mlx_cuda::grouped<T, COLUMNS, STAGES, TURNED>(params, mlx_cuda::Maps{&x, &few_x, &weights});                \
  }

// The same numbers as in primitives/grouped_launch.cpp.
#define MLX_CUDA_GROUPED(dtype, T, COLUMNS, STAGES)                               \
  MLX_CUDA_GROUPED_KERNEL(grouped_##dtype##_##COLUMNS, T, COLUMNS, STAGES, false) \
  MLX_CUDA_GROUPED_KERNEL(grouped_##dtype##_##COLUMNS##_turned, T, COLUMNS, STAGES, true)

#define MLX_CUDA_GROUPED_ALL(dtype, T) \
  MLX_CUDA_GROUPED(dtype, T, 256, 4)   \
  MLX_CUDA_GROUPED(dtype, T, 128, 6)   \
  MLX_CUDA_GROUPED(dtype, T, 64, 8)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what it is made of exists there only
MLX_CUDA_GROUPED_ALL(bfloat16, __nv_bfloat16)
MLX_CUDA_GROUPED_ALL(float16, __half)
#endif
