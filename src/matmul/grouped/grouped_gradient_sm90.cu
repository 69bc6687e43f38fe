// The gradient of the weights of a grouped GEMM on Hopper: for each group, y^T x over its rows.
//
// With few rows, K is short and the result is large, so the two consumer warpgroups of a block have tiles of their own: one
// writes while the other multiplies. Both operands are read with their rows as K, and rows that belong to another group are
// zeroed.
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "matmul/grouped/kernels.h"
#include "matmul/grouped/ring_sm90.cuh"
#include "matmul/grouped/tiles.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kColumns = kGroupedGradientSm90.columns;
[[maybe_unused]] constexpr int kBoxBytes = kDepth * 128;  // of 64 rows and 64 columns
using GradientRing = Ring<kColumns, kGroupedGradientSm90.stages>;

struct Tile {
  int group;
  int row0;  // of the group's matrix
  int column0;
  int begin;  // rows that are summed over
  int end;

  __device__ Tile(const GroupedGradientParams& p, long long index) {
    const int row_tiles = (p.rows_out + kRows - 1) / kRows;
    const int tiles = row_tiles * ((p.columns + kColumns - 1) / kColumns);
    const int place = static_cast<int>(index % tiles);
    group = static_cast<int>(index / tiles);
    row0 = place % row_tiles * kRows;
    column0 = place / row_tiles * kColumns;
    begin = group_bound(p.offsets, group + p.has_begin - 1, p.rows);
    end = max(group_bound(p.offsets, group + p.has_begin, p.rows), begin);
  }
  __device__ static long long count(const GroupedGradientParams& p) {
    return static_cast<long long>(p.groups) * ((p.rows_out + kRows - 1) / kRows) * ((p.columns + kColumns - 1) / kColumns);
  }
  __device__ int steps() const {
    return (end - begin + kDepth - 1) / kDepth;
  }
};

__device__ inline void produce(const Tile& tile, const TensorMap* x_map, const TensorMap* y_map, GradientRing& ring) {
  for (int step = 0; step < tile.steps(); ++step, ring.advance()) {
    Barrier* full = ring.full + ring.stage;
    const int row = tile.begin + step * kDepth;
    ring.wait_empty();
    barrier_expect(full, GradientRing::kRowBytes + GradientRing::kWeightBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_box(ring.row_part() + i * kBoxBytes, y_map, full, tile.row0 + i * 64, row, 0, 0);
      copy_box(ring.weight_part() + i * kBoxBytes, x_map, full, tile.column0 + i * 64, row, 0, 0);
    }
  }
}

// Rows from `valid` on of a part, by one warpgroup.
__device__ inline void clear_rest(const GradientRing& ring, int valid, int consumer) {
  sync_some(1 + consumer, 128);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  for (int i = thread; i < (kDepth - valid) * 8; i += 128) {
    const int at = (valid + i / 8) * 128 + i % 8 * 16;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      *reinterpret_cast<uint4*>(ring.row_part() + box * kBoxBytes + at) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(ring.weight_part() + box * kBoxBytes + at) = make_uint4(0, 0, 0, 0);
    }
  }
  shared_writes_fence();
  sync_some(1 + consumer, 128);
}

// The warpgroups take turns at wgmma. Also, no thread may wait for a part that is more than one round of the stages away: the
// barrier's phase would be ambiguous.
struct Turns {
  static constexpr int kFirst = 1 + kConsumers;  // number of the first one's barrier
  int consumer;

  __device__ explicit Turns(int consumer) : consumer(consumer) {
    if (consumer == kConsumers - 1) {
      pass();
    }
  }
  __device__ void take() const {
    sync_some(kFirst + consumer, 256);
  }
  __device__ void pass() const {
    arrive_some(kFirst + (consumer + 1) % kConsumers, 256);
  }
};

template <typename T>
__device__ inline void multiply(
    float (&low)[kColumns / 2], float (&high)[kColumns / 2], const Tile& tile, const Turns& turns, GradientRing& ring) {
  const int steps = tile.steps();
  int last = 0;
  turns.take();
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    const int valid = tile.end - tile.begin - step * kDepth;
    if (valid < kDepth) {
      clear_rest(ring, valid, turns.consumer);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      const auto b = descriptor(ring.weight_part() + i * 16 * 128, kBoxBytes);
      wgmma_shared<1, 1>(low, descriptor(ring.row_part() + i * 16 * 128), b, 1, T{});
      wgmma_shared<1, 1>(high, descriptor(ring.row_part() + kBoxBytes + i * 16 * 128), b, 1, T{});
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) {
      release(ring.empty + last);
    }
    last = ring.stage;
  }
  turns.pass();
  wgmma_wait<0>();
  if (steps > 0) {
    release(ring.empty + last);
  }
}

// The 64 rows from row0 on.
template <typename T>
__device__ inline void write(const GroupedGradientParams& p, const Tile& tile, int row0, const float (&sums)[kColumns / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + thread / 32 * 16 + half * 8 + thread % 32 / 4;
    T* to =
        row < p.rows_out ? static_cast<T*>(p.out) + (static_cast<long long>(tile.group) * p.rows_out + row) * p.columns : nullptr;
#pragma unroll
    for (int block = 0; block < kColumns / 32; ++block) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = sums[(block * 4 + i / 2) * 4 + half * 2 + i % 2];
      }
      write_columns(to, p.columns, tile.column0 + block * 32, values);
    }
  }
}

template <typename T>
__device__ inline void grouped_gradient(const GroupedGradientParams& p, const TensorMap* x_map, const TensorMap* y_map) {
  extern __shared__ char memory[];
  GradientRing ring(memory);
  if (threadIdx.x == 0) {
    ring.init(1, 4);
  }
  __syncthreads();
  const long long count = Tile::count(p);
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  if (consumer < 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      for (long long index = blockIdx.x; index < count; index += gridDim.x) {
        produce(Tile(p, index), x_map, y_map, ring);
      }
    }
    return;
  }
  take_registers<232>();
  const Turns turns(consumer);
  int turn = 0;
  for (long long index = blockIdx.x; index < count; index += gridDim.x, ++turn) {
    const Tile tile(p, index);
    if (turn % kConsumers != consumer) {
      ring.skip(tile.steps());
      continue;
    }
    float low[kColumns / 2] = {};
    float high[kColumns / 2] = {};
    multiply<T>(low, high, tile, turns, ring);
    write<T>(p, tile, tile.row0, low);
    write<T>(p, tile, tile.row0 + 64, high);
  }
}

#define MLX_CUDA_GROUPED_GRADIENT(name, dtype)                                                   \
  extern "C" __global__ void __launch_bounds__(GroupedSm90Tile::kThreads, 1) name(               \
      const __grid_constant__ GroupedGradientParams params, const __grid_constant__ TensorMap x, \
      const __grid_constant__ TensorMap y) {                                                     \
    grouped_gradient<types::dtype>(params, &x, &y);                                              \
  }
MLX_CUDA_GROUPED_GRADIENT_KERNELS(MLX_CUDA_GROUPED_GRADIENT)

}  // namespace mlx_cuda
