// What happens to the scores of a tile, as wgmma leaves them in registers: softcap, masks, and the keys that a row does not see.
#pragma once

#include "kernels/flash_tiles.cuh"
#include "kernels/mma.cuh"
#include "kernels/numbers.cuh"
#include "kernels/vector.cuh"

namespace mlx_cuda {

// softcap * log2(e) * tanh(scale / softcap * score) for each score, as score * fit(score^2) where the tangent's argument is at
// most 1.
template <int N>
__device__ inline void apply_softcap(const FlashCap& cap, float (&scores)[N]) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    top = fmaxf(top, fabsf(scores[i]));
  }
  if (__any_sync(~0u, !(top * cap.inner <= 1.0f))) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = fmaf(-2.0f * cap.outer, reciprocal_approx(exp2_approx(2.0f * kLog2e * cap.inner * scores[i]) + 1.0f), cap.outer);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float square = scores[i] * scores[i];
    float ratio = fmaf(cap.fit[4], square, cap.fit[3]);
    ratio = fmaf(ratio, square, cap.fit[2]);
    ratio = fmaf(ratio, square, cap.fit[1]);
    scores[i] *= fmaf(ratio, square, cap.fit[0]);
  }
}

// The words that the four lanes of a quad want of each other: lane c gives its word number o to lane o, and has the words of lanes
// 0, 1, 2, 3 afterwards.
__device__ inline void exchange(unsigned (&words)[4]) {
  const int lane = threadIdx.x % 4;
  unsigned got[4];
#pragma unroll
  for (int turn = 0; turn < 4; ++turn) {
    const int other = lane ^ turn;
    const unsigned given = other == 0 ? words[0] : other == 1 ? words[1] : other == 2 ? words[2] : words[3];
    const unsigned word = __shfl_xor_sync(~0u, given, turn);
    got[0] = other == 0 ? word : got[0];
    got[1] = other == 1 ? word : got[1];
    got[2] = other == 2 ? word : got[2];
    got[3] = other == 3 ? word : got[3];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = got[i];
  }
}

// Adds an additive mask to the scores of one row, which come out in units of log2(e).
template <typename T, int KN>
__device__ inline void add_bias(const FlashParams& p, const T* row, float (&scores)[KN / 2], int half, int key0, float factor) {
  const int lane = threadIdx.x % 4;
  auto add = [&](float& score, float bias) {
    // A finite number stays finite, however low.
    score = bias == -kInfinity ? bias : fmaxf(fmaf(kLog2e, bias, score * factor), -kLargest);
  };
  const T* from = row + key0 * p.mask.strides[3];
  const bool aligned = p.mask.strides[3] == 1 && key0 + KN <= p.kv_length && reinterpret_cast<unsigned long long>(from) % 16 == 0;
  if (__all_sync(~0u, aligned)) {
#pragma unroll
    for (int block = 0; block < KN / 32; ++block) {
      const uint4 loaded = load16<true>(from + block * 32 + lane * 8);
      unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      exchange(words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = unpack(words[j], T{});
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

// One tile's scores on their way to weights: what the options say is done, hidden ones are -inf. Returns the unit of the result in
// log2(e). `rows`: the two rows of this thread; bounds: the keys that they see.
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
        const int row = min(rows[half], place.rows - 1);
        const unsigned* words = p.mask.bits + place.batch * p.mask.bit_strides[0] + place.head * p.mask.bit_strides[1] +
                                row * p.mask.bit_strides[2] + key0 / 32;
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
        const int row = min(rows[half], place.rows - 1);
        const T* from = static_cast<const T*>(p.mask.values) + place.batch * p.mask.strides[0] + place.head * p.mask.strides[1] +
                        row * p.mask.strides[2];
        add_bias<T, KN>(p, from, scores, half, key0, factor);
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
