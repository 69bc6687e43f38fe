// The gated delta rule on tensor cores, by chunks of 64 tokens ("Gated Delta Networks", arXiv:2412.06464, section 3.3, after
// "Parallelizing Linear Transformers with the Delta Rule", arXiv:2406.06484). With G[i] the decay from the chunk's beginning to
// token i and S the state that the chunk finds, the corrections of its tokens are the rows of U = V' - W S^T, where
//
//   (I + A) V' = diag(beta) V,   (I + A) W = diag(beta G) K,   A[i, j] = beta[i] G[i] / G[j] k[i] k[j]  for j < i,
//
// and y[i] = G[i] S q[i] + sum over j <= i of G[i] / G[j] (q[i] k[j]) u[j],  S = G[end] S + sum over j of G[end] / G[j] u[j]
// k[j]^T.
//
// `chunk_prepare` has what does not depend on S, for all chunks at once. Its triangular systems are solved by blocks of 16 tokens
// in TF32, after the blocks on the diagonal have been inverted in float32; W and V' are transposed, because then what one product
// gives can be an operand of the next where it lies. `chunk_scan` goes from chunk to chunk, a block for 32 columns of a head's
// values, with S in float32 registers.
//
// A number that is not finite must not reach the tokens before it, but 0 * NaN is NaN: a chunk with one is gone through token by
// token. `chunk_prepare` marks it by the decay from its last token to its end, which is 1 otherwise.
//
// With equal keys and a beta near 2 each correction undoes the one before: S is what is left of many large terms, and no later
// token mends what 16 bits leave out of them. A chunk with many of these is marked as well: where A is often larger than 1, which
// it is for no keys of length 1 unless beta is.
//
// What derivatives need of both is kept where they ask for it: the inverse of I + A, transposed, each chunk's S^T, and U. Then
// there is no y, and no chunk goes token by token: u is added to S in two parts of 16 bits instead.
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
  advance_tokens<kChunkKeys, false>(p, work, rows, row, first, min(first + kChunk, work.end));
  rows.store<kScanColumns>(p, work, row);
  __syncthreads();
  state.load(p.state_out);
}

