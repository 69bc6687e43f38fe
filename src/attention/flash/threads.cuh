// Where a thread of FlashBlock stands: of each 16 rows g and g + 8, of each 8 columns 2 c and 2 c + 1.
#pragma once

#include "attention/flash/kernels.h"
#include "attention/flash/loads.cuh"

namespace mlx_cuda {

template <FlashShape S>
struct FlashThreads {
  static __device__ int lane() {
    return threadIdx.x % 32;
  }
  static __device__ int g() {
    return lane() / 4;
  }
  static __device__ int c() {
    return lane() % 4;
  }
  static __device__ int part() {
    return threadIdx.x / 32 % S.parts;
  }
  static __device__ int group() {  // of the warps that share rows
    return threadIdx.x / 32 / S.parts;
  }
  static __device__ int unit_at(int unit) {  // of a row with row % 8 == lane() % 8
    return S.swizzled() ? swizzle(lane(), unit * 16) : unit * 16;
  }
  static __device__ int block_row(int t, int half) {
    return group() * S.row_tiles * 16 + t * 16 + half * 8 + g();
  }

  // Visits all rows of this thread.
  template <typename Visit>
  __device__ static void for_each_row(Visit&& visit) {
#pragma unroll
    for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(t, half);
      }
    }
  }
};

}  // namespace mlx_cuda
