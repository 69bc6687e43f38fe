// A token's queries, keys and values: RMS norm by head, rotary embedding, and the append to the KV cache, a warp for each head.
#include "decoding/heads_params.h"
#include "device/grid.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void heads(const HeadsParams& p) {
  __shared__ float memory[HeadsParams::kWarps][HeadsParams::kMostDim];
  constexpr int most = HeadsParams::kMostDim / 32;  // values of a lane
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int all = p.heads[0] + 2 * p.heads[1];
  const int index = blockIdx.x * HeadsParams::kWarps + threadIdx.x / 32;
  const bool there = index < p.batch * all;
  const int batch = index / all;
  const int place = index % all;
  const int kind = place < p.heads[0] ? 0 : place < p.heads[0] + p.heads[1] ? 1 : 2;
  const int head = place - (kind == 0 ? 0 : kind == 1 ? p.heads[0] : p.heads[0] + p.heads[1]);
  const long long row = static_cast<long long>(batch) * p.heads[kind == 0 ? 0 : 1] + head;
  const T* norm = kind < 2 ? static_cast<const T*>(p.norms[kind]) : nullptr;
  T norms[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {
    norms[i] = norm && i * 32 + lane < p.dim ? norm[i * 32 + lane] : T{};
  }
  wait_for_grids();
  if (!there) {
    return;
  }
  // All that is read is asked for before any of it is used.
  const T* from = static_cast<const T*>(p.rows[kind]) + row * p.dim;
  T read[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {
    read[i] = i * 32 + lane < p.dim ? from[i * 32 + lane] : T{};
  }
  const int to_row = p.place[1];
  const float position = p.scale * static_cast<float>(p.offset[batch * p.offset_distance]);
  T* to = kind == 0 ? static_cast<T*>(p.queries) + row * p.dim
                    : static_cast<T*>(p.caches[kind - 1]) + (row * p.capacity + to_row) * p.dim;
  float* values = memory[threadIdx.x / 32];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const float value = to_float(read[i]);
    squares = fmaf(value, value, squares);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(~0u, squares, offset);
  }
  const float factor = norm ? rsqrtf(squares / static_cast<float>(p.dim) + p.eps[kind]) : 0.0f;
  const int rotated = kind == 2 ? 0 : p.rotated;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const int at = i * 32 + lane;
    const T value = norm ? from_float<T>(to_float(read[i]) * factor * to_float(norms[i])) : read[i];
    if (at < rotated) {
      values[at] = to_float(value);
    } else if (at < p.dim) {
      to[at] = value;
    }
  }
  __syncwarp();
  const int half = rotated / 2;
  for (int i = lane; i < half; i += 32) {
    const float frequency = p.freqs ? 1.0f / p.freqs[i] : exp2f(-static_cast<float>(i) / static_cast<float>(half) * p.log2_base);
    float sine;
    float cosine;
    sincosf(position * frequency, &sine, &cosine);
    const int first = p.neighbours ? 2 * i : i;
    const int second = p.neighbours ? 2 * i + 1 : i + half;
    to[first] = from_float<T>(values[first] * cosine - values[second] * sine);
    to[second] = from_float<T>(values[first] * sine + values[second] * cosine);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_HEADS(name, T)                                                    \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::HeadsParams::kWarps * 32) \
      heads_##name(const __grid_constant__ mlx_cuda::HeadsParams params) {         \
    mlx_cuda::heads<T>(params);                                                    \
  }

MLX_CUDA_HEADS(float32, float)
MLX_CUDA_HEADS(float16, __half)
MLX_CUDA_HEADS(bfloat16, __nv_bfloat16)
