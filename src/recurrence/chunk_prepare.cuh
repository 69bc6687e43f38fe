// `chunk_prepare` of chunk_forward.cuh: the part of a chunk that does not depend on the state before it.
#pragma once

#include "device/reduce.cuh"
#include "recurrence/chunk_tiles.cuh"

namespace mlx_cuda {

// Numbers in TF32, and what that leaves of them.
__device__ inline void split(float4 x, uint4& large, uint4& rest) {
  large = make_uint4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w));
  rest = make_uint4(
      to_tf32(x.x - __uint_as_float(large.x)), to_tf32(x.y - __uint_as_float(large.y)), to_tf32(x.z - __uint_as_float(large.z)),
      to_tf32(x.w - __uint_as_float(large.w)));
}

// The mean over 16 rows of A, of the part of its squared elements above 1, from which on a chunk is marked. Keys that
// repeat every n tokens with a beta of b reach (b^2 - 1) / n. With 0.1, errors stayed below those of equal keys with a beta of 1.
constexpr float kRepeated = 0.1f;

constexpr float kLeastBeta = 1.1754944e-38f;  // the smallest that is not subnormal: a smaller one is 0

// Marks a chunk as one to be processed token by token. Tensors that are saved for gradients have no marks.
__device__ inline void mark(const Recurrence& p, const Prepared& to) {
  if (p.out) {
    to.decay[static_cast<long long>(blockIdx.x) * 2 * kChunk + 2 * kChunk - 1] = kInfinity;
  }
}

// Marks it if any of these numbers is not finite.
template <int Tiles>
__device__ inline void mark(const Recurrence& p, const Prepared& to, const float (&tiles)[Tiles][4]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < Tiles * 4; ++i) {
    finite = finite && fabsf(tiles[i / 4][i % 4]) <= kLargest;
  }
  if (!finite) {
    mark(p, to);
  }
}

// The shared memory of a block of `chunk_prepare`, and the roles of its threads in MMAs.
template <typename T>
struct Preparation {
  static constexpr int kValues = kChunkColumns + kPad;
  static constexpr int kBlocks = kChunk / 16;
  static_assert(kPitch <= 2 * kSquare && 2 * sizeof(T) == sizeof(float), "q and A lie where the squares are later.");

  T* k;
  T* v = k + kChunk * kPitch;
  T* factors = v + kChunk * kValues;  // four squares, by `put_inverse`; and before that
  T* q = factors;
  float* a = reinterpret_cast<float*>(factors + 2 * kChunk * kSquare);  // -A, then the inverses on the diagonal
  float* total = a + kChunk * kSquare;                                  // logarithms of the decay from the chunk's beginning
  float* beta = total + kChunk;
  float* inverse_beta = beta + kChunk;      // or zero
  float* repeated = inverse_beta + kChunk;  // of each warp's part of A
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int g = lane / 4;
  int c = lane % 4 * 2;
};

// By one warp: two tokens a lane.
template <typename T>
__device__ inline void put_gates(const Preparation<T>& m, const Gates& gates, float* decay) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * m.lane + i;
    m.total[token] = gates.totals[i];
    m.beta[token] = gates.betas[i];
    m.inverse_beta[token] = fabsf(gates.betas[i]) < kLeastBeta ? 0.0f : 1.0f / gates.betas[i];
    decay[token] = expf(gates.totals[i]);
    decay[kChunk + token] = expf(gates.whole - gates.totals[i]);
  }
}

// 16 rows, of keys or of queries, times keys that are not of later tokens: of each block of 16 tokens, or of every other one.
template <int Step, typename T>
__device__ inline void multiply_keys(const Preparation<T>& m, const T* rows, int row, int begin, float (*sums)[4]) {
  for (int i = 0; i < kChunkKeys; i += 16) {
    const uint4 x = left(rows + row * kPitch + i, kPitch);
#pragma unroll
    for (int b = 0; b < Preparation<T>::kBlocks / Step; ++b) {
      const int j = begin + b * Step;
      if (j * 16 <= row) {
        const uint4 y = right(m.k + j * 16 * kPitch + i, kPitch);
        mma(sums[2 * b], x, y.x, y.y, T{});
        mma(sums[2 * b + 1], x, y.z, y.w, T{});
      }
    }
  }
}

// -A: 16 rows for two warps, which take turns at the blocks of 16 columns.
template <typename T>
__device__ inline void put_a(const Preparation<T>& m, int row) {
  const int begin = m.warp / m.kBlocks;
  float sums[kChunk / 16][4]{};
  multiply_keys<2>(m, m.k, row, begin, sums);
  float repeated = 0;
#pragma unroll
  for (int t = 0; t < kChunk / 16; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + m.g + half * 8;
      const int column = (begin + t / 2 * 2) * 16 + t % 2 * 8 + m.c;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = column + e < i ? -m.beta[i] * (expf(m.total[i] - m.total[column + e]) * sums[t][2 * half + e]) : 0.0f;
        repeated += fmaxf(pair[e] * pair[e] - 1.0f, 0.0f);
      }
      *reinterpret_cast<float2*>(m.a + i * kSquare + column) = make_float2(pair[0], pair[1]);
    }
  }
  m.repeated[m.warp] = of_near_lanes<1, 32>(repeated, Sum{});
}

