// The gated delta rule on tensor cores, by chunks of 64 tokens ("Gated Delta Networks", arXiv:2412.06464, section 3.3, after
// "Parallelizing Linear Transformers with the Delta Rule", arXiv:2406.06484). With G[i] the decay from the chunk's beginning to
// token i and S the state before the chunk, the corrections of its tokens are the rows of U = V' - W S^T, where
//
//   (I + A) V' = diag(beta) V,   (I + A) W = diag(beta G) K,   A[i, j] = beta[i] G[i] / G[j] k[i] k[j]  for j < i,
//
// and y[i] = G[i] S q[i] + sum over j <= i of G[i] / G[j] (q[i] k[j]) u[j],  S = G[end] S + sum over j of G[end] / G[j] u[j]
// k[j]^T.
//
// `chunk_prepare` computes everything that does not depend on S, for all chunks at once. It inverts I + A by blocks of 16 tokens in
// TF32, after the blocks on the diagonal have been inverted in float32, and multiplies keys and values by the inverse. That has two
// parts of 16 bits: rounded to one, it would cost as much accuracy as storing W and V' in 16 bits. Both are transposed.
// `chunk_scan` goes from chunk to chunk, a block for 32 columns of a head's values, with S in float32 registers.
//
// NaN and infinity must not reach earlier tokens, but 0 * NaN is NaN: a chunk with one is processed token by token. `chunk_prepare`
// marks it by the decay from its last token to its end, which is 1 otherwise.
//
// With equal keys and a beta near 2 each correction undoes the one before: S is the difference of many large terms, and rounding
// them to 16 bits loses it. Chunks with many of these are marked as well: those where A is often larger than 1, which needs a beta
// above 1 for keys of length 1.
//
// For gradients, both save the inverse of I + A, transposed, each chunk's S^T, and U. Then there is no y, and no chunk is processed
// token by token: u is added to S in two parts of 16 bits instead.
#pragma once

#include "recurrence/chunk_prepare.cuh"

namespace mlx_cuda {

// A chunk's tokens one after the other, by way of the state in global memory.
__device__ inline void scan_tokens(Recurrence p, Work work, StateTile& state, int first, int first_value) {
  static_assert(kChunkThreads == kScanColumns * kRecurrentLanes);
  state.store();
  __syncthreads();
  p.state_in = p.state_out;
  work.first_row = first_value;
  const int row = threadIdx.x / kRecurrentLanes;
  Rows<1, kChunkKeys> rows;
  rows.load<kScanColumns>(p, work, row);
  advance_tokens<kScanColumns, false>(p, work, rows, row, first, min(first + kChunk, work.end));
  rows.store<kScanColumns>(p, work, row);
  __syncthreads();
  state.load(p.state_out);
}

// Loads of a chunk: the first operands, and the rest.
template <bool Delta, bool Keep, typename T>
__device__ inline void load_first(const ScanBlock<T, false>& m, int chunk) {
  const long long block = m.of * m.from.chunks + chunk;
  if constexpr (Delta) {
    load_square<kChunkKeys>(m.w, static_cast<const T*>(m.from.w) + block * kChunkKeys * kChunk);
  }
  load_square<kScanColumns>(
      m.prepared, static_cast<const T*>(m.from.v) + (block * m.tiles * kScanColumns + m.first_value) * kChunk);
  m.load_decays(chunk, block);
  if constexpr (!Keep) {
    load_rows<T, kChunkKeys>(m.q, m.p, m.work, m.p.q, m.work.key_head, m.from.first + chunk * kChunk, 0, m.p.key_size);
  }
  commit_copies();
}
template <bool Keep, typename T>
__device__ inline void load_rest(const ScanBlock<T, false>& m, int chunk) {
  const long long block = m.of * m.from.chunks + chunk;
  if constexpr (!Keep) {
    load_square<kChunk>(m.scores, static_cast<const T*>(m.from.p) + block * kChunk * kChunk);
  }
  load_rows<T, kChunkKeys>(m.k, m.p, m.work, m.p.k, m.work.key_head, m.from.first + chunk * kChunk, 0, m.p.key_size);
  commit_copies();
}

// Terms of the state: of y, and W S^T, which is subtracted from the corrections.
template <bool Delta, bool Keep, typename T>
__device__ inline void multiply_state(const ScanBlock<T, false>& m, float (&change)[2][4], float (&y)[2][4]) {
#pragma unroll
  for (int i = 0; i < kChunkKeys; i += 16) {
    const uint4 of_state = right_transposed(m.state + i * kThin + m.half_of_values, kThin);
    if constexpr (!Keep) {
      const uint4 from_q = left(m.q + m.part * 16 * kPitch + i, kPitch);
      mma(y, from_q, of_state, T{});
    }
    if constexpr (Delta) {
      const uint4 from_w = left_transposed(m.w + i * kSquare + m.part * 16, kSquare);
      mma(change, from_w, of_state, T{});
    }
  }
}

// Writes U, and U with the decay to the chunk's end; y gets that from its beginning.
template <bool Delta, bool Keep, typename T>
__device__ inline void put_corrections(
    const ScanBlock<T, false>& m, const float* decay, const float (&change)[2][4], float (&y)[2][4]) {
  float new_values[2][4];
  sums_from<T>(left_transposed(m.prepared + m.half_of_values * kSquare + m.part * 16, kSquare), new_values[0], new_values[1]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m.part * 16 + m.g + half * 8;
    const float until = decay[row];
    const float onwards = decay[kChunk + row];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float one = new_values[t][2 * half] - change[t][2 * half];
      const float other = new_values[t][2 * half + 1] - change[t][2 * half + 1];
      const int at = row * kThin + m.half_of_values + t * 8 + m.c;
      write_pair(m.given + at, one, other);
      const unsigned rounded = pack(one * onwards, other * onwards, T{});
      *reinterpret_cast<unsigned*>(m.faded + at) = rounded;
      if constexpr (Delta && Keep) {
        const float2 large = unpack(rounded, T{});
        write_pair(m.rest + at, one * onwards - large.x, other * onwards - large.y);
      }
      y[t][2 * half] *= until;
      y[t][2 * half + 1] *= until;
    }
  }
}

