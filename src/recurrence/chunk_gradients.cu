// Gradients of linear attention by chunks, the part that is parallel over chunks: from the state S before a chunk, the gradient R
// of that after it, its corrections U and their gradients dU (chunked_back.cu). A block for a chunk of a value head.
//
// With G[i] the decay from the chunk's beginning, M the inverse of chunk_forward.cuh's I + A, X = M^T dU, and
//
//   D[i, j] = G[i] / G[j] dY[i] U[j]  for j <= i,   B[i, j] = -G[i] / G[j] X[i] U[j]  for j < i,   C = B K - diag(G) X S,
//
// the gradients are
//
//   dQ = diag(G) dY S + D K,   dV = diag(beta) X,   dbeta[i] = X[i] V[i] + C[i] K[i],
//   dK = diag(beta) C + E,     E = D^T Q + B^T (diag(beta) K) + diag(G[end] / G) U R,
//
// and that of log G[i] is dQ[i] Q[i] + beta[i] C[i] K[i] - E[i] K[i], for i = end plus the dot product of R and the
// state after the chunk. Without the delta rule X = dU, and there are no B and C.
//
// The terms of two tokens cancel in the sum over all tokens from a later one on, and the gradient of a small decay is the rest,
// divided by it: so both use the same D, B, Q, K and diag(beta) K, each rounded to T.
#include "device/kernel.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "recurrence/chunk_sums.cuh"
#include "recurrence/kernels.h"

namespace mlx_cuda {

template <typename T, bool Delta>
class ChunkGradients {
  static_assert(kGradientValues == kChunkKeys, "Rows of values have kPitch as well.");
  static constexpr int kStashed = kGradientValues + 4;

 public:
  __device__ ChunkGradients(const Recurrence& p, const Kept& from, const Gradients& to, char* memory)
      : p_(p), to_(to), work_(p, blockIdx.x / to.chunks), first_(blockIdx.x % to.chunks * kChunk), warp_(threadIdx.x / 32) {
    dy_ = reinterpret_cast<T*>(memory);
    x_ = dy_ + kChunk * kPitch;
    u_ = x_ + kChunk * kPitch;
    q_ = u_ + kChunk * kPitch;
    k_ = q_ + kChunk * kPitch;
    s_ = k_ + kChunk * kPitch;
    r_ = s_ + kChunkKeys * kPitch;
    solve_ = r_ + kChunkKeys * kPitch;
    squares_ = solve_ + kChunk * kSquare;
    total_ = reinterpret_cast<float*>(squares_ + 2 * kChunk * kSquare);
    beta_ = total_ + kChunk;
    of_q_ = beta_ + kChunk;
    of_corrected_ = of_q_ + 2 * kChunk;
    of_scaled_ = of_corrected_ + 2 * kChunk;
    of_earlier_ = of_scaled_ + 2 * kChunk;
    of_x_ = of_earlier_ + 4 * kChunk;
    wholes_ = of_x_ + 4 * kChunk;
    const long long block = blockIdx.x;
    const int keys = p.key_size;
    const int values = p.value_size;
    if constexpr (Delta) {
      const T* const solve = static_cast<const T*>(from.solve) + block * kChunk * kChunk;
      copy16_async(shared_address(solve_ + threadIdx.x / 8 * kSquare + threadIdx.x % 8 * 8), solve + threadIdx.x * 8, true);
    }
    load_tile(x_, static_cast<const T*>(from.change_gradients) + block * kChunk * values, kChunk, kChunk, values);
    commit_copies();
    load_rows<T, kGradientValues, kGradientThreads>(dy_, p, work_, to.dy, work_.head, first_, 0, values);
    load_tile(u_, static_cast<const T*>(from.changes) + block * kChunk * values, kChunk, kChunk, values);
    commit_copies();
    load_tile(s_, static_cast<const T*>(from.states) + block * keys * values, kChunkKeys, keys, values);
    load_rows<T, kChunkKeys, kGradientThreads>(k_, p, work_, p.k, work_.key_head, first_, 0, keys);
    load_rows<T, kChunkKeys, kGradientThreads>(q_, p, work_, p.q, work_.key_head, first_, 0, keys);
    commit_copies();
    load_tile(r_, static_cast<const T*>(from.gradients) + block * keys * values, kChunkKeys, keys, values);
    commit_copies();
    if (warp_ == 0) {
      const Gates gates(p, work_, first_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        total_[2 * threadIdx.x + i] = gates.totals[i];
        beta_[2 * threadIdx.x + i] = gates.betas[i];
      }
    }
  }

