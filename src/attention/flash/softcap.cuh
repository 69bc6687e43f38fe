// softcap * tanh(score * scale / softcap), in units of log2(e).
#pragma once

#include "attention/flash/params.h"
#include "device/numbers.cuh"
#include "device/ptx.cuh"

namespace mlx_cuda {

// outer * tanh(inner * score).
__device__ inline float capped(float score, float inner, float outer) {
  return fmaf(reciprocal_approx(exp2_approx(score * (2.0f * kLog2e * inner)) + 1.0f), -2.0f * outer, outer);
}

// The same for each score, as score * fit(score^2) where the tangent's argument is at most 1.
template <int N>
__device__ inline void apply_softcap(const FlashCap& cap, float (&scores)[N]) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    top = nan_max(top, fabsf(scores[i]));
  }
  if (__any_sync(~0u, !(top * cap.inner <= 1.0f))) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = capped(scores[i], cap.inner, cap.outer);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float square = scores[i] * scores[i];
    float ratio = fmaf(cap.fit[4], square, cap.fit[3]);
    ratio = fmaf(ratio, square, cap.fit[2]);
    ratio = fmaf(ratio, square, cap.fit[1]);
    scores[i] *= fmaf(ratio, square, cap.fit[0]);
  }
}

}  // namespace mlx_cuda