// Terms of y from the corrections of this token and earlier ones.
template <typename T>
__device__ inline void multiply_scores(const ScanBlock<T, false>& m, float (&y)[2][4]) {
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    if (i <= m.part) {  // no later tokens
      const uint4 row_scores = left(m.scores + m.part * 16 * kSquare + i * 16, kSquare);
      const uint4 of_u = right_transposed(m.given + i * 16 * kThin + m.half_of_values, kThin);
      mma(y, row_scores, of_u, T{});
    }
  }
}

template <bool Delta, bool Keep, typename T>
__device__ inline void advance_state(const ScanBlock<T, false>& m, float whole, StateTile& state) {
  state.scale(whole);
#pragma unroll
  for (int i = 0; i < kChunk; i += 16) {
    const uint4 of_u = right_transposed(m.faded + i * kThin + m.half_of_values, kThin);
    const uint4 of_rest = Delta && Keep ? right_transposed(m.rest + i * kThin + m.half_of_values, kThin) : uint4{};
#pragma unroll
    for (int b = 0; b < kStateBlocks; ++b) {
      const uint4 keys = left_transposed(m.k + i * kPitch + m.part * kStateRows + b * 16, kPitch);
      if constexpr (Delta && Keep) {
        mma(state.at[b], keys, of_rest, T{});
      }
      mma(state.at[b], keys, of_u, T{});
    }
  }
  state.write(m.state);
}

// Writes y: zeros for masked tokens, whatever the state is.
template <typename T>
__device__ inline void write_results(const ScanBlock<T, false>& m, int chunk, float (&y)[2][4]) {
  const Recurrence& p = m.p;
  if (p.mask) [[unlikely]] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = m.from.first + chunk * kChunk + m.part * 16 + m.g + half * 8;
      if (token < m.work.end && !is_seen(p, m.work.batch, token)) {
        y[0][2 * half] = y[0][2 * half + 1] = y[1][2 * half] = y[1][2 * half + 1] = 0;
      }
    }
  }
  // Two lanes have 8 adjacent values: one takes those of the first tile, the other those of the second.
  const bool odd = m.lane % 2;
  const int value = m.first_value + m.half_of_values + odd * 8 + m.lane % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned first = pack(y[0][2 * half], y[0][2 * half + 1], T{});
    const unsigned second = pack(y[1][2 * half], y[1][2 * half + 1], T{});
    const unsigned other = __shfl_xor_sync(~0u, odd ? first : second, 1);
    const int token = m.from.first + chunk * kChunk + m.part * 16 + m.g + half * 8;
    if (token < m.work.end && value < p.value_size) {
      *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + m.work.out(p, token, value)) =
          make_uint2(odd ? other : first, odd ? second : other);
    }
  }
}

template <typename T, bool Delta, bool Keep>
__device__ inline void chunk_scan(int block_of_all, const Recurrence& p, const Prepared& from, const Kept& keep) {
  extern __shared__ __align__(16) char memory[];
  const ScanBlock<T, false> m{p, from, block_of_all, reinterpret_cast<T*>(memory)};
  StateTile state(p, m.work, m.part * kStateRows, m.first_value, m.half_of_values);
  load_first<Delta, Keep>(m, 0);
  load_rest<Keep>(m, 0);
  state.write(m.state);
  for (int chunk = 0; chunk < from.chunks; ++chunk) {
    const float* const decay = m.decay(chunk);
    wait_copies<1>();
    __syncthreads();  // the state, W, V', q and the decays are there
    const bool more = chunk + 1 < from.chunks;
    if (!Keep && decay[2 * kChunk - 1] != 1.0f) [[unlikely]] {
      wait_copies<0>();
      scan_tokens(p, m.work, state, from.first + chunk * kChunk, m.first_value);
      if (more) {
        load_first<Delta, Keep>(m, chunk + 1);
        load_rest<Keep>(m, chunk + 1);
      }
      state.write(m.state);
      continue;
    }
    if constexpr (Keep) {
      write_columns(static_cast<T*>(keep.states), m.of * from.chunks + chunk, p, m.first_value, m.state, kChunkKeys, p.key_size);
    }
    float change[2][4]{};
    float y[2][4]{};
    multiply_state<Delta, Keep>(m, change, y);
    put_corrections<Delta, Keep>(m, decay, change, y);
    wait_copies<0>();
    __syncthreads();  // u, the scores and k are there, and W, V', q and the state's copy are done with
    if (more) {
      load_first<Delta, Keep>(m, chunk + 1);
    }
    if constexpr (Keep) {
      write_columns(static_cast<T*>(keep.changes), m.of * from.chunks + chunk, p, m.first_value, m.given, kChunk, kChunk);
    } else {
      multiply_scores(m, y);
    }
    advance_state<Delta, Keep>(m, decay[kChunk - 1], state);
    __syncthreads();  // the scores and k are done with
    if (more) {
      load_rest<Keep>(m, chunk + 1);
    }
    if constexpr (!Keep) {
      write_results(m, chunk, y);
    }
  }
  if constexpr (!Keep) {
    state.store();
  }
}

}  // namespace mlx_cuda
