// The short causal convolution before linear attention: each channel's own, with silu, and what it keeps of the rows.
#include "device/grid.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "recurrence/short_conv_params.h"

namespace mlx_cuda {

// Neighbouring channels of a row, two in a word, in one access.
template <typename T, int N>
struct Channels {
  unsigned pairs[N / 2];

  // Nothing of it lies in L1, as kernels that this one waited for may have written it.
  __device__ static Channels load(const T* from) {
    Channels result;
    if constexpr (N == 8) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
      result = {{words.x, words.y, words.z, words.w}};
    } else {
      static_assert(N == 2);
      result = {{__ldcg(reinterpret_cast<const unsigned*>(from))}};
    }
    return result;
  }

  __device__ void store(T* to) const {
    if constexpr (N == 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      *reinterpret_cast<unsigned*>(to) = pairs[0];
    }
  }
};

// Rows are counted from the first that was kept. The window ends with the last tap: with fewer than kTaps its first rows are
// unused.
template <typename T, int N, int kTaps, int kRows>
__device__ inline void short_conv(const ShortConvParams& p) {
  launch_dependents();
  const int channel = (blockIdx.y * ShortConvParams::kThreads + threadIdx.x) * N;
  if (channel >= p.channels) {
    return;
  }
  const int unused = kTaps - p.taps;
  float weight[kTaps][N];  // nobody's result, as the bias
  float bias[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    bias[i] = p.bias ? to_float(static_cast<const T*>(p.bias)[channel + i]) : 0.0f;
    const T* const own = static_cast<const T*>(p.weight) + static_cast<long long>(channel + i) * p.taps;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      weight[tap][i] = tap >= unused ? to_float(own[tap - unused]) : 0.0f;
    }
  }
  wait_for_grids();

  const long long batch = blockIdx.z;
  const T* const kept = static_cast<const T*>(p.kept) + batch * p.kept_batch + channel;
  const T* const rows = static_cast<const T*>(p.rows) + batch * p.batch + channel;
  using Row = Channels<T, N>;
  const auto row = [&](int at) {
    const int own = at - (p.taps - 1);
    if (own >= 0) {
      return Row::load(rows + own * p.row);
    }
    return p.kept ? Row::load(kept + at * p.kept_row) : Row{};
  };
  const int begin = blockIdx.x * p.run;
  const int end = min(begin + p.run, p.length);
  Row window[kTaps - 1 + kRows];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    window[i] = i >= unused ? row(begin + i - unused) : Row{};
  }
  for (int first = begin; first < end; first += kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      window[kTaps - 1 + i] = first + i < end ? row(first + i + p.taps - 1) : Row{};
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Row result;
#pragma unroll
      for (int pair = 0; pair < N / 2; ++pair) {
        float2 sum = make_float2(bias[2 * pair], bias[2 * pair + 1]);
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          if (tap >= unused) {
            const float2 two = unpack(window[i + tap].pairs[pair], T{});
            sum.x = fmaf(weight[tap][2 * pair], two.x, sum.x);
            sum.y = fmaf(weight[tap][2 * pair + 1], two.y, sum.y);
          }
        }
        if (p.silu) {
          sum = make_float2(sum.x / (1.0f + __expf(-sum.x)), sum.y / (1.0f + __expf(-sum.y)));
        }
        result.pairs[pair] = pack(sum.x, sum.y, T{});
      }
      if (first + i < end) {
        result.store(static_cast<T*>(p.out) + (batch * p.length + first + i) * p.channels + channel);
      }
    }
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kRows; ++i) {
      const int next = first + i - unused - p.length;
      if (first + kRows >= p.length && next >= 0 && next < p.taps - 1) {
        window[i].store(static_cast<T*>(p.next) + (batch * (p.taps - 1) + next) * p.channels + channel);
      }
    }
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
      window[i] = window[kRows + i];
    }
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_SHORT_CONV(name, T, ...)                                           \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::ShortConvParams::kThreads) \
      short_conv_##name(const __grid_constant__ mlx_cuda::ShortConvParams params) { \
    mlx_cuda::short_conv<T, __VA_ARGS__>(params);                                   \
  }

MLX_CUDA_SHORT_CONV(float16, __half, 2, mlx_cuda::ShortConvParams::kMostTaps, 1)
MLX_CUDA_SHORT_CONV(bfloat16, __nv_bfloat16, 2, mlx_cuda::ShortConvParams::kMostTaps, 1)
MLX_CUDA_SHORT_CONV(tile_float16, __half, 8, mlx_cuda::ShortConvParams::kTileTaps, mlx_cuda::ShortConvParams::kTile)
MLX_CUDA_SHORT_CONV(tile_bfloat16, __nv_bfloat16, 8, mlx_cuda::ShortConvParams::kTileTaps, mlx_cuda::ShortConvParams::kTile)
