// Computation of a warp of a decode kernel on a tile of 16 keys and up to 16 rows, in fragments of mma.m16n8k16. Lane 4 * g + c
// has rows g and g + 8, and of the scores keys 2c and 2c + 1 of each half tile.
//
// Any permutation of head_dim works as the k index of Q K^T if Q has the same, and any permutation of V's columns as the n index
// of the output: a thread's fragments are 16 adjacent bytes of K and of V, and it ends with 16 adjacent columns of the output.
#pragma once

#include "attention/decode/results.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"

namespace mlx_cuda {

// Queries as fragments in shared memory, [row tile][step of 16 columns][lane]; by all threads of the block.
template <typename T, int D>
__device__ inline void share_queries(const DecodeParams& p, const Segment& s, uint4* to, int rows) {
  unsigned* words = reinterpret_cast<unsigned*>(to);
#pragma unroll 1
  for (int index = threadIdx.x; index < rows * (D / 8); index += static_cast<int>(blockDim.x)) {
    const int row = index / (D / 8);
    const int column = index % (D / 8) * 8;
    const uint4 value = query_piece<T>(p, s, row, column);
    unsigned* at = words + ((row / kTileRows * (D / 16) + column / 32 * 2) * 32 + row % 8 * 4 + column / 8 % 4) * 4 + row / 8 % 2;
    at[0] = value.x;
    at[2] = value.y;
    at[32 * 4] = value.z;
    at[32 * 4 + 2] = value.w;
  }
}

// Two steps of a lane's queries of rows `row` and `row` + 8: columns `column` to `column` + 7.
template <typename T>
__device__ inline void load_fragments(const DecodeParams& p, const Segment& s, int row, int column, uint4& q0, uint4& q1) {
  const uint4 low = query_piece<T>(p, s, row, column);
  const uint4 high = query_piece<T>(p, s, row + 8, column);
  q0 = make_uint4(low.x, high.x, low.y, high.y);
  q1 = make_uint4(low.z, high.z, low.w, high.w);
}

// Adds two steps of Q K^T for the halves of a tile.
template <typename T>
__device__ inline void add_scores(float (&scores)[2][4], const uint4& q0, const uint4& q1, const uint4& low, const uint4& high) {
  mma(scores[0], q0, low.x, low.y, T{});
  mma(scores[0], q1, low.z, low.w, T{});
  mma(scores[1], q0, high.x, high.y, T{});
  mma(scores[1], q1, high.z, high.w, T{});
}

// The key of a tile whose values are the word r of a lane's fragment.
__device__ inline int value_key(int r) {
  return 2 * static_cast<int>(threadIdx.x % 4) + (r & 1) + (r >> 1) * 8;
}

// A lane's keys of a tile: rows g of both halves, 8 columns of every 32; zeros where `s` has none.
template <typename T, int D, typename Keys>
__device__ inline void load_keys(const DecodeParams& p, const Keys& s, const T* head, int tile, uint4 (&keys)[2][D / 32]) {
  const int g = threadIdx.x % 32 / 4;
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int key = tile + n * 8 + g;
    const bool there = s.has(key);
    const T* row = head + key * p.k_strides.row + c * 8;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      keys[n][i] = there && i * 32 + c * 8 < p.head_dim ? load16<false>(row + i * 32) : make_uint4(0, 0, 0, 0);
    }
  }
}

// A lane's values: four keys, 8 columns of every 64; also the zeros.
template <typename T, int D, typename Keys>
__device__ inline void load_values(const DecodeParams& p, const Keys& s, const T* head, int tile, uint4 (&values)[D / 64][4]) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int key = tile + value_key(r);
    const bool there = s.has(key);
    const T* row = head + key * p.v_strides.row + g * 8;
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      values[b][r] = there && b * 64 + g * 8 < p.head_dim ? load16<false>(row + b * 64) : make_uint4(0, 0, 0, 0);
    }
  }
}

// Where a batch entry's keys end, as far as is known while the kernels before this one still run.
__device__ inline int end_ahead(const DecodeParams& p, int batch) {
  return p.ends ? min(__ldcg(p.ends + batch), p.kv_length) : p.kv_length;
}

// Has the L2 cache read keys [begin, end) and their values meanwhile. It is a hint: what those kernels change of these, or of the
// lengths, is read again after them.
template <typename T>
__device__ inline void ask_ahead(const DecodeParams& p, int batch, int kv_head, int begin, int end, int thread, int threads) {
  if (p.starts || p.window_left >= 0 || p.mask) {
    return;  // not all of them are read
  }
  const int lines = (p.head_dim * static_cast<int>(sizeof(T)) + 127) / 128;  // of a row
  const T* heads[2] = {
      static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head,
      static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head};
  for (int index = thread; index < (end - begin) * lines; index += threads) {
    const int row = begin + index / lines;
    const int at = index % lines * (128 / static_cast<int>(sizeof(T)));
    prefetch(heads[0] + row * p.k_strides.row + at);
    prefetch(heads[1] + row * p.v_strides.row + at);
  }
}