  __device__ void run() {
    wait_copies<3>();
    __syncthreads();  // dU, M and the decays are there
    of_values();
    wait_copies<2>();
    __syncthreads();  // X, dY and U are there
    decayed_squares();
    wait_copies<1>();
    __syncthreads();  // the squares D and B, S, K and Q are there
    Sums<8> sums;
    of_queries(sums);
    wait_copies<0>();
    __syncthreads();  // R is there, and dY and X are done with
    of_keys(sums);
    __syncthreads();  // all sums are there
    if (warp_ == 0) {
      of_gates();
    }
  }

 private:
  __device__ static int row_of_lane() {
    return threadIdx.x % 32 / 4;
  }
  __device__ static int column_of_lane() {
    return threadIdx.x % 4 * 2;
  }

  // X, which replaces dU, dV, and its part of dbeta: 16 tokens and 32 values for each warp.
  __device__ void of_values() {
    const int row = warp_ / 4 * 16;
    const int column = warp_ % 4 * 32;
    const int g = row_of_lane();
    const int c = column_of_lane();
    Sums<4> x;
    if constexpr (Delta) {
#pragma unroll
      for (int j = 0; j < kChunk / 16; ++j) {
        if (j * 16 >= row) {
          x.add(
              left(solve_ + row * kSquare + j * 16, kSquare),
              [&](int n) { return right_transposed(x_ + j * 16 * kPitch + column + n, kPitch); }, T{});
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x.at[t][e] = to_float(x_[(row + g + e / 2 * 8) * kPitch + column + t * 8 + c + e % 2]);
        }
      }
    }
    float with_v[2]{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_ + row + g + half * 8;
      if (token < work_.end) {
        const bool seen = is_seen(p_, work_.batch, token);
        const float beta = beta_[row + g + half * 8];
        const T* const v = static_cast<const T*>(p_.v.data) + place(p_.v, work_.batch, token, work_.head);
        T* const out = static_cast<T*>(to_.v) + work_.out(p_, token, 0);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const int value = column + t * 8 + c;
          if (value < p_.value_size) {
            if (seen) {
              const float2 pair = unpack(*reinterpret_cast<const unsigned*>(v + value), T{});
              with_v[half] += x.at[t][2 * half] * pair.x + x.at[t][2 * half + 1] * pair.y;
            }
            write_pair(out + value, beta * x.at[t][2 * half], beta * x.at[t][2 * half + 1]);
          }
        }
      }
    }
    write_row_sums(of_x_ + warp_ % 4 * kChunk + row, make_float2(with_v[0], with_v[1]));
    if constexpr (Delta) {
      __syncthreads();  // dU is done with
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        T* const at = x_ + (row + g) * kPitch + column + t * 8 + c;
        write_pair(at, x.at[t][0], x.at[t][1]);
        write_pair(at + 8 * kPitch, x.at[t][2], x.at[t][3]);
      }
    }
  }

  // The rows of dY, and of X, that a warp has in the two steps that follow: 16 of them, for half of the columns.
  __device__ const T* own_rows() const {
    return (with_dy() ? dy_ : x_) + own_row() * kPitch;
  }
  __device__ bool with_dy() const {
    return warp_ < kGradientThreads / 64;
  }
  __device__ int own_row() const {
    return warp_ / 2 % 4 * 16;
  }

  // D, and below it B.
  __device__ void decayed_squares() {
    if (!Delta && !with_dy()) {
      return;
    }
    const int row = own_row();
    const int column = warp_ % 2 * 32;
    const int g = row_of_lane();
    const int c = column_of_lane();
    Sums<4> sums;
    if (column <= row) {
#pragma unroll
      for (int i = 0; i < kGradientValues; i += 16) {
        sums.add(left(own_rows() + i, kPitch), [&](int n) { return right(u_ + (column + n) * kPitch + i, kPitch); }, T{});
      }
    }
    T* const out = squares_ + (with_dy() ? 0 : kChunk) * kSquare;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + g + half * 8;
        const int j = column + t * 8 + c;
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = with_dy() ? sums.at[t][2 * half + e] : -sums.at[t][2 * half + e];
          const bool is_earlier = with_dy() ? j + e <= i : j + e < i;
          pair[e] = is_earlier ? expf(total_[i] - total_[j + e]) * value : 0.0f;
        }
        write_pair(out + i * kSquare + j, pair[0], pair[1]);
      }
    }
  }

  // dQ, or diag(beta) C.
  __device__ void of_queries(Sums<8>& sums) {
    if (!Delta && !with_dy()) {
      return;
    }
    const int row = own_row();
    const int column = warp_ % 2 * 64;
    const int g = row_of_lane();
#pragma unroll
    for (int i = 0; i < kGradientValues; i += 16) {
      sums.add(left(own_rows() + i, kPitch), [&](int n) { return right(s_ + (column + n) * kPitch + i, kPitch); }, T{});
    }
    const float sign = with_dy() ? 1.0f : -1.0f;
    sums.scale(sign * expf(total_[row + g]), sign * expf(total_[row + g + 8]));
    const T* const square = squares_ + ((with_dy() ? 0 : kChunk) + row) * kSquare;
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      if (j * 16 <= row) {
        sums.add(
            left(square + j * 16, kSquare), [&](int n) { return right_transposed(k_ + j * 16 * kPitch + column + n, kPitch); },
            T{});
      }
    }
    if (with_dy()) {
      write_row_sums(of_q_ + warp_ % 2 * kChunk + row, sums.with(q_ + row * kPitch + column, kPitch));
      write_rows(to_.q, sums, row, column);
    } else {
      const T* const own_keys = k_ + row * kPitch + column;
      const float2 betas = make_float2(beta_[row + g], beta_[row + g + 8]);
      write_row_sums(of_corrected_ + warp_ % 2 * kChunk + row, sums.with(own_keys, kPitch));
      write_row_sums(of_scaled_ + warp_ % 2 * kChunk + row, sums.with(own_keys, kPitch, betas));
      sums.scale(betas.x, betas.y);
    }
  }

  // dK: 16 tokens and 32 elements for each warp; diag(beta) C comes by way of the memory of dY and X.
  __device__ void of_keys(const Sums<8>& corrected) {
    float* const stash = reinterpret_cast<float*>(dy_);
    const int g = row_of_lane();
    const int c = column_of_lane();
    if (Delta && !with_dy()) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        float* const at = stash + (own_row() + g) * kStashed + warp_ % 2 * 64 + t * 8 + c;
        *reinterpret_cast<float2*>(at) = make_float2(corrected.at[t][0], corrected.at[t][1]);
        *reinterpret_cast<float2*>(at + 8 * kStashed) = make_float2(corrected.at[t][2], corrected.at[t][3]);
      }
    }
    const int row = warp_ / 4 * 16;
    const int column = warp_ % 4 * 32;
    Sums<4> sums;