// 16 rows of 64 tokens of a tensor.
template <typename T>
__device__ inline void write_rows(const Preparation<T>& m, void* to, long long row, const float (&x)[kChunk / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int first = 0; first < kChunk / 8; first += 4) {
      unsigned words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        words[t] = pack(x[first + t][2 * half], x[first + t][2 * half + 1], T{});
      }
      T* const out = static_cast<T*>(to) + (row + m.g + half * 8) * kChunk + (first + m.lane % 4) * 8;
      *reinterpret_cast<uint4*>(out) = gather_quad(words);
    }
  }
}

// The scores, of 16 queries times keys.
template <typename T>
__device__ inline void put_scores(
    const Preparation<T>& m, const Recurrence& p, const Prepared& to, int row, float (&sums)[kChunk / 8][4]) {
  mark(p, to, sums);  // later tokens are zeros
#pragma unroll
  for (int t = 0; t < kChunk / 8; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + m.g + e / 2 * 8;
      const int column = t * 8 + m.c + e % 2;
      sums[t][e] = column <= i ? expf(m.total[i] - m.total[column]) * sums[t][e] : 0.0f;
    }
  }
  write_rows(m, to.p, static_cast<long long>(blockIdx.x) * kChunk + row, sums);
}

// The inverses of the squares on the diagonal, by two warps, a column for each thread.
__device__ inline void invert_diagonal(float* a) {
  const int column = threadIdx.x % 16;
  float* const corner = a + threadIdx.x / 16 * 16 * (kSquare + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(corner + i * kSquare + j);
      x[i] = fmaf(four.x, x[j], x[i]);
      x[i] = j + 1 < i ? fmaf(four.y, x[j + 1], x[i]) : x[i];
      x[i] = j + 2 < i ? fmaf(four.z, x[j + 2], x[i]) : x[i];
      x[i] = j + 3 < i ? fmaf(four.w, x[j + 3], x[i]) : x[i];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    corner[i * kSquare + column] = x[i];
  }
}

// sums += x of block j, by the squares at (i, j) for so many blocks from i on: tokens 2 c and 2 c + 1 of eight are the MMA's k
// indices c and c + 4.
template <typename T>
__device__ inline void add_squares(const Preparation<T>& m, float (*sums)[4], const float (*x)[4], int i, int j, int count) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint4 rows, rest;
    split(make_float4(x[s][0], x[s][2], x[s][1], x[s][3]), rows, rest);
#pragma unroll
    for (int n = 0; n < 2 * count; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(m.a + (i * 16 + n * 8 + m.g) * kSquare + j * 16 + s * 8 + m.c);
      uint4 by, by_rest;
      split(make_float4(pair.x, pair.y, 0, 0), by, by_rest);
      mma(sums[n], rest, by.x, by.y, float{});
      mma(sums[n], rows, by_rest.x, by_rest.y, float{});
      mma(sums[n], rows, by.x, by.y, float{});
    }
  }
}

// 16 columns of the inverse of I + A, block after block: one that is solved is subtracted from all later ones at once, whose MMAs
// do not wait for each other.
template <typename T>
__device__ inline void invert(const Preparation<T>& m, int group, float (&x)[kChunk / 8][4]) {
#pragma unroll
  for (int t = 0; t < kChunk / 8; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[t][e] = group * 16 + m.g + e / 2 * 8 == t * 8 + m.c + e % 2 ? 1.0f : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < Preparation<T>::kBlocks; ++j) {
    if (j >= group) {
      float solved[2][4]{};
      add_squares(m, solved, x + 2 * j, j, j, 1);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[2 * j + e / 4][e % 4] = solved[e / 4][e % 4];
      }
      add_squares(m, x + 2 * j + 2, solved, j + 1, j, Preparation<T>::kBlocks - 1 - j);
    }
  }
}

// a and b, rounded; and what that leaves of them, in the next square.
template <typename T>
__device__ inline void put_parts(T* to, float a, float b) {
  const unsigned rounded = pack(a, b, T{});
  const float2 large = unpack(rounded, T{});
  *reinterpret_cast<unsigned*>(to) = rounded;
  write_pair(to + kChunk * kSquare, a - large.x, b - large.y);
}

// Makes 16 columns of the inverse M those of diag(1 / beta) M diag(beta): 16 bits can represent them where betas are small, too.
template <typename T>
__device__ inline void balance(const Preparation<T>& m, int group, float (&x)[kChunk / 8][4]) {
  const float of_rows[2] = {m.beta[group * 16 + m.g], m.beta[group * 16 + m.g + 8]};
#pragma unroll
  for (int t = 0; t < kChunk / 8; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[t][e] *= of_rows[e / 2] * m.inverse_beta[t * 8 + m.c + e % 2];
    }
  }
}