// Columns 2j and 2j + 1 of 16, as a fragment, from the values of four keys.
__device__ inline uint2 value_fragment(const uint4 (&values)[4], int j) {
  const unsigned selector = j & 1 ? 0x7632 : 0x5410;
  return make_uint2(
      __byte_perm(word(values[0], j / 2), word(values[1], j / 2), selector),
      __byte_perm(word(values[2], j / 2), word(values[3], j / 2), selector));
}

constexpr unsigned kAllKeys = 0xffff;

// Which keys of a tile a bool mask of one row lets through.
__device__ inline unsigned mask_bits(const DecodeParams& p, const Segment& s, int tile) {
  const unsigned char* mask = static_cast<const unsigned char*>(p.mask) + s.batch * p.mask_strides[0];
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int key = tile + i;
    if (s.has(key) && mask[key * p.mask_strides[3]]) {
      bits |= 1u << i;
    }
  }
  return bits;
}

// As restrict_tile, where these bits say what all rows see.
__device__ inline float mask_tile(const DecodeParams& p, float (&scores)[2][4], unsigned bits) {
  if (bits == kAllKeys && p.scale > 0) {
    return p.scale;
  }
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& score = scores[i / 4][i % 4];
    score = bits >> (i / 4 * 8 + 2 * c + i % 2) & 1 ? score * p.scale : -kInfinity;
  }
  return 1.0f;
}

// The sums of a warp's rows: numerators, and with each row its maximum and its weights' sum.
template <typename T, int D>
struct TileRows {
  static constexpr int kBlocks = D / 64;  // 64 columns of V
  static constexpr int kPitch = result_pitch(D);

  float acc[kBlocks][8][4];
  float peak[2];  // of both rows, the same in all lanes of a quad
  float sum[2];   // of this lane's keys

  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc[b][j][0] = acc[b][j][1] = acc[b][j][2] = acc[b][j][3] = 0;
      }
    }
    peak[0] = peak[1] = -kInfinity;
    sum[0] = sum[1] = 0;
  }

  // Raises the maxima, where any of the warp's is higher.
  __device__ void raise(const float (&base)[2]) {
    if (!__any_sync(~0u, base[0] > peak[0] || base[1] > peak[1])) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shrink = shrinking(peak[half], base[half]);
      peak[half] = base[half];
      sum[half] *= shrink;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          acc[b][j][half * 2] *= shrink;
          acc[b][j][half * 2 + 1] *= shrink;
        }
      }
    }
  }

  // Makes weights of the scores, which times `unit` are in units of log2(e).
  __device__ uint4 weigh(float (&scores)[2][4], float unit) {
    float base[2];
    find_peaks<2>(scores, unit, peak, base);
    raise(base);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float zero = base[half] == -kInfinity ? 0.0f : base[half];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n][half * 2 + e];
          score = exp2_approx(fmaf(score, unit, -zero));
          sum[half] += score;
        }
      }
    }
    return make_uint4(
        pack(scores[0][0], scores[0][1], T{}), pack(scores[0][2], scores[0][3], T{}), pack(scores[1][0], scores[1][1], T{}),
        pack(scores[1][2], scores[1][3], T{}));
  }

  // Adds columns 64 * b and on of the values of a lane's four keys.
  __device__ void add(const uint4& weights, int b, const uint4 (&values)[4]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint2 fragment = value_fragment(values, j);
      mma(acc[b][j], weights, fragment.x, fragment.y, T{});
    }
  }

  // Writes the rows of those from `first` on that are below `rows` into shared memory.
  __device__ void put_rows(float* to, int pitch, int first, int rows = 1 << 30) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
      if (row >= rows) {
        return;
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // four columns of eight
          const int e = half * 2 + i / 2;
          const int j = i % 2 * 4;
          *reinterpret_cast<float4*>(to + row * pitch + b * 64 + c * 16 + i * 4) =
              make_float4(acc[b][j][e], acc[b][j + 1][e], acc[b][j + 2][e], acc[b][j + 3][e]);
        }
      }
    }
  }

  // The same of `held` rows of a slice, [slice][row][kPitch], and [slice][row][maximum, sum].
  __device__ void put(float* results, float* scales, int slice, int first, int held) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
      sum[half] = quad_sum(sum[half]);
      if (row < held && threadIdx.x % 4 == 0) {
        *reinterpret_cast<float2*>(scales + (slice * held + row) * 2) = make_float2(peak[half], sum[half]);
      }
    }
    put_rows(results + slice * held * kPitch, kPitch, first, held);
  }

  // The slices of a block put the rows that anybody holds into shared memory, then all threads merge and write them.
  __device__ void write(const DecodeParams& p, const Segment& s, float* results, int slice, int slices, int first, int held) {
    float* scales = results + slices * held * kPitch;
    __syncthreads();
    put(results, scales, slice, first, held);
    __syncthreads();
    merge_slices<T, kPitch>(p, s, results, scales, slices, held);
  }
};

}  // namespace mlx_cuda
