// Derivatives of linear attention by chunks: what goes through them in their order, there and back.
//
// With P the scores tril(G[i] / G[j] q[i] k[j]) of chunk_forward.cuh, R the gradient of the state that a chunk leaves and dY that
// of its results,
//
//   dU[j] = sum over i of P[i, j] dY[i] + G[end] / G[j] R k[j],
//   R of the chunk before = G[end] R + sum over i of G[i] dY[i] q[i]^T - dU[i] w[i]^T.
//
// `chunk_scan_back` goes from the last chunk to the first as `chunk_scan` goes from the first to the last: a block for 32 columns
// of a head's values, with R in float32 registers. All else is chunk_gradients.cu, or products of MLX's (backward.py has the
// formulas).
#include "device/types.cuh"
#include "recurrence/chunk_forward.cuh"
#include "recurrence/kernels.h"

namespace mlx_cuda {

// Here p.v are the gradients of the results, p.state_in those of the last state, and p.state_out of the first.
template <typename T, bool Delta>
__device__ inline void chunk_scan_back(int block_of_all, const Recurrence& p, const Prepared& from, const Kept& to) {
  extern __shared__ __align__(16) char memory[];
  T* const q = reinterpret_cast<T*>(memory);
  T* const k = q + kChunk * kPitch;
  T* const w = k + kChunk * kPitch;
  T* const scores = w + kChunkKeys * kSquare;
  T* const r = scores + kChunk * kSquare;
  T* const given = r + kChunkKeys * kThin;   // dY
  T* const faded = given + kChunk * kThin;   // dY with the decay from the chunk's beginning
  T* const change = faded + kChunk * kThin;  // dU
  float* const decays = reinterpret_cast<float*>(change + kChunk * kThin);

  const int tiles = (p.value_size + kScanColumns - 1) / kScanColumns;
  const int first_value = block_of_all % tiles * kScanColumns;
  const long long of = block_of_all / tiles;
  const Work work(p, static_cast<int>(of));
  // Four warps share the tokens, or the elements of a key; two of them the values.
  const int part = threadIdx.x / 32 % 4;
  const int half_of_values = threadIdx.x / 128 * 16;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int c = lane % 4 * 2;
  StateTile gradient(p, work, part * kStateRows, first_value, half_of_values);

  // Copies of a chunk: what is needed first, and the rest.
  const auto load_first = [&](int chunk) {
    const long long block = of * from.chunks + chunk;
    load_rows<T, kChunkKeys>(k, p, work, p.k, work.key_head, chunk * kChunk, 0, p.key_size);
    load_rows<T, kScanColumns>(given, p, work, p.v, work.head, chunk * kChunk, first_value, p.value_size);
    load_square(scores, static_cast<const T*>(from.p) + block * kChunk * kChunk, kChunk);
    if (threadIdx.x < 2 * kChunk / 4) {
      const int i = threadIdx.x * 4;
      copy16_async(shared_address(decays + chunk % 2 * 2 * kChunk + i), from.decay + block * 2 * kChunk + i, true);
    }
    commit_copies();
  };
  const auto load_rest = [&](int chunk) {
    load_rows<T, kChunkKeys>(q, p, work, p.q, work.key_head, chunk * kChunk, 0, p.key_size);
    if constexpr (Delta) {
      load_square(w, static_cast<const T*>(from.w) + (of * from.chunks + chunk) * kChunkKeys * kChunk, kChunkKeys);
    }
    commit_copies();
  };

  load_first(from.chunks - 1);
  load_rest(from.chunks - 1);
  gradient.write(r);
  for (int chunk = from.chunks - 1; chunk >= 0; --chunk) {
    const long long block = of * from.chunks + chunk;
    const float* const decay = decays + chunk % 2 * 2 * kChunk;
    wait_copies<1>();
    __syncthreads();  // R, k, dY, the scores and the decays are there
    write_columns(static_cast<T*>(to.gradients), block, p, first_value, r, kChunkKeys, p.key_size);
    {
      const int row = threadIdx.x / 4;
      const int at = row * kThin + threadIdx.x % 4 * 8;
      const uint4 pairs = *reinterpret_cast<const uint4*>(given + at);
      const float until = decay[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(word(pairs, i), T{});
        write_pair(faded + at + 2 * i, pair.x * until, pair.y * until);
      }
    }

    float sums[2][4]{};
#pragma unroll
    for (int i = 0; i < kChunkKeys; i += 16) {
      const uint4 of_gradient = right_transposed(r + i * kThin + half_of_values, kThin);
      const uint4 keys = left(k + part * 16 * kPitch + i, kPitch);
      mma(sums, keys, of_gradient, T{});
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sums[e / 4][e % 4] *= decay[kChunk + part * 16 + g + e % 4 / 2 * 8];
    }
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (i >= part) {  // no earlier tokens
        const uint4 column_scores = left_transposed(scores + i * 16 * kSquare + part * 16, kSquare);
        const uint4 of_given = right_transposed(given + i * 16 * kThin + half_of_values, kThin);
        mma(sums, column_scores, of_given, T{});
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      T* const at = change + (part * 16 + g) * kThin + half_of_values + t * 8 + c;
      write_pair(at, sums[t][0], sums[t][1]);
      write_pair(at + 8 * kThin, sums[t][2], sums[t][3]);
    }
    const float whole = decay[kChunk - 1];
    wait_copies<0>();
    __syncthreads();  // dU, the faded dY, q and W are there, and k, dY, the scores and R's copy are done with
    if (chunk > 0) {
      load_first(chunk - 1);
    }
    write_columns(static_cast<T*>(to.change_gradients), block, p, first_value, change, kChunk, kChunk);

    gradient.scale(whole);
#pragma unroll
    for (int i = 0; i < kChunk; i += 16) {
      const uint4 of_given = right_transposed(faded + i * kThin + half_of_values, kThin);
      const uint4 of_change = right_transposed(change + i * kThin + half_of_values, kThin);
#pragma unroll
      for (int b = 0; b < kStateBlocks; ++b) {
        const int row = part * kStateRows + b * 16;
        const uint4 queries = left_transposed(q + i * kPitch + row, kPitch);
        mma(gradient.at[b], queries, of_given, T{});
        if constexpr (Delta) {
          const uint4 used = negative(left(w + row * kSquare + i, kSquare));
          mma(gradient.at[b], used, of_change, T{});
        }
      }
    }
    gradient.write(r);
    __syncthreads();  // q, W, dU and the faded dY are done with
    if (chunk > 0) {
      load_rest(chunk - 1);
    }
  }
  gradient.store();
}

// Both scans at once: neither needs what the other finds. The longer one has the first blocks, so that the two of a multiprocessor
// are one of each.
template <typename T, bool Delta>
__device__ inline void chunk_scans(const Recurrence& p, const Recurrence& back, const Prepared& from, const Kept& to) {
  const int half = gridDim.x / 2;
  if (blockIdx.x < half) {
    chunk_scan_back<T, Delta>(blockIdx.x, back, from, to);
  } else {
    chunk_scan<T, Delta, true>(blockIdx.x - half, p, from, to);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_CHUNK_SCANS(name, dtype, Delta)                                                         \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kChunkThreads, 2) name(                         \
      __grid_constant__ const mlx_cuda::Recurrence p, __grid_constant__ const mlx_cuda::Recurrence back, \
      __grid_constant__ const mlx_cuda::Prepared from, __grid_constant__ const mlx_cuda::Kept to) {      \
    mlx_cuda::chunk_scans<mlx_cuda::types::dtype, Delta>(p, back, from, to);                             \
  }
MLX_CUDA_CHUNKED_BACK_KERNELS(MLX_CUDA_CHUNK_SCANS)
