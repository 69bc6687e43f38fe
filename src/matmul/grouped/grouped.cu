// Grouped GEMM with mma.sync and cp.async, for GPUs from sm_80 on: rows of x times the matrix of their group, as in
// grouped_sm90.cu, and the gradient of these matrices, which sums over the rows of a group.
//
// Rows of shared memory are split into units of 16 bytes, swizzled so that eight adjacent rows have no bank conflicts.
#include "device/kernel.cuh"
#include "device/mma.cuh"
#include "device/types.cuh"
#include "matmul/grouped/kernels.h"
#include "matmul/grouped/tiles.cuh"

namespace mlx_cuda {

using Shape = GroupedTile;
[[maybe_unused]] constexpr int kRows = Shape::kRows;
[[maybe_unused]] constexpr int kColumns = Shape::kColumns;
[[maybe_unused]] constexpr int kDepth = Shape::kDepth;
[[maybe_unused]] constexpr int kStages = Shape::kStages;
[[maybe_unused]] constexpr int kThreads = Shape::kThreads;
[[maybe_unused]] constexpr int kRowBytes = Shape::kRowBytes;
[[maybe_unused]] constexpr int kStageBytes = Shape::kStageBytes;
[[maybe_unused]] constexpr int kWarpRows = 64;  // of one of 2 x 2 warps
[[maybe_unused]] constexpr int kWarpColumns = 64;
[[maybe_unused]] constexpr int kTiles = kWarpColumns / 8;  // of 8 columns, of a warp
[[maybe_unused]] constexpr int kUnit = 8;                  // elements of 16 bytes

// The swizzled position of a unit in a matrix with rows of Units units.
template <int Units>
__device__ inline int place_of(int row, int unit) {
  return (row * Units + (unit ^ (Units == 4 ? row / 2 % 4 : row % 8))) * 16;
}

// Columns from row0 and column0 on of a matrix in global memory into Rows rows of Columns columns; zeros out of bounds.
template <typename T, int Rows, int Columns>
__device__ inline void copy_part(unsigned to, const T* from, long long stride, int row0, int row_end, int column0, int column_end) {
  constexpr int kUnits = Columns / kUnit;
#pragma unroll
  for (int i = 0; i < Rows * kUnits / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    const int row = index / kUnits;
    const int unit = index % kUnits;
    const int column = column0 + unit * kUnit;
    const bool there = row0 + row < row_end && column < column_end;
    copy16_async(to + place_of<kUnits>(row, unit), there ? from + (row0 + row) * stride + column : from, there);
  }
}

// Operands of one MMA of 16 rows, 16 columns and K = 16, which is contiguous (K-major) or not.
template <bool KMajor>
__device__ inline uint4 row_operand(unsigned rows, int row, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (KMajor) {
    return load_matrices(rows + place_of<4>(row + lane % 16, step * 2 + lane / 16));
  }
  return load_matrices_transposed(rows + place_of<kRows / kUnit>(step * 16 + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2));
}
template <bool KMajor>
__device__ inline uint4 column_operand(unsigned columns, int column, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (KMajor) {
    return load_matrices(columns + place_of<4>(column + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
  }
  return load_matrices_transposed(columns + place_of<kColumns / kUnit>(step * 16 + lane % 16, column / 8 + lane / 16));
}

template <typename T, bool KMajorRows, bool KMajorColumns>
__device__ inline void multiply_part(float (&sums)[4][kTiles][4], unsigned rows, unsigned columns, int warp_row, int warp_column) {
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint4 b[kTiles / 2];
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      b[i] = column_operand<KMajorColumns>(columns, warp_column + i * 16, step);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint4 a = row_operand<KMajorRows>(rows, warp_row + m * 16, step);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma(sums[m][n], a, n % 2 ? b[n / 2].z : b[n / 2].x, n % 2 ? b[n / 2].w : b[n / 2].y, T{});
      }
    }
  }
}

// Multiplies what `copy` loads into the stages, one part after another.
template <typename T, bool KMajorRows, bool KMajorColumns, typename Copy>
__device__ inline void sum_parts(
    float (&sums)[4][kTiles][4], unsigned shared, int steps, bool idle, int warp_row, int warp_column, const Copy& copy) {
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) {
      copy(shared + step * kStageBytes, step);
    }
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // the part has arrived, and the one before is no longer read
    const int next = step + kStages - 1;
    if (next < steps) {
      copy(shared + next % kStages * kStageBytes, next);
    }
    commit_copies();
    if (!idle) {
      const unsigned part = shared + step % kStages * kStageBytes;
      multiply_part<T, KMajorRows, KMajorColumns>(sums, part, part + kRowBytes, warp_row, warp_column);
    }
  }
  wait_copies<0>();
  __syncthreads();  // the next tile's copies may begin
}

