// Gradients of linear attention by chunks, the sequential part: the scan over chunks from last to first.
//
// With P the scores tril(G[i] / G[j] q[i] k[j]) of chunk_forward.cuh, R the gradient of the state after a chunk and dY that of
// its results,
//
//   dU[j] = sum over i of P[i, j] dY[i] + G[end] / G[j] R k[j],
//   R of the chunk before = G[end] R + sum over i of G[i] dY[i] q[i]^T - dU[i] w[i]^T.
//
// `chunk_scan_back` goes from the last chunk to the first as `chunk_scan` goes from the first to the last: a block for 32 columns
// of a head's values, with R in float32 registers. The rest is chunk_gradients.cu, or MLX operations (backward.py has the
// formulas).
#include "device/types.cuh"
#include "recurrence/chunk_forward.cuh"
#include "recurrence/kernels.h"

namespace mlx_cuda {

// Loads of a chunk: the first operands, and the rest.
template <typename T>
__device__ inline void load_first_back(const ScanBlock<T, true>& m, int chunk) {
  const long long block = m.of * m.from.chunks + chunk;
  load_rows<T, kChunkKeys>(m.k, m.p, m.work, m.p.k, m.work.key_head, chunk * kChunk, 0, m.p.key_size);
  load_rows<T, kScanColumns>(m.given, m.p, m.work, m.p.v, m.work.head, chunk * kChunk, m.first_value, m.p.value_size);
  load_square<kChunk>(m.scores, static_cast<const T*>(m.from.p) + block * kChunk * kChunk);
  m.load_decays(chunk, block);
  commit_copies();
}
template <bool Delta, typename T>
__device__ inline void load_rest_back(const ScanBlock<T, true>& m, int chunk) {
  load_rows<T, kChunkKeys>(m.q, m.p, m.work, m.p.q, m.work.key_head, chunk * kChunk, 0, m.p.key_size);
  if constexpr (Delta) {
    load_square<kChunkKeys>(m.w, static_cast<const T*>(m.from.w) + (m.of * m.from.chunks + chunk) * kChunkKeys * kChunk);
  }
  commit_copies();
}

// dY with the decay from the chunk's beginning.
template <typename T>
__device__ inline void put_faded(const ScanBlock<T, true>& m, const float* decay) {
  const int row = threadIdx.x / 4;
  const int at = row * kThin + threadIdx.x % 4 * 8;
  const uint4 pairs = *reinterpret_cast<const uint4*>(m.given + at);
  const float until = decay[row];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(word(pairs, i), T{});
    write_pair(m.faded + at + 2 * i, pair.x * until, pair.y * until);
  }
}

// dU.
template <typename T>
__device__ inline void put_change(const ScanBlock<T, true>& m, const float* decay) {
  float sums[2][4]{};
#pragma unroll
  for (int i = 0; i < kChunkKeys; i += 16) {
    const uint4 of_gradient = right_transposed(m.state + i * kThin + m.half_of_values, kThin);
    const uint4 keys = left(m.k + m.part * 16 * kPitch + i, kPitch);
    mma(sums, keys, of_gradient, T{});
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    sums[e / 4][e % 4] *= decay[kChunk + m.part * 16 + m.g + e % 4 / 2 * 8];
  }
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    if (i >= m.part) {  // no earlier tokens
      const uint4 column_scores = left_transposed(m.scores + i * 16 * kSquare + m.part * 16, kSquare);
      const uint4 of_given = right_transposed(m.given + i * 16 * kThin + m.half_of_values, kThin);
      mma(sums, column_scores, of_given, T{});
    }
  }
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    T* const at = m.rest + (m.part * 16 + m.g) * kThin + m.half_of_values + t * 8 + m.c;
    write_pair(at, sums[t][0], sums[t][1]);
    write_pair(at + 8 * kThin, sums[t][2], sums[t][3]);
  }
}

