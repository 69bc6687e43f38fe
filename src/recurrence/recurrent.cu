// Linear attention with decay, token by token, in float32: S = g S, S += beta (v - S k) k^T with the delta rule ("Gated Delta
// Networks", arXiv:2412.06464), S += beta v k^T without it (Mamba-2, arXiv:2405.21060), and y = S q. S has a row for each element
// of v and stays in registers: 8 lanes share two rows, a block has 32 rows of one head. A token adds delta (k q) to y, so that S
// k and S q both use the S before the token, and are reduced across the lanes at once.
#include "device/kernel.cuh"
#include "device/reduce.cuh"
#include "recurrence/kernels.h"
#include "recurrence/rows.cuh"

namespace mlx_cuda {

// One after another in shared memory, for each of two stages.
template <int Keys, bool Channels>
struct Staged {
  float4 q[kRecurrentTokens][Keys / 4];
  float4 k[kRecurrentTokens][Keys / 4];
  float4 decays[Channels ? kRecurrentTokens : 1][Channels ? Keys / 4 : 1];
  float v[kRecurrentTokens][kRecurrentRows];
  float out[kRecurrentTokens][kRecurrentRows];
  float decay[kRecurrentTokens];
  float beta[kRecurrentTokens];
  float qk[kRecurrentTokens];
  int seen[kRecurrentTokens];
};

// Operands of a stage on their way through registers: a warp brings whole tokens, and each thread two elements of v besides.
template <int Keys, bool Channels>
class Stage {
  static constexpr int kWarps = kRecurrentThreads / 32;
  static constexpr int kTokens = kRecurrentTokens / kWarps;                   // of a warp
  static constexpr int kSteps = (Keys + 127) / 128;                           // of a warp, to bring a key
  static constexpr int kValueThreads = kRecurrentThreads / kRecurrentTokens;  // of a token
  static constexpr int kValues = kRecurrentRows / kValueThreads;              // of a thread

 public:
  __device__ void load(const Recurrence& p, const Work& work, int first) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const long long token = first + warp * kTokens + i;
      const bool there = token < work.end && is_seen(p, work.batch, token);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int element = j * 128 + lane * 4;
        const bool within = there && element < p.key_size;
        q_[i][j] = within ? load4(p.q.data, place(p.q, work.batch, token, work.key_head) + element, p.q.type) : uint4{};
        k_[i][j] = within ? load4(p.k.data, place(p.k, work.batch, token, work.key_head) + element, p.k.type) : uint4{};
        if constexpr (Channels) {
          decays_[i][j] = within ? load4(p.g.data, place(p.g, work.batch, token, work.head) + element, p.g.type) : uint4{};
        }
      }
      there_[i] = there;
      decay_[i] = beta_[i] = 0;
      if (there && lane == 0) {
        beta_[i] = mlx_cuda::load(p.beta.data, place(p.beta, work.batch, token, work.head), p.beta.type);
        if constexpr (!Channels) {
          decay_[i] = mlx_cuda::load(p.g.data, place(p.g, work.batch, token, work.head), p.g.type);
        }
      }
    }
    const long long token = first + threadIdx.x / kValueThreads;
    const bool there = token < work.end && is_seen(p, work.batch, token);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = work.first_row + threadIdx.x % kValueThreads + i * kValueThreads;
      v_[i] = there && row < p.value_size ? mlx_cuda::load(p.v.data, place(p.v, work.batch, token, work.head) + row, p.v.type) : 0u;
    }
  }

  // A masked token leaves the state unchanged, and gives zeros.
  __device__ void put(Staged<Keys, Channels>& to, const Recurrence& p) const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = warp * kTokens + i;
      float qk = 0;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int unit = j * 32 + lane;
        if (unit < Keys / 4) {
          const float4 q = numbers(q_[i][j], p.q.type);
          const float4 k = numbers(k_[i][j], p.k.type);
          to.q[token][unit] = q;
          to.k[token][unit] = k;
          qk += sum(multiply(q, k));
          if constexpr (Channels) {
            to.decays[token][unit] = there_[i] ? numbers(decays_[i][j], p.g.type) : all(1);
          }
        }
      }
      qk = warp_sum(qk);
      if (lane == 0) {
        to.decay[token] = there_[i] ? number(decay_[i], p.g.type) : 1.0f;
        to.beta[token] = there_[i] ? number(beta_[i], p.beta.type) : 0.0f;
        to.qk[token] = qk;
        to.seen[token] = there_[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      to.v[threadIdx.x / kValueThreads][threadIdx.x % kValueThreads + i * kValueThreads] = number(v_[i], p.v.type);
    }
  }

 private:
  uint4 q_[kTokens][kSteps];
  uint4 k_[kTokens][kSteps];
  uint4 decays_[Channels ? kTokens : 1][Channels ? kSteps : 1];
  unsigned decay_[kTokens];
  unsigned beta_[kTokens];
  unsigned v_[kValues];
  bool there_[kTokens];
};