#pragma unroll
    for (int i = 0; i < kGradientValues; i += 16) {
      sums.add(left(u_ + row * kPitch + i, kPitch), [&](int n) { return right(r_ + (column + n) * kPitch + i, kPitch); }, T{});
    }
    const float whole = total_[kChunk - 1];
    sums.scale(expf(whole - total_[row + g]), expf(whole - total_[row + g + 8]));
    const T* const own_keys = k_ + row * kPitch + column;
    const float2 kept = sums.with(own_keys, kPitch);
    write_whole(kept.x + kept.y + expf(whole) * states_dot());
    __syncthreads();  // diag(beta) C is there
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      if (j * 16 >= row) {
        const T* const square = squares_ + j * 16 * kSquare + row;
        const int others = j * 16 * kPitch + column;
        sums.add(left_transposed(square, kSquare), [&](int n) { return right_transposed(q_ + others + n, kPitch); }, T{});
        if constexpr (Delta) {
          sums.add(
              left_transposed(square + kChunk * kSquare, kSquare), [&](int n) { return scaled_keys(j * 16, column + n); }, T{});
        }
      }
    }
    write_row_sums(of_earlier_ + warp_ % 4 * kChunk + row, sums.with(own_keys, kPitch));
    if constexpr (Delta) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float* const at = stash + (row + g) * kStashed + column + t * 8 + c;
        const float2 first = *reinterpret_cast<const float2*>(at);
        const float2 second = *reinterpret_cast<const float2*>(at + 8 * kStashed);
        sums.at[t][0] += first.x;
        sums.at[t][1] += first.y;
        sums.at[t][2] += second.x;
        sums.at[t][3] += second.y;
      }
    }
    write_rows(to_.k, sums, row, column);
  }

  // diag(beta) K as the right operand.
  __device__ uint4 scaled_keys(int row, int column) const {
    const uint4 keys = right_transposed(k_ + row * kPitch + column, kPitch);
    const float* const betas = beta_ + row + column_of_lane();
    const float2 first = make_float2(betas[0], betas[1]);
    const float2 second = make_float2(betas[8], betas[9]);
    return make_uint4(
        scaled(keys.x, first, T{}), scaled(keys.y, second, T{}), scaled(keys.z, first, T{}), scaled(keys.w, second, T{}));
  }

  // This thread's part of the dot product of S and R.
  __device__ float states_dot() const {
    constexpr int kUnits = kGradientValues / 8;
    float sum = 0;
    for (int i = threadIdx.x; i < kChunkKeys * kUnits; i += kGradientThreads) {
      const int at = i / kUnits * kPitch + i % kUnits * 8;
      const uint4 s = *reinterpret_cast<const uint4*>(s_ + at);
      const uint4 r = *reinterpret_cast<const uint4*>(r_ + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack(word(s, j), T{});
        const float2 b = unpack(word(r, j), T{});
        sum += a.x * b.x + a.y * b.y;
      }
    }
    return sum;
  }

  __device__ void write_whole(float sum) {
    wholes_[warp_] = warp_sum(sum);
  }

  // Gradients of queries or keys.
  template <int Tiles>
  __device__ void write_rows(void* to, const Sums<Tiles>& sums, int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_ + row + row_of_lane() + half * 8;
      if (token < work_.end) {
        const int turn = work_.head % (p_.value_heads / p_.key_heads);
        const long long of_token = (static_cast<long long>(turn) * to_.batches + work_.batch) * p_.length + token;
        T* const out = static_cast<T*>(to) + (of_token * p_.key_heads + work_.key_head) * p_.key_size;
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
          const int key = column + t * 8 + column_of_lane();
          if (key < p_.key_size) {
            write_pair(out + key, sums.at[t][2 * half], sums.at[t][2 * half + 1]);
          }
        }
      }
    }
  }

  // dbeta, and dg: a token's decay is in G of all tokens from it on. Two adjacent tokens for each lane.
  __device__ void of_gates() {
    const int lane = threadIdx.x;
    const Gates gates(p_, work_, first_);
    float whole = 0;
#pragma unroll
    for (int i = 0; i < kGradientThreads / 32; ++i) {
      whole += wholes_[i];
    }
    float decay[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * lane + i;
      const float corrected = Delta ? token_sum(of_corrected_, 2, token) : 0.0f;
      beta[i] = token_sum(of_x_, 4, token) + corrected;
      decay[i] = token_sum(of_q_, 2, token) - token_sum(of_earlier_, 4, token) + (Delta ? token_sum(of_scaled_, 2, token) : 0.0f);
    }
    float after = decay[0] + decay[1];
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
      const float other = __shfl_down_sync(~0u, after, away);
      after += lane + away < 32 ? other : 0.0f;
    }
    const float later = __shfl_down_sync(~0u, after, 1);
    float gradient = whole + (lane < 31 ? later : 0.0f);
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      gradient += decay[i];
      const int token = first_ + 2 * lane + i;
      if (token < work_.end) {
        const long long at = (static_cast<long long>(work_.batch) * p_.length + token) * p_.value_heads + work_.head;
        const bool counts = is_seen(p_, work_.batch, token) && !(gates.logs[i] <= kLeastLogDecay);  // NaN does
        to_.g[at] = counts ? gradient * expf(-gates.logs[i]) : 0.0f;
        to_.beta[at] = beta[i];
      }
    }
  }

  const Recurrence& p_;
  const Gradients& to_;
  const Work work_;
  const int first_, warp_;
  T *dy_, *x_, *u_, *q_, *k_, *s_, *r_, *solve_, *squares_;
  float *total_, *beta_, *of_q_, *of_corrected_, *of_scaled_, *of_earlier_, *of_x_, *wholes_;
};

