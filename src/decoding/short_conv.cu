// The short causal convolution before linear attention, of one token: each channel's own, with silu, and what it keeps of the rows.
#include "decoding/short_conv_params.h"
#include "device/grid.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void short_conv(const ShortConvParams& p) {
  launch_dependents();
  const int pair = blockIdx.x * ShortConvParams::kThreads + threadIdx.x;
  const int pairs = p.channels / 2;
  if (pair >= pairs) {
    return;
  }
  const T* const weight =
      static_cast<const T*>(p.weight) + static_cast<long long>(pair) * 2 * p.taps;  // nobody's result, as the bias
  const unsigned none = 0;
  float2 sum = unpack(p.bias ? __ldg(static_cast<const unsigned*>(p.bias) + pair) : none, T{});
  wait_for_grids();
  const long long batch = blockIdx.y;
  const auto* const kept = static_cast<const unsigned*>(p.kept) + batch * (p.taps - 1) * pairs + pair;
  auto* const next = static_cast<unsigned*>(p.next) + batch * (p.taps - 1) * pairs + pair;
  unsigned rows[ShortConvParams::kMostTaps];
#pragma unroll
  for (int tap = 0; tap < ShortConvParams::kMostTaps; ++tap) {
    if (tap < p.taps) {
      rows[tap] = __ldcg(tap + 1 < p.taps ? kept + tap * pairs : static_cast<const unsigned*>(p.row) + batch * pairs + pair);
    }
  }
#pragma unroll
  for (int tap = 0; tap < ShortConvParams::kMostTaps; ++tap) {
    if (tap < p.taps) {
      const float2 two = unpack(rows[tap], T{});
      sum.x = fmaf(to_float(weight[tap]), two.x, sum.x);
      sum.y = fmaf(to_float(weight[p.taps + tap]), two.y, sum.y);
    }
    if (tap > 0 && tap < p.taps) {
      next[(tap - 1) * pairs] = rows[tap];
    }
  }
  if (p.silu) {
    sum = make_float2(sum.x / (1.0f + __expf(-sum.x)), sum.y / (1.0f + __expf(-sum.y)));
  }
  static_cast<unsigned*>(p.out)[batch * pairs + pair] = pack(sum.x, sum.y, T{});
}

}  // namespace mlx_cuda

#define MLX_CUDA_SHORT_CONV(name, T)                                                \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::ShortConvParams::kThreads) \
      short_conv_##name(const __grid_constant__ mlx_cuda::ShortConvParams params) { \
    mlx_cuda::short_conv<T>(params);                                                \
  }

MLX_CUDA_SHORT_CONV(float16, __half)
MLX_CUDA_SHORT_CONV(bfloat16, __nv_bfloat16)
