// A warp writes a row of keys or values to a KV cache that is quantized with mode "affine", bit-identical to mx.quantize.
#pragma once

#include "decoding/append/params.h"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

inline constexpr int kMostOfLane = QuantizedRows::kMostDim / 32;

// Column i * 32 + lane is the lane's value i; those beyond the row are 0. As in mx.quantize, NaN counts for no group's limits,
// which is what fmaxf and fminf do, and becomes the highest integer.
template <typename T, int Bits>
__device__ inline void store_quantized(const QuantizedRows& to, int which, long long row, const float (&values)[kMostOfLane]) {
  constexpr int kInWord = 32 / Bits;
  constexpr float kBins = (1 << Bits) - 1;
  const int lane = threadIdx.x % 32;
  const int values_each = to.dims[which] / 32;
  const int chunks = to.group / 32;  // of a group: 1, 2 or 4
  float low[kMostOfLane];
  float high[kMostOfLane];
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    low[i] = fminf(values[i], kLargest);
    high[i] = fmaxf(values[i], 0.0f);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      low[i] = fminf(low[i], __shfl_xor_sync(~0u, low[i], distance));
      high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], distance));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    if (chunks > step) {
#pragma unroll
      for (int i = 0; i < kMostOfLane; i += 2 * step) {
#pragma unroll
        for (int j = i; j < i + step; ++j) {
          low[j] = low[j + step] = fminf(low[j], low[j + step]);
          high[j] = high[j + step] = fmaxf(high[j], high[j + step]);
        }
      }
    }
  }
  const long long groups = to.dims[which] / to.group;
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    if (i >= values_each) {
      break;
    }
    const bool negative = fabsf(low[i]) > fabsf(high[i]);
    float scale = fmaxf((high[i] - low[i]) / kBins, 1e-7f) * (negative ? 1.0f : -1.0f);
    const float edge = negative ? low[i] : high[i];
    const float steps = roundf(edge / scale);
    scale = steps == 0.0f ? scale : edge / steps;
    const float bias = steps == 0.0f ? 0.0f : edge;
    if (lane == 0 && i % chunks == 0) {
      static_cast<T*>(to.scales[which])[row * groups + i / chunks] = from_float<T>(scale);
      static_cast<T*>(to.biases[which])[row * groups + i / chunks] = from_float<T>(bias);
    }
    const float rounded = fminf(nan_max(roundf((values[i] - bias) / scale), 0.0f), kBins);
    unsigned word = static_cast<unsigned>(rounded) << (lane % kInWord * Bits);
#pragma unroll
    for (int distance = 1; distance < kInWord; distance *= 2) {
      word |= __shfl_xor_sync(~0u, word, distance);
    }
    if (lane % kInWord == 0) {
      static_cast<unsigned*>(to.packed[which])[row * (to.dims[which] / kInWord) + i * Bits + lane / kInWord] = word;
    }
  }
}

}  // namespace mlx_cuda