template <bool Delta, typename T>
__device__ inline void advance_gradient(const ScanBlock<T, true>& m, float whole, StateTile& gradient) {
  gradient.scale(whole);
#pragma unroll
  for (int i = 0; i < kChunk; i += 16) {
    const uint4 of_given = right_transposed(m.faded + i * kThin + m.half_of_values, kThin);
    const uint4 of_change = right_transposed(m.rest + i * kThin + m.half_of_values, kThin);
#pragma unroll
    for (int b = 0; b < kStateBlocks; ++b) {
      const int row = m.part * kStateRows + b * 16;
      const uint4 queries = left_transposed(m.q + i * kPitch + row, kPitch);
      mma(gradient.at[b], queries, of_given, T{});
      if constexpr (Delta) {
        const uint4 used = negative(left(m.w + row * kSquare + i, kSquare));
        mma(gradient.at[b], used, of_change, T{});
      }
    }
  }
  gradient.write(m.state);
}

// Here p.v are the gradients of the results, p.state_in those of the last state, and p.state_out of the first.
template <typename T, bool Delta>
__device__ inline void chunk_scan_back(int block_of_all, const Recurrence& p, const Prepared& from, const Kept& to) {
  extern __shared__ __align__(16) char memory[];
  const ScanBlock<T, true> m{p, from, block_of_all, reinterpret_cast<T*>(memory)};
  StateTile gradient(p, m.work, m.part * kStateRows, m.first_value, m.half_of_values);
  load_first_back(m, from.chunks - 1);
  load_rest_back<Delta>(m, from.chunks - 1);
  gradient.write(m.state);
  for (int chunk = from.chunks - 1; chunk >= 0; --chunk) {
    const long long block = m.of * from.chunks + chunk;
    const float* const decay = m.decay(chunk);
    const bool more = chunk > 0;
    wait_copies<1>();
    __syncthreads();  // R, k, dY, the scores and the decays are there
    write_columns(static_cast<T*>(to.gradients), block, p, m.first_value, m.state, kChunkKeys, p.key_size);
    put_faded(m, decay);
    put_change(m, decay);
    const float whole = decay[kChunk - 1];
    wait_copies<0>();
    __syncthreads();  // dU, the faded dY, q and W are there, and k, dY, the scores and R's copy are done with
    if (more) {
      load_first_back(m, chunk - 1);
    }
    write_columns(static_cast<T*>(to.change_gradients), block, p, m.first_value, m.rest, kChunk, kChunk);
    advance_gradient<Delta>(m, whole, gradient);
    __syncthreads();  // q, W, dU and the faded dY are done with
    if (more) {
      load_rest_back<Delta>(m, chunk - 1);
    }
  }
  gradient.store();
}

// Both scans in one launch: neither needs the other's results. The longer one has the first blocks, so that an SM has one block
// of each.
template <typename T, bool Delta>
__device__ inline void chunk_scans(const Recurrence& p, const Recurrence& back, const Prepared& from, const Kept& to) {
  const int half = gridDim.x / 2;
  if (blockIdx.x < half) {
    chunk_scan_back<T, Delta>(blockIdx.x, back, from, to);
  } else {
    chunk_scan<T, Delta, true>(blockIdx.x - half, p, from, to);
  }
}

#define MLX_CUDA_CHUNK_SCANS(name, dtype, Delta)                                                                            \
  extern "C" __global__ void __launch_bounds__(kChunkThreads, 2) name(                                                      \
      __grid_constant__ const Recurrence p, __grid_constant__ const Recurrence back, __grid_constant__ const Prepared from, \
      __grid_constant__ const Kept to) {                                                                                    \
    chunk_scans<types::dtype, Delta>(p, back, from, to);                                                                    \
  }
MLX_CUDA_CHUNKED_BACK_KERNELS(MLX_CUDA_CHUNK_SCANS)

}  // namespace mlx_cuda
