// A warp's accumulators in chunk_gradients.cu, and their sums over columns.
#pragma once

#include "recurrence/chunk_tiles.cuh"

namespace mlx_cuda {

// Rows that follow each other in memory, of so many elements, into shared memory with zeros after them and after the last.
template <typename T>
__device__ inline void load_tile(T* to, const T* from, int tile_rows, int rows, int columns) {
  constexpr int kUnits = kGradientValues / 8;
  for (int i = threadIdx.x; i < tile_rows * kUnits; i += kGradientThreads) {
    const int row = i / kUnits;
    const int column = i % kUnits * 8;
    const bool there = row < rows && column < columns;
    copy16_async(shared_address(to + row * (kGradientValues + kPad) + column), there ? from + row * columns + column : from, there);
  }
}

// Two elements, each times its factor, rounded to T.
template <typename T>
__device__ inline unsigned scaled(unsigned pair, float2 by, T type) {
  const float2 values = unpack(pair, type);
  return pack(by.x * values.x, by.y * values.y, type);
}

// Sums of 16 rows and so many columns, twice as many tiles of 8, as mma has them.
template <int Tiles>
struct Sums {
  float at[Tiles][4]{};

  // Accumulates the GEMM with the operand that `right` returns for a tile of 16 columns.
  template <typename T, typename Right>
  __device__ void add(const uint4& rows, Right&& right, T type) {
#pragma unroll
    for (int n = 0; n < Tiles / 2; ++n) {
      const uint4 columns = right(n * 16);
      mma(at[2 * n], rows, columns.x, columns.y, type);
      mma(at[2 * n + 1], rows, columns.z, columns.w, type);
    }
  }

  __device__ void scale(float first, float second) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      at[t][0] *= first;
      at[t][1] *= first;
      at[t][2] *= second;
      at[t][3] *= second;
    }
  }

  // The row sums of the accumulator times a tile of shared memory, for a lane's rows, by which the tile's are scaled
  // first.
  template <typename T>
  __device__ float2 with(const T* tile, int pitch, float2 by = {1, 1}) const {
    const int lane = threadIdx.x % 32;
    float2 sums{};
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      const T* const pair = tile + lane / 4 * pitch + t * 8 + lane % 4 * 2;
      const float2 first = unpack(scaled(*reinterpret_cast<const unsigned*>(pair), {by.x, by.x}, T{}), T{});
      const float2 second = unpack(scaled(*reinterpret_cast<const unsigned*>(pair + 8 * pitch), {by.y, by.y}, T{}), T{});
      sums.x += at[t][0] * first.x + at[t][1] * first.y;
      sums.y += at[t][2] * second.x + at[t][3] * second.y;
    }
    return sums;
  }
};

// Adds the sums of the four lanes of a row, and one of them writes it: the first rows of a warp's 16, and the eight after them.
__device__ inline void write_row_sums(float* to, float2 sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int away = 1; away < 4; away *= 2) {
    sums.x += __shfl_xor_sync(~0u, sums.x, away);
    sums.y += __shfl_xor_sync(~0u, sums.y, away);
  }
  if (lane % 4 == 0) {
    to[lane / 4] = sums.x;
    to[lane / 4 + 8] = sums.y;
  }
}

__device__ inline float token_sum(const float* parts, int count, int token) {
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += parts[i * kChunk + token];
  }
  return sum;
}

}  // namespace mlx_cuda
