// A mask's values for one row of queries, and the keys that a row sees.
#pragma once

#include "attention/flash/params.h"
#include "attention/flash/tiles.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

__device__ inline const unsigned* mask_bits(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.bit_strides;
  return p.mask.bits + batch * strides[0] + head * strides[1] + row * strides[2];
}

template <typename T>
__device__ inline const T* mask_values(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.strides;
  return static_cast<const T*>(p.mask.values) + batch * strides[0] + head * strides[1] + row * strides[2];
}

// The offset that is subtracted from a row of an additive mask (attention/flash/mask_tiles.cu).
__device__ inline float mask_shift(const FlashParams& p, int batch, int head, int row) {
  const long long* strides = p.mask.shift_strides;
  return p.mask.shifts ? p.mask.shifts[batch * strides[0] + head * strides[1] + row * strides[2]] : 0.0f;
}

// Masks the scores that mma.sync has left in `scores`, and adds an additive mask to them; they are in units of log2(e)
// afterwards.
template <typename T, bool General, int Tiles>
__device__ inline void restrict_row(
    const FlashParams& p, const Place& place, float (&scores)[Tiles][4], int row, int half, float unit, int key0) {
  const int column = threadIdx.x % 4 * 2;
  if constexpr (General) {
    hide(row);
  }
  const int from = place.lowest(row);
  const int to = place.highest(row);
  const unsigned* bits = p.mask.bits ? mask_bits(p, place.batch, place.head, row) : nullptr;
  const T* bias = p.mask.values ? mask_values<T>(p, place.batch, place.head, row) : nullptr;
  const float shift = General ? mask_shift(p, place.batch, place.head, row) : 0.0f;
#pragma unroll
  for (int n = 0; n < Tiles; ++n) {
    const int first = key0 + n * 8;
    const unsigned word = General && bits ? bits[first / 32] >> (first % 32 + column) : ~0u;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = first + column + e;
      float& score = scores[n][half * 2 + e];
      bool seen = key >= from && key < to && (word >> e & 1);
      if (General && bias) {
        const float more = seen ? to_float(bias[key * p.mask.strides[3]]) - shift : -kInfinity;
        seen = more != -kInfinity;
        score = nan_max(fmaf(kLog2e, more, score * unit), -kLargest);  // a finite number stays finite, however low
      }
      score = seen ? score : -kInfinity;
    }
  }
}

}  // namespace mlx_cuda