template <int Keys, bool Channels>
__device__ inline void recurrent(const Recurrence& p) {
  constexpr int kSteps = Keys / kRecurrentKeys;
  constexpr int kMine = kRecurrentRows * kRecurrentLanes / kRecurrentThreads;  // rows of a thread
  constexpr int kApart = kRecurrentRows / kMine;
  extern __shared__ char memory[];
  auto* staged = reinterpret_cast<Staged<Keys, Channels>*>(memory);
  static_assert(2 * sizeof(Staged<Keys, Channels>) == recurrent_shared_bytes(Keys, Channels));

  const Work work(p);
  const int row = threadIdx.x / kRecurrentLanes;
  const int lane = threadIdx.x % kRecurrentLanes;
  Rows<kMine, Keys> state;
  state.template load<kApart>(p, work, row);
  Stage<Keys, Channels> next;
  next.load(p, work, work.begin);
  next.put(staged[0], p);
  __syncthreads();
  for (int first = work.begin, turn = 0; first < work.end; first += kRecurrentTokens, turn ^= 1) {
    const bool more = first + kRecurrentTokens < work.end;
    if (more) {
      next.load(p, work, first + kRecurrentTokens);
    }
    Staged<Keys, Channels>& now = staged[turn];
    const int count = min(work.end - first, kRecurrentTokens);
#pragma unroll 2
    for (int t = 0; t < count; ++t) {
      float4 g[kSteps], k[kSteps], q[kSteps];
      float v[kMine], y[kMine];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int unit = j * kRecurrentLanes + lane;
        g[j] = Channels ? now.decays[t][unit] : all(now.decay[t]);
        k[j] = now.k[t][unit];
        q[j] = now.q[t][unit];
      }
#pragma unroll
      for (int r = 0; r < kMine; ++r) {
        v[r] = now.v[t][row + r * kApart];
      }
      state.advance(p.delta, g, k, q, v, now.beta[t], now.qk[t], y);
      if (lane == 0) {
#pragma unroll
        for (int r = 0; r < kMine; ++r) {
          now.out[t][row + r * kApart] = y[r];
        }
      }
    }
    if (more) {
      next.put(staged[turn ^ 1], p);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * kRecurrentRows; i += kRecurrentThreads) {
      const int t = i / kRecurrentRows;
      const int r = i % kRecurrentRows;
      if (work.first_row + r < p.value_size) {
        store(p.out, work.out(p, first + t, r), now.seen[t] ? now.out[t][r] : 0.0f, p.v.type);
      }
    }
  }
  state.template store<kApart>(p, work, row);
}

#define MLX_CUDA_RECURRENT(name, Keys, Channels) MLX_CUDA_KERNEL(name, (kRecurrentThreads), Recurrence, recurrent<Keys, Channels>)
MLX_CUDA_RECURRENT_KERNELS(MLX_CUDA_RECURRENT)

}  // namespace mlx_cuda