template <typename T, bool Delta, bool Keep>
__device__ inline void chunk_scan(int block_of_all, const Recurrence& p, const Prepared& from, const Kept& keep) {
  extern __shared__ __align__(16) char memory[];
  T* const q = reinterpret_cast<T*>(memory);
  T* const k = q + kChunk * kPitch;
  T* const w = k + kChunk * kPitch;
  T* const scores = w + kChunkKeys * kSquare;
  T* const given = scores + kChunk * kSquare;  // V'
  T* const s = given + kScanColumns * kSquare;
  T* const u = s + kChunkKeys * kThin;
  T* const fading = u + kChunk * kThin;     // u with the decay to the chunk's end
  T* const rest = fading + kChunk * kThin;  // what 16 bits leave of that
  float* const decays = reinterpret_cast<float*>(rest + kChunk * kThin);

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
  StateTile state(p, work, part * kStateRows, first_value, half_of_values);

  // Copies of a chunk: what is needed first, and the rest.
  const auto load_first = [&](int chunk) {
    const long long block = of * from.chunks + chunk;
    if constexpr (Delta) {
      load_square(w, static_cast<const T*>(from.w) + block * kChunkKeys * kChunk, kChunkKeys);
    }
    load_square(given, static_cast<const T*>(from.v) + (block * tiles * kScanColumns + first_value) * kChunk, kScanColumns);
    if (threadIdx.x < 2 * kChunk / 4) {
      const int i = threadIdx.x * 4;
      copy16_async(shared_address(decays + chunk % 2 * 2 * kChunk + i), from.decay + block * 2 * kChunk + i, true);
    }
    if constexpr (!Keep) {
      load_rows<T, kChunkKeys>(q, p, work, p.q, work.key_head, from.first + chunk * kChunk, 0, p.key_size);
    }
    commit_copies();
  };
  const auto load_rest = [&](int chunk) {
    const long long block = of * from.chunks + chunk;
    if constexpr (!Keep) {
      load_square(scores, static_cast<const T*>(from.p) + block * kChunk * kChunk, kChunk);
    }
    load_rows<T, kChunkKeys>(k, p, work, p.k, work.key_head, from.first + chunk * kChunk, 0, p.key_size);
    commit_copies();
  };

  load_first(0);
  load_rest(0);
  state.write(s);
  for (int chunk = 0; chunk < from.chunks; ++chunk) {
    const float* const decay = decays + chunk % 2 * 2 * kChunk;
    wait_copies<1>();
    __syncthreads();  // the state, W, V', q and the decays are there
    const bool more = chunk + 1 < from.chunks;
    if (!Keep && decay[2 * kChunk - 1] != 1.0f) [[unlikely]] {
      wait_copies<0>();
      scan_tokens(p, work, state, from.first + chunk * kChunk, first_value);
      if (more) {
        load_first(chunk + 1);
        load_rest(chunk + 1);
      }
      state.write(s);
      continue;
    }
    if constexpr (Keep) {
      write_columns(static_cast<T*>(keep.states), of * from.chunks + chunk, p, first_value, s, kChunkKeys, p.key_size);
    }

    float change[2][4]{};
    float y[2][4]{};
#pragma unroll
    for (int i = 0; i < kChunkKeys; i += 16) {
      const uint4 of_state = right_transposed(s + i * kThin + half_of_values, kThin);
      if constexpr (!Keep) {
        const uint4 from_q = left(q + part * 16 * kPitch + i, kPitch);
        mma(y, from_q, of_state, T{});
      }
      if constexpr (Delta) {
        const uint4 from_w = left_transposed(w + i * kSquare + part * 16, kSquare);
        mma(change, from_w, of_state, T{});
      }
    }
    float new_values[2][4];
    sums_from<T>(left_transposed(given + half_of_values * kSquare + part * 16, kSquare), new_values[0], new_values[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = part * 16 + g + half * 8;
      const float until = decay[row];
      const float onwards = decay[kChunk + row];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float one = new_values[t][2 * half] - change[t][2 * half];
        const float other = new_values[t][2 * half + 1] - change[t][2 * half + 1];
        const int at = row * kThin + half_of_values + t * 8 + c;
        write_pair(u + at, one, other);
        const unsigned rounded = pack(one * onwards, other * onwards, T{});
        *reinterpret_cast<unsigned*>(fading + at) = rounded;
        if constexpr (Delta && Keep) {
          const float2 large = unpack(rounded, T{});
          write_pair(rest + at, one * onwards - large.x, other * onwards - large.y);
        }
        y[t][2 * half] *= until;
        y[t][2 * half + 1] *= until;
      }
    }
    wait_copies<0>();
    __syncthreads();  // u, the scores and k are there, and W, V', q and the state's copy are done with
    if (more) {
      load_first(chunk + 1);
    }
    if constexpr (Keep) {
      write_columns(static_cast<T*>(keep.changes), of * from.chunks + chunk, p, first_value, u, kChunk, kChunk);
    }

#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      if (!Keep && i <= part) {  // no later tokens
        const uint4 row_scores = left(scores + part * 16 * kSquare + i * 16, kSquare);
        const uint4 of_u = right_transposed(u + i * 16 * kThin + half_of_values, kThin);
        mma(y, row_scores, of_u, T{});
      }
    }
    const float whole = decay[kChunk - 1];
    state.scale(whole);
#pragma unroll
    for (int i = 0; i < kChunk; i += 16) {
      const uint4 of_u = right_transposed(fading + i * kThin + half_of_values, kThin);
      const uint4 of_rest = Delta && Keep ? right_transposed(rest + i * kThin + half_of_values, kThin) : uint4{};
#pragma unroll
      for (int b = 0; b < kStateBlocks; ++b) {
        const uint4 keys = left_transposed(k + i * kPitch + part * kStateRows + b * 16, kPitch);
        if constexpr (Delta && Keep) {
          mma(state.at[b], keys, of_rest, T{});
        }
        mma(state.at[b], keys, of_u, T{});
      }
    }
    state.write(s);
    __syncthreads();  // the scores and k are done with
    if (more) {
      load_rest(chunk + 1);
    }
    if (!Keep && p.mask) [[unlikely]] {  // what is masked gives zeros, whatever the state is
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = from.first + chunk * kChunk + part * 16 + g + half * 8;
        if (token < work.end && !is_seen(p, work.batch, token)) {
          y[0][2 * half] = y[0][2 * half + 1] = y[1][2 * half] = y[1][2 * half + 1] = 0;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = from.first + chunk * kChunk + part * 16 + g + half * 8;
      if (!Keep && token < work.end) {
        T* const out = static_cast<T*>(p.out) + work.out(p, token, first_value + half_of_values + c);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (first_value + half_of_values + t * 8 < p.value_size) {
            write_pair(out + t * 8, y[t][2 * half], y[t][2 * half + 1]);
          }
        }
      }
    }
  }
  if constexpr (!Keep) {
    state.store();
  }
}

}  // namespace mlx_cuda
