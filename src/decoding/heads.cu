// A token's queries, keys and values: RMS norm by head, rotary embedding, and the append to the KV cache, a warp for each head.
#include "decoding/heads_params.h"
#include "device/grid.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void heads(const HeadsParams& p) {
  __shared__ float memory[HeadsParams::kWarps][HeadsParams::kMostDim];
  launch_dependents();
  wait_for_grids();
  const int lane = threadIdx.x % 32;
  const int all = p.heads[0] + 2 * p.heads[1];
  const int index = blockIdx.x * HeadsParams::kWarps + threadIdx.x / 32;
  if (index >= p.batch * all) {
    return;
  }
  const int batch = index / all;
  const int place = index % all;
  const int kind = place < p.heads[0] ? 0 : place < p.heads[0] + p.heads[1] ? 1 : 2;
  const int head = place - (kind == 0 ? 0 : kind == 1 ? p.heads[0] : p.heads[0] + p.heads[1]);
  const int count = p.heads[kind == 0 ? 0 : 1];
  const T* from = static_cast<const T*>(p.rows[kind]) + (static_cast<long long>(batch) * count + head) * p.dim;
  T* to = kind == 0 ? static_cast<T*>(p.queries) + (static_cast<long long>(batch) * count + head) * p.dim
                    : static_cast<T*>(p.caches[kind - 1]) +
                          ((static_cast<long long>(batch) * count + head) * p.capacity + p.place[1]) * p.dim;
  if (kind == 2) {
    for (int i = lane; i < p.dim; i += 32) {
      to[i] = from[i];
    }
    return;
  }
  float* values = memory[threadIdx.x / 32];
  float squares = 0.0f;
  for (int i = lane; i < p.dim; i += 32) {
    values[i] = to_float(from[i]);
    squares = fmaf(values[i], values[i], squares);
  }
  if (p.norms[kind]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(~0u, squares, offset);
    }
    const float factor = rsqrtf(squares / static_cast<float>(p.dim) + p.eps[kind]);
    for (int i = lane; i < p.dim; i += 32) {
      values[i] = to_float(from_float<T>(values[i] * factor * to_float(static_cast<const T*>(p.norms[kind])[i])));
    }
  }
  __syncwarp();
  const int half = p.rotated / 2;
  const float position = p.scale * static_cast<float>(*p.offset);
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
  for (int i = p.rotated + lane; i < p.dim; i += 32) {
    to[i] = from_float<T>(values[i]);
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