template <typename T>
__device__ inline void chunk_shared_sums(const SharedSums& p) {
  const long long blocks = (p.units + kSumThreads - 1) / kSumThreads;
  const bool of_k = blockIdx.x >= blocks;
  const long long unit = (blockIdx.x - (of_k ? blocks : 0)) * kSumThreads + threadIdx.x;
  if (unit >= p.units) {
    return;
  }
  const uint4* const from = static_cast<const uint4*>(of_k ? p.k : p.q) + unit;
  float2 sums[4]{};
  for (int i = 0; i < p.shared; ++i) {
    const uint4 pairs = from[i * p.units];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack(word(pairs, j), T{});
      sums[j].x += pair.x;
      sums[j].y += pair.y;
    }
  }
  static_cast<uint4*>(of_k ? p.k_sum : p.q_sum)[unit] = make_uint4(
      pack(sums[0].x, sums[0].y, T{}), pack(sums[1].x, sums[1].y, T{}), pack(sums[2].x, sums[2].y, T{}),
      pack(sums[3].x, sums[3].y, T{}));
}

template <typename T, bool Delta>
__device__ inline void chunk_gradients(const Recurrence& p, const Kept& from, const Gradients& to) {
  extern __shared__ __align__(16) char memory[];
  ChunkGradients<T, Delta>(p, from, to, memory).run();
}

#define MLX_CUDA_CHUNK_GRADIENTS(name, dtype, Delta)                                                                        \
  extern "C" __global__ void __launch_bounds__(kGradientThreads, 1)                                                         \
      name(const __grid_constant__ Recurrence p, const __grid_constant__ Kept from, const __grid_constant__ Gradients to) { \
    chunk_gradients<types::dtype, Delta>(p, from, to);                                                                      \
  }
#define MLX_CUDA_CHUNK_SHARED_SUMS(name, dtype) MLX_CUDA_KERNEL(name, (kSumThreads), SharedSums, chunk_shared_sums<types::dtype>)
MLX_CUDA_CHUNK_GRADIENT_KERNELS(MLX_CUDA_CHUNK_GRADIENTS, MLX_CUDA_CHUNK_SHARED_SUMS)

}  // namespace mlx_cuda