// These, and times the decay from the chunk's beginning: two parts of 16 bits each, transposed.
template <typename T>
__device__ inline void put_inverse(const Preparation<T>& m, int group, const float (&x)[kChunk / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = group * 16 + m.g + half * 8;
    const float decay = expf(m.total[token]);
    T* const to = m.factors + token * kSquare + m.c;
#pragma unroll
    for (int t = 0; t < kChunk / 8; ++t) {
      put_parts(to + t * 8, x[t][2 * half] * decay, x[t][2 * half + 1] * decay);
      put_parts(to + 2 * kChunk * kSquare + t * 8, x[t][2 * half], x[t][2 * half + 1]);
    }
  }
}

// 16 columns of keys or values times such an inverse, as the rows of MMAs.
template <typename T>
__device__ inline void multiply_inverse(const T* source, int pitch, const T* inverse, float (&x)[kChunk / 8][4]) {
#pragma unroll
  for (int j = 0; j < kChunk / 16; ++j) {
    const uint4 rows = left_transposed(source + j * 16 * pitch, pitch);
#pragma unroll
    for (int part = 1; part >= 0; --part) {
#pragma unroll
      for (int i = j; i < kChunk / 16; ++i) {
        const uint4 columns = right_transposed(inverse + (part * kChunk + j * 16) * kSquare + i * 16, kSquare);
        mma(x[2 * i], rows, columns.x, columns.y, T{});
        mma(x[2 * i + 1], rows, columns.z, columns.w, T{});
      }
    }
  }
}

template <typename T, bool Delta>
__device__ inline void chunk_prepare(const Recurrence& p, const Prepared& to) {
  extern __shared__ __align__(16) char memory[];
  const Work work(p, blockIdx.x / to.chunks);
  const int first = to.first + blockIdx.x % to.chunks * kChunk;
  const long long block = blockIdx.x;
  const Preparation<T> m{.k = reinterpret_cast<T*>(memory)};
  load_rows<T, kChunkKeys>(m.k, p, work, p.k, work.key_head, first, 0, p.key_size);
  load_rows<T, kChunkKeys>(m.q, p, work, p.q, work.key_head, first, 0, p.key_size);
  load_rows<T, kChunkColumns>(m.v, p, work, p.v, work.head, first, 0, p.value_size);
  commit_copies();
  if (m.warp == 0) {
    put_gates(m, Gates(p, work, first), to.decay + block * 2 * kChunk);
  }
  wait_copies<0>();
  __syncthreads();
  const bool with_queries = m.warp >= m.kBlocks;
  const int row = m.warp % m.kBlocks * 16;
  if constexpr (Delta) {
    put_a(m, row);
    __syncthreads();
    if (m.repeated[row / 16] + m.repeated[m.kBlocks + row / 16] > kRepeated * (16 * row + 16 * 15 / 2)) {
      mark(p, to);
    }
  }
  // Half of the warps invert I + A, which is one step after the other, while the others compute the scores.
  float x[kChunk / 8][4]{};
  if (with_queries) {
    multiply_keys<1>(m, m.q, row, 0, x);
  } else if (Delta && m.warp < 2) {
    invert_diagonal(m.a);
  }
  __syncthreads();
  if (with_queries) {
    put_scores(m, p, to, row, x);
  } else if constexpr (Delta) {
    invert(m, m.warp, x);
    if (to.solve) {
      write_rows(m, to.solve, block * kChunk + row, x);
    }
    balance(m, m.warp, x);
  }
  __syncthreads();  // A and q are done with
  if constexpr (Delta) {
    if (!with_queries) {
      put_inverse(m, m.warp, x);
    }
    __syncthreads();
  }

  // 16 columns of W or V' at a time for each warp.
  const int values = (p.value_size + kScanColumns - 1) / kScanColumns * kScanColumns;
  for (int before = 0; before < values; before += kChunkColumns) {
    const int key_groups = Delta && before == 0 ? kChunkKeys / 16 : 0;
    const int groups = key_groups + min(values - before, kChunkColumns) / 16;
    for (int group = m.warp; group < groups; group += kChunkThreads / 32) {
      const bool of_keys = group < key_groups;
      const int column = (of_keys ? group : group - key_groups) * 16;
      float columns[kChunk / 8][4]{};
      if constexpr (Delta) {
        multiply_inverse(
            (of_keys ? m.k : m.v) + column, of_keys ? kPitch : m.kValues, m.factors + (of_keys ? 0 : 2 * kChunk * kSquare),
            columns);
      } else {
#pragma unroll
        for (int i = 0; i < m.kBlocks; ++i) {
          sums_from<T>(left_transposed(m.v + i * 16 * m.kValues + column, m.kValues), columns[2 * i], columns[2 * i + 1]);
        }
      }
#pragma unroll
      for (int t = 0; t < kChunk / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          columns[t][e] *= m.beta[t * 8 + m.c + e % 2];
        }
      }
      mark(p, to, columns);
      write_rows(m, of_keys ? to.w : to.v, of_keys ? block * kChunkKeys + column : block * values + before + column, columns);
    }
    if (before + kChunkColumns < values) {
      __syncthreads();
      load_rows<T, kChunkColumns>(m.v, p, work, p.v, work.head, first, before + kChunkColumns, p.value_size);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
  }
}

}  // namespace mlx_cuda
