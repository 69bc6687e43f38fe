// The rows of a unit: their queries, the keys they see, and the layout of keys and values in shared memory.
#pragma once

#include "attention/decode/traits.h"
#include "attention/decode/work.cuh"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// The head and query of a row.
struct Row {
  int head;
  int query;
};

__device__ inline Row row_of(const DecodeParams& p, const Segment& s, int row) {
  return {s.kv_head * p.group + (s.row + row) / p.q_length, (s.row + row) % p.q_length};
}

// Eight columns of a row's query; zeros where there is none.
template <typename T>
__device__ inline uint4 query_piece(const DecodeParams& p, const Segment& s, int row, int column) {
  if (row >= s.rows || column >= p.head_dim) {
    return make_uint4(0, 0, 0, 0);
  }
  const Row place = row_of(p, s, row);
  return *reinterpret_cast<const uint4*>(
      static_cast<const T*>(p.q) + s.batch * p.q_strides.batch + place.head * p.q_strides.head + place.query * p.q_strides.row +
      column);
}

// Whether every query of a unit sees every key of a tile, and scores only need their scale.
__device__ inline bool whole_tile(const DecodeParams& p, const Segment& s, int tile) {
  return p.plain && tile >= s.span.begin && tile + p.tile_keys <= s.last &&
         (p.window_left < 0 || tile >= s.span.end - 1 - p.window_left) &&
         (p.window_right < 0 || tile + p.tile_keys - 1 <= s.span.diagonal + p.window_right);
}

__device__ inline float capped(const DecodeParams& p, float score) {
  return p.softcap > 0 ? p.softcap * kLog2e * (1.0f - 2.0f / (exp2f(2.0f * kLog2e * score) + 1.0f)) : score;
}

// A score in units of log2(e), or minus infinity where the row does not see the key.
template <typename T>
__device__ inline float restricted(const DecodeParams& p, const Segment& s, float score, const Row& row, bool there, int key) {
  score = capped(p, score * p.scale);
  const int diagonal = s.span.diagonal + row.query;
  bool seen = there && s.has(key);
  seen = seen && (p.window_left < 0 || key >= diagonal - p.window_left);
  seen = seen && (p.window_right < 0 || key <= diagonal + p.window_right);
  if (p.mask && seen) {
    const long long at =
        s.batch * p.mask_strides[0] + row.head * p.mask_strides[1] + row.query * p.mask_strides[2] + key * p.mask_strides[3];
    if (p.mask_is_bool) {
      seen = static_cast<const unsigned char*>(p.mask)[at] != 0;
    } else {
      // A finite number stays finite, however low.
      const float bias = to_float(static_cast<const T*>(p.mask)[at]);
      score = bias == -kInfinity ? bias : nan_max(fmaf(kLog2e, bias, score), -kLargest);
    }
  }
  return seen ? score : -kInfinity;
}

// The keys [x, y) that a row of the unit sees.
__device__ inline int2 keys_of(const DecodeParams& p, const Segment& s, int row) {
  const int diagonal = s.span.diagonal + (s.row + row) % p.q_length;
  const int from = p.window_left < 0 ? s.span.begin : max(s.span.begin, diagonal - p.window_left);
  const int to = p.window_right < 0 ? s.last : min(s.last, diagonal + p.window_right + 1);
  return make_int2(from, row < s.rows ? to : 0);
}

// By way of local memory and in a loop: array masks of several rows are rare, so this is kept short.
template <typename T, int Blocks>
__device__ inline void apply_mask(const DecodeParams& p, const Segment& s, float (*scores)[4], int row, int key) {
  float staged[Blocks * 4];
#pragma unroll
  for (int i = 0; i < Blocks * 4; ++i) {
    staged[i] = scores[i / 4][i % 4];
  }
#pragma unroll 1
  for (int i = 0; i < Blocks * 4; ++i) {
    const int mine = row + i % 4 / 2 * 8;
    staged[i] = restricted<T>(p, s, staged[i], row_of(p, s, mine), mine < s.rows, key + i / 4 * 8 + i % 2);
  }
#pragma unroll
  for (int i = 0; i < Blocks * 4; ++i) {
    scores[i / 4][i % 4] = staged[i];
  }
}

// Scores of a lane for keys `key`, `key` + 1 of each of `Blocks` blocks of 8 keys and for rows `row` and `row` + 8: from raw MMA
// results to units of log2(e), or minus infinity.
template <typename T, int Blocks, bool Masks = true>
__device__ inline void restrict_scores(const DecodeParams& p, const Segment& s, float (*scores)[4], int row, int key) {
  if constexpr (Masks) {
    if (p.mask) {
      apply_mask<T, Blocks>(p, s, scores, row, key);
      return;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int2 seen = keys_of(p, s, row + half * 8);
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = key + block * 8 + e;
        float& score = scores[block][half * 2 + e];
        score = at >= seen.x && at < seen.y ? capped(p, score * p.scale) : -kInfinity;
      }
    }
  }
}

// Masks the scores of a tile that begins at a key: those of `Blocks` blocks of 8 keys, from key `first` of the tile on. Returns
// their remaining factor: the scale, or 1 if it is applied.
template <typename T, int Blocks, bool Masks = true>
__device__ inline float restrict_tile(
    const DecodeParams& p, const Segment& s, float (*scores)[4], int row, int tile, int first = 0) {
  if (whole_tile(p, s, tile)) {  // as nearly all are
    return p.scale;
  }
  restrict_scores<T, Blocks, Masks>(p, s, scores, row, tile + first + 2 * static_cast<int>(threadIdx.x % 4));
  return 1.0f;
}

// The maxima of a lane's rows, with those of a tile's scores.
template <int Blocks>
__device__ inline void find_peaks(const float (*scores)[4], float unit, const float (&before)[2], float (&peak)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = nan_max(scores[0][half * 2], scores[0][half * 2 + 1]);
#pragma unroll
    for (int block = 1; block < Blocks; ++block) {
      top = nan_max(top, nan_max(scores[block][half * 2], scores[block][half * 2 + 1]));
    }
    peak[half] = nan_max(quad_max(top) * unit, before[half]);
  }
}

// The factor by which sums shrink when the maximum of their row rises; 1 if it was minus infinity.
__device__ inline float shrinking(float before, float peak) {
  return before == -kInfinity ? 0.0f : exp2f(before - peak);
}
__device__ inline float shrinking_approx(float before, float peak) {
  return before == -kInfinity ? 0.0f : exp2_approx(before - peak);
}

// The position in shared memory of a 16-byte unit of a row of K or V, swizzled within eight so that fragments of K (eight rows,
// four adjacent units) and of V (every second of eight rows, eight units) have no bank conflicts.
__device__ inline int place_of(int row, int piece) {
  return piece ^ (row & 1) << 2 ^ (row & 6);
}

}  // namespace mlx_cuda
