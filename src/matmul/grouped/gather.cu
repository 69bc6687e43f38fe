// Sorts the indices of gather_mm into groups of rows, and the GEMV of so few rows that they need no groups.
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "matmul/grouped/kernels.h"
#include "matmul/grouped/params.h"

#include "device/mma.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kThreads = GroupPairs::kThreads;

// The matrix of x of a pair.
template <typename Params>
__device__ inline long long matrix_of(const Params& p, int pair) {
  return min(p.lhs ? p.lhs[pair] : static_cast<unsigned>(pair / p.repeats), static_cast<unsigned>(p.matrices - 1));
}

// The sums of the values of all threads before this one; `total` is that of all.
__device__ inline int sum_before(int value, int* warp_sums, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int upto = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, upto, distance);
    upto += lane >= distance ? before : 0;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) {
    warp_sums[warp] = upto;
  }
  __syncthreads();
  int before_warp = 0;
  total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    before_warp += i < warp ? warp_sums[i] : 0;
    total += warp_sums[i];
  }
  return before_warp + upto - value;
}

// Gives each pair's number and group to `visit`: several of a thread are read at once, because reading takes much longer than the
// rest.
template <typename Visit>
__device__ inline void for_each_pair(const GatherParams& p, const Visit& visit) {
  constexpr int kAtOnce = 8;
  for (int first = static_cast<int>(threadIdx.x); first < p.pairs; first += kAtOnce * kThreads) {
    unsigned groups[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      groups[i] = p.rhs[min(first + i * kThreads, p.pairs - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kThreads < p.pairs) {
        visit(first + i * kThreads, min(groups[i], static_cast<unsigned>(p.groups)));
      }
    }
  }
}

// One block. Pairs of one group keep no particular order: each row's result is its own.
__device__ inline void group_pairs(const GatherParams& p, int* counts) {
  __shared__ int warp_sums[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  for (int g = thread; g <= p.groups; g += kThreads) {
    counts[g] = 0;
  }
  __syncthreads();
  for_each_pair(p, [&](int, unsigned group) { atomicAdd(counts + group, 1); });
  __syncthreads();
  int begin = 0;
  for (int g0 = 0; g0 <= p.groups; g0 += kThreads) {
    const int g = g0 + thread;
    // Atomic because counts in global memory may be stale in the L1 cache.
    const int count = g <= p.groups ? atomicAdd(counts + g, 0) : 0;
    int total;
    const int first = begin + sum_before(count, warp_sums, total);
    if (g <= p.groups) {
      p.offsets[g] = first * p.matrix_rows;
      atomicExch(counts + g, first);
    }
    begin += total;
  }
  __syncthreads();
  for_each_pair(p, [&](int pair, unsigned group) { p.order[atomicAdd(counts + group, 1)] = pair; });
}

// A thread for each pair and one more: where the group changes, offsets begin.
__device__ inline void find_offsets(const GatherParams& p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i > p.pairs) {
    return;
  }
  const auto groups = static_cast<unsigned>(p.groups);
  const int from = i == 0 ? 0 : static_cast<int>(min(p.rhs[i - 1], groups)) + 1;
  const int to = i == p.pairs ? p.groups : static_cast<int>(min(p.rhs[i], groups));
  for (int g = from; g <= to; ++g) {
    p.offsets[g] = i * p.matrix_rows;
  }
}

// A warp for each row.
__device__ inline void gather_rows(const GatherParams& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto rows = static_cast<long long>(p.pairs) * p.matrix_rows;
  const auto row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) {
    return;
  }
  const int at = static_cast<int>(row / p.matrix_rows);
  const int pair = p.order ? p.order[at] : at;
  const int in_matrix = static_cast<int>(row % p.matrix_rows);
  const auto* from = static_cast<const uint4*>(p.x) + (matrix_of(p, pair) * p.matrix_rows + in_matrix) * p.row_units;
  auto* to = static_cast<uint4*>(p.grouped_x) + row * p.row_units;
  for (int i = lane; i < p.row_units; i += 32) {
    to[i] = from[i];
  }
  if (p.out_rows && lane == 0) {
    p.out_rows[row] = pair * p.matrix_rows + in_matrix;
  }
}

// A warp for each row and kColumns columns.
template <typename T>
__device__ inline void gather_mv(const GatherMvParams& p) {
  constexpr int kColumns = GatherMv::kWarpColumns;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x);
  const int pair = row / p.matrix_rows;
  const int column0 = static_cast<int>(blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * kColumns;
  if (column0 >= p.columns) {
    return;
  }
  const unsigned group = p.rhs[pair];
  const T* x = static_cast<const T*>(p.x) + (matrix_of(p, pair) * p.matrix_rows + row % p.matrix_rows) * p.depth;
  float sums[kColumns] = {};
  if (group < static_cast<unsigned>(p.groups)) {
    const T* weights = static_cast<const T*>(p.weights) + group * p.weight_matrix;
    const T* rows[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      rows[i] = weights + min(column0 + i, p.columns - 1) * p.weight_row;
    }
#pragma unroll 2
    for (int at = lane * 8; at < p.depth; at += 256) {
      uint4 w[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        w[i] = load16<false>(rows[i] + at);
      }
      const uint4 mine = load16<true>(x + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack(word(mine, j), T{});
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const float2 b = unpack(word(w[i], j), T{});
          sums[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, sums[i]));
        }
      }
    }
  }
  T* out = static_cast<T*>(p.out) + static_cast<long long>(row) * p.columns;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sums[i] = warp_sum(sums[i]);
    if (lane == i && column0 + i < p.columns) {
      out[column0 + i] = from_float<T>(sums[i]);
    }
  }
}

}  // namespace mlx_cuda

extern "C" __global__ void __launch_bounds__(mlx_cuda::GroupPairs::kThreads)
    group_pairs(const __grid_constant__ mlx_cuda::GatherParams params) {
  extern __shared__ int counts[];
  mlx_cuda::group_pairs(params, params.counts ? params.counts : counts);
}
extern "C" __global__ void find_offsets(const __grid_constant__ mlx_cuda::GatherParams params) {
  mlx_cuda::find_offsets(params);
}
extern "C" __global__ void gather_rows(const __grid_constant__ mlx_cuda::GatherParams params) {
  mlx_cuda::gather_rows(params);
}
#define MLX_CUDA_GATHER_MV(name, dtype)                                      \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::GatherMv::kThreads) \
      name(const __grid_constant__ mlx_cuda::GatherMvParams params) {        \
    mlx_cuda::gather_mv<mlx_cuda::types::dtype>(params);                     \
  }
MLX_CUDA_GATHER_MV_KERNELS(MLX_CUDA_GATHER_MV)
