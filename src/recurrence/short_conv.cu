// The short causal depthwise convolution before linear attention, with silu, and the rows that it keeps.
#include "device/kernel.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"
#include "recurrence/kernels.h"
#include "recurrence/short_conv_params.h"

namespace mlx_cuda {

// Adjacent channels of a row, two in a word, in one access.
template <typename T, int N>
struct Channels {
  unsigned pairs[N / 2];

  // Bypasses L1, as kernels that this one waited for may have written the data.
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

// N channels of kRows rows for each thread. Rows are counted from the first that was kept. The window ends with the last tap: its
// first rows are unused where there may be fewer than kTaps.
template <typename T, int N, int kTaps, int kRows, bool Fewer>
__device__ inline void short_conv(const ShortConvParams& p) {
  launch_dependents();
  const int channel = (blockIdx.y * ShortConvParams::kThreads + threadIdx.x) * N;
  if (channel >= p.channels) {
    return;
  }
  const int taps = Fewer ? p.taps : kTaps;
  const int unused = kTaps - taps;
  if (!p.constant) {
    wait_for_grids();
  }
  alignas(sizeof(T) * N) T weight[N * kTaps];
  const T* const own = static_cast<const T*>(p.weight) + static_cast<long long>(channel) * taps;
#pragma unroll
  for (int i = 0; i < N * kTaps; i += Fewer ? 1 : N) {
    if constexpr (Fewer) {
      weight[i] = i % kTaps >= unused ? own[i / kTaps * taps + i % kTaps - unused] : from_float<T>(0);
    } else {
      reinterpret_cast<Vector<T, N>&>(weight[i]) = *reinterpret_cast<const Vector<T, N>*>(own + i);
    }
  }
  Vector<T, N> bias{};
  if (p.bias) {
    bias = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(p.bias) + channel);
  }
  wait_for_grids();

  const long long batch = blockIdx.z;
  const T* const kept = static_cast<const T*>(p.kept) + batch * p.kept_batch + channel;
  const T* const rows = static_cast<const T*>(p.rows) + batch * p.batch + channel;
  using Row = Channels<T, N>;
  const int first = blockIdx.x * kRows;
  Row window[kTaps - 1 + kRows];
#pragma unroll
  for (int i = 0; i < kTaps - 1 + kRows; ++i) {
    const int row = first + i - unused;
    const int token = row - (taps - 1);
    window[i] = Row{};
    if (token >= 0 && token < p.length) {
      window[i] = Row::load(rows + token * p.row);
    } else if (token < 0 && i >= unused && p.kept) {
      window[i] = Row::load(kept + row * p.kept_row);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Row result;
#pragma unroll
    for (int pair = 0; pair < N / 2; ++pair) {
      float2 sum = make_float2(to_float(bias.value[2 * pair]), to_float(bias.value[2 * pair + 1]));
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (tap >= unused) {
          const float2 two = unpack(window[i + tap].pairs[pair], T{});
          sum.x = fmaf(to_float(weight[2 * pair * kTaps + tap]), two.x, sum.x);
          sum.y = fmaf(to_float(weight[(2 * pair + 1) * kTaps + tap]), two.y, sum.y);
        }
      }
      if (p.silu) {
        sum = make_float2(sum.x / (1.0f + __expf(-sum.x)), sum.y / (1.0f + __expf(-sum.y)));
      }
      result.pairs[pair] = pack(sum.x, sum.y, T{});
    }
    if (first + i < p.length) {
      result.store(static_cast<T*>(p.out) + (batch * p.length + first + i) * p.channels + channel);
    }
  }
  if (first + kRows >= p.length) {
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kRows; ++i) {
      const int next = first + i - unused - p.length;
      if (next >= 0 && next < taps - 1) {
        window[i].store(static_cast<T*>(p.next) + (batch * (taps - 1) + next) * p.channels + channel);
      }
    }
  }
}

#define MLX_CUDA_SHORT_CONV(name, ...) MLX_CUDA_KERNEL(name, (ShortConvParams::kThreads), ShortConvParams, short_conv<__VA_ARGS__>)
#define MLX_CUDA_TOKEN(name, dtype) MLX_CUDA_SHORT_CONV(name, types::dtype, 2, ShortConvParams::kMostTaps, 1, true)
#define MLX_CUDA_TOKENS(name, dtype, taps) \
  MLX_CUDA_SHORT_CONV(name, types::dtype, ShortConvParams::kTile, taps, ShortConvParams::kTile, false)
MLX_CUDA_SHORT_CONV_KERNELS(MLX_CUDA_TOKEN, MLX_CUDA_TOKENS)

}  // namespace mlx_cuda
