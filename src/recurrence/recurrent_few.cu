// Linear attention of one token, or a few (recurrent.cu says what it is): the memory's speed counts, so that nothing is shared and
// nobody waits. Eight lanes have one row of the state.
#include "recurrence/rows.cuh"

namespace mlx_cuda {

template <int Keys, bool Channels>
__device__ inline void recurrent_few(const Recurrence& p) {
  constexpr int kSteps = Keys / kRecurrentKeys;
  const Work work(p);
  const int row = threadIdx.x / kRecurrentLanes;
  const int lane = threadIdx.x % kRecurrentLanes;
  Rows<1, Keys> state;
  state.template load<kRecurrentRows>(p, work, row);
  const bool is_row = work.first_row + row < p.value_size;
  for (int token = work.begin; token < work.end; ++token) {
    const bool seen = is_seen(p, work.batch, token);
    uint4 raw_k[kSteps]{}, raw_q[kSteps]{}, raw_g[kSteps]{};
    unsigned decay = 0, beta = 0, value = 0;
    if (seen) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int element = j * kRecurrentKeys + lane * 4;
        if (element < p.key_size) {
          raw_k[j] = load4(p.k.data, place(p.k, work.batch, token, work.key_head) + element, p.k.type);
          raw_q[j] = load4(p.q.data, place(p.q, work.batch, token, work.key_head) + element, p.q.type);
          if constexpr (Channels) {
            raw_g[j] = load4(p.g.data, place(p.g, work.batch, token, work.head) + element, p.g.type);
          }
        }
      }
      if constexpr (!Channels) {
        decay = load(p.g.data, place(p.g, work.batch, token, work.head), p.g.type);
      }
      beta = load(p.beta.data, place(p.beta, work.batch, token, work.head), p.beta.type);
      if (is_row) {
        value = load(p.v.data, place(p.v, work.batch, token, work.head) + work.first_row + row, p.v.type);
      }
    }
    float4 g[kSteps], k[kSteps], q[kSteps];
    float qk = 0;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      k[j] = numbers(raw_k[j], p.k.type);
      q[j] = numbers(raw_q[j], p.q.type);
      g[j] = !seen ? all(1) : Channels ? numbers(raw_g[j], p.g.type) : all(number(decay, p.g.type));
      qk += sum(product(q[j], k[j]));
    }
#pragma unroll
    for (int away = 1; away < kRecurrentLanes; away *= 2) {
      qk += __shfl_xor_sync(~0u, qk, away);
    }
    const float v[1] = {number(value, p.v.type)};
    float y[1];
    state.advance(p.delta, g, k, q, v, number(beta, p.beta.type), qk, y);
    if (lane == 0 && is_row) {
      store(p.out, work.out(p, token, row), y[0], p.v.type);
    }
  }
  state.template store<kRecurrentRows>(p, work, row);
}

}  // namespace mlx_cuda

#define MLX_CUDA_FEW(name, Keys, Channels)                                                \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kFewThreads, Keys > 128 ? 1 : 3) \
      name(__grid_constant__ const mlx_cuda::Recurrence p) {                              \
    mlx_cuda::recurrent_few<Keys, Channels>(p);                                           \
  }

MLX_CUDA_FEW(recurrent_few_heads_128, 128, false)
MLX_CUDA_FEW(recurrent_few_channels_128, 128, true)
MLX_CUDA_FEW(recurrent_few_heads_256, 256, false)
MLX_CUDA_FEW(recurrent_few_channels_256, 256, true)