// `row_of` returns the address of row i of the warp's rows in the result, or null.
template <typename T, typename RowOf>
__device__ inline void write(const float (&sums)[4][kTiles][4], int columns, int column, const RowOf& row_of) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    T* row = row_of(i * 8 + static_cast<int>(threadIdx.x) % 32 / 4);
#pragma unroll
    for (int block = 0; block < kTiles / 4; ++block) {
      float values[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        values[n] = sums[i / 2][block * 4 + n / 2][i % 2 * 2 + n % 2];
      }
      write_columns(row, columns, column + block * 32, values);
    }
  }
}

template <typename T, bool Transposed>
__device__ inline void grouped(const GroupedParams& p) {
  extern __shared__ char memory[];
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * kWarpRows;
  const int warp_column = warp % 2 * kWarpColumns;
  GroupWalk<kRows, kColumns> walk(p);
  GroupTile tile;
  for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
    float sums[4][kTiles][4] = {};
    if (tile.weights >= 0) {
      const auto* x = static_cast<const T*>(p.x);
      const T* weights = static_cast<const T*>(p.weights) + tile.weights * p.weight_matrix;
      const bool idle = tile.row0 + warp_row >= tile.row_end;
      const int steps = (p.depth + kDepth - 1) / kDepth;
      sum_parts<T, true, Transposed>(sums, shared, steps, idle, warp_row, warp_column, [&](unsigned to, int step) {
        const int depth = step * kDepth;
        copy_part<T, kRows, kDepth>(to, x, p.x_stride, tile.row0, tile.row_end, depth, p.depth);
        to += kRowBytes;
        if (Transposed) {
          copy_part<T, kColumns, kDepth>(to, weights, p.weight_row, tile.column0, p.columns, depth, p.depth);
        } else {
          copy_part<T, kDepth, kColumns>(to, weights, p.weight_row, depth, p.depth, tile.column0, p.columns);
        }
      });
    }
    write<T>(sums, p.columns, tile.column0 + warp_column, [&](int i) {
      const int row = tile.row0 + warp_row + i;
      return row < tile.row_end ? out_row<T>(p, row) : nullptr;
    });
  }
}

// out[group] = y^T x over the rows of each group; rows without a group are ignored.
template <typename T>
__device__ inline void grouped_gradient(const GroupedGradientParams& p) {
  extern __shared__ char memory[];
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * kWarpRows;
  const int warp_column = warp % 2 * kWarpColumns;
  const int row_tiles = (p.rows_out + kRows - 1) / kRows;
  const int tiles = row_tiles * ((p.columns + kColumns - 1) / kColumns);
  const auto count = static_cast<long long>(tiles) * p.groups;
  const auto* x = static_cast<const T*>(p.x);
  const auto* y = static_cast<const T*>(p.y);
  for (long long index = blockIdx.x; index < count; index += gridDim.x) {
    const int group = static_cast<int>(index / tiles);
    const int place = static_cast<int>(index % tiles);
    const int row0 = place % row_tiles * kRows;
    const int column0 = place / row_tiles * kColumns;
    const int begin = group_bound(p.offsets, group + p.has_begin - 1, p.rows);
    const int end = group_bound(p.offsets, group + p.has_begin, p.rows);
    const int steps = (max(end - begin, 0) + kDepth - 1) / kDepth;
    float sums[4][kTiles][4] = {};
    sum_parts<T, false, false>(sums, shared, steps, false, warp_row, warp_column, [&](unsigned to, int step) {
      const int row = begin + step * kDepth;
      copy_part<T, kDepth, kRows>(to, y, p.y_stride, row, end, row0, p.rows_out);
      copy_part<T, kDepth, kColumns>(to + kRowBytes, x, p.x_stride, row, end, column0, p.columns);
    });
    write<T>(sums, p.columns, column0 + warp_column, [&](int i) {
      const int row = row0 + warp_row + i;
      T* out = static_cast<T*>(p.out) + (static_cast<long long>(group) * p.rows_out + row) * p.columns;
      return row < p.rows_out ? out : nullptr;
    });
  }
}

#define MLX_CUDA_GROUPED(name, dtype, TRANSPOSED) \
  MLX_CUDA_KERNEL(name, (GroupedTile::kThreads, 2), GroupedParams, grouped<types::dtype, TRANSPOSED>)
#define MLX_CUDA_GROUPED_GRADIENT(name, dtype) \
  MLX_CUDA_KERNEL(name, (GroupedTile::kThreads, 2), GroupedGradientParams, grouped_gradient<types::dtype>)
MLX_CUDA_GROUPED_KERNELS(MLX_CUDA_GROUPED, MLX_CUDA_GROUPED_GRADIENT)

}  // namespace mlx_cuda
