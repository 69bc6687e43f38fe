// Softcap and masks on the scores of a tile, in the registers of wgmma's accumulator.
#pragma once

#include "attention/flash/kernels.h"
#include "attention/flash/mask.cuh"
#include "attention/flash/softcap.cuh"
#include "attention/flash/tiles.cuh"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// Adds an additive mask to the scores of one row, which come out in units of log2(e).
template <typename T, int KN>
__device__ inline void add_bias(
    const FlashParams& p, const T* row, float shift, float (&scores)[KN / 2], int half, int key0, float factor) {
  const int lane = threadIdx.x % 4;
  auto add = [&](float& score, float bias) {
    // A finite number stays finite, however low.
    score = bias == -kInfinity ? bias : nan_max(fmaf(kLog2e, bias - shift, score * factor), -kLargest);
  };
  const T* from = row + key0 * p.mask.strides[3];
  const bool aligned = p.mask.strides[3] == 1 && key0 + KN <= p.kv_length && reinterpret_cast<unsigned long long>(from) % 16 == 0;
  if (__all_sync(~0u, aligned)) {
#pragma unroll
    for (int block = 0; block < KN / 32; ++block) {
      const uint4 loaded = load16<true>(from + block * 32 + lane * 8);
      unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const uint4 mine = gather_quad(words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = unpack(word(mine, j), T{});
        add(scores[(block * 4 + j) * 4 + half * 2], bias.x);
        add(scores[(block * 4 + j) * 4 + half * 2 + 1], bias.y);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = key0 + 8 * j + 2 * lane + e;
      add(scores[j * 4 + half * 2 + e], key < p.kv_length ? to_float(row[key * p.mask.strides[3]]) : -kInfinity);
    }
  }
}

// Adds tiles of an additive mask, as the copy engine leaves them in shared memory, to the scores of this thread's two rows: 64
// columns of all rows of the block, each row 128 bytes whose eighths are swizzled, after another.
//
// Scores stay raw, which costs the least, where a row's largest number is moderate and surely seen. Elsewhere (`scaled`) they come
// out in units of log2(e), in which even the lowest numbers are compared exactly.
template <typename T, int KN, int Rows>
struct TileBias {
  unsigned offset;  // of this thread's first two columns
  unsigned half;    // from one row to the other
  float unit;
  float factor;
  float shift[2];
  bool scaled;  // the same for a warp

  TileBias() = default;
  __device__ TileBias(const FlashParams& p, const Place& place, const int (&rows)[2]) {
    const bool own_rows = p.mask.strides[2] != 0;
    const int row = own_rows ? rows[0] - place.row0 : 0;
    offset = row * 128 + row % 8 * 16 + threadIdx.x % 4 * 4;
    half = own_rows ? 8 * 128 : 0;
    unit = p.scale * kLog2e;
    factor = 1.0f / p.scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shift[i] = mask_shift(p, place.batch, place.head, min(rows[i], place.rows - 1));
    }
    const bool partly_seen = p.window_left >= 0 || p.window_right >= 0 || p.starts || p.ends;
    scaled = __any_sync(~0u, partly_seen || shift[0] != 0 || shift[1] != 0);
  }

  // Before any score. Raw ones of large numbers have rounding errors as large as these: until a moderate number comes, weights
  // may be anything finite.
  __device__ float first_peak() const {
    return scaled ? -kInfinity : -536870912.0f / unit;
  }

  // In which the scores come out.
  __device__ float unit_of_scores() const {
    return scaled ? 1.0f : unit;
  }

  __device__ void add(float (&scores)[KN / 2], const char* tile) const {
    scaled ? add<true>(scores, tile) : add<false>(scores, tile);
  }
  __device__ void add_nothing(float (&scores)[KN / 2]) const {
    if (scaled) {
#pragma unroll
      for (int i = 0; i < KN / 2; ++i) {
        scores[i] *= unit;
      }
    }
  }

 private:
  template <bool Scaled>
  __device__ void add(float (&scores)[KN / 2], const char* tile) const {
    const unsigned first = shared_address(tile) + offset;
#pragma unroll
    for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 bias = unpack(load4_shared((first ^ j % 8 * 16) + j / 8 * Rows * 128 + i * half), T{});
        put<Scaled>(scores[j * 4 + i * 2], bias.x, i);
        put<Scaled>(scores[j * 4 + i * 2 + 1], bias.y, i);
      }
    }
  }

  template <bool Scaled>
  __device__ void put(float& score, float bias, int i) const {
    if constexpr (Scaled) {
      score = bias == -kInfinity ? bias : nan_max(fmaf(kLog2e, bias - shift[i], score * unit), -kLargest);
    } else {
      score = fmaf(bias, factor, score);
    }
  }
};

// Softcap, bias and masks on one tile's scores; masked ones are -inf. Returns the unit of the result in log2(e). `rows`: the two
// rows of this thread; bounds: the keys that they see.
template <typename T, int KN, FlashKind Kind>
__device__ inline float restrict_scores(
    const FlashParams& p,
    const Place& place,
    float (&scores)[KN / 2],
    int key0,
    const int (&rows)[2],
    const int (&lows)[2],
    const int (&highs)[2],
    bool whole,
    bool masked) {
  const int column = 2 * (threadIdx.x % 4);
  float unit = p.scale * kLog2e;
  if (Kind == FlashKind::capped || (Kind == FlashKind::general && p.softcap > 0)) {
    apply_softcap(p.cap, scores);
    unit = 1.0f;
  }
  if constexpr (Kind == FlashKind::general) {
    if (masked && p.mask.bits) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = min(rows[half], place.rows - 1);
        hide(row);
        const unsigned* words = mask_bits(p, place.batch, place.head, row) + key0 / 32;
#pragma unroll
        for (int w = 0; w < KN / 32; ++w) {
          const unsigned bits = words[w] >> column;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& score = scores[(w * 4 + j) * 4 + half * 2 + e];
              score = bits >> (8 * j + e) & 1 ? score : -kInfinity;
            }
          }
        }
      }
    } else if (masked) {
      const float factor = unit;
      unit = 1.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = min(rows[half], place.rows - 1);
        hide(row);
        const T* from = mask_values<T>(p, place.batch, place.head, row);
        add_bias<T, KN>(p, from, mask_shift(p, place.batch, place.head, row), scores, half, key0, factor);
      }
    }
  }
  if (!whole) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key0 + 8 * j + column + e;
          float& score = scores[j * 4 + half * 2 + e];
          score = key >= lows[half] && key < highs[half] ? score : -kInfinity;
        }
      }
    }
  }
  return unit;
}

}  // namespace mlx_cuda
