// What a warp of a decode kernel has of up to 16 rows, and how it adds a tile of 16 keys: in fragments of mma.m16n8k16, whose
// columns are chosen such that a thread has 16 adjacent elements of the output. Lane 4 * g + c has rows g and g + 8, keys 2c and 2c
// + 1 of each half tile.
#pragma once

#include "attention/decode/rows.cuh"

namespace mlx_cuda {

template <typename T, int D>
struct TileRows {
  static constexpr int kBlocks = D / 64;  // 64 columns of V
  static constexpr int kPitch = D + 4;    // of a row of results in shared memory

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

  // Makes weights of the scores, which times `unit` are in units of log2(e), and makes room for them in what there is.
  __device__ uint4 weigh(float (&scores)[2][4], float unit) {
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = fmaxf(fmaxf(scores[0][half * 2], scores[0][half * 2 + 1]), fmaxf(scores[1][half * 2], scores[1][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      base[half] = fmaxf(top * unit, peak[half]);
    }
    if (__any_sync(~0u, base[0] > peak[0] || base[1] > peak[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shrink = peak[half] == -kInfinity ? 0.0f : exp2f(peak[half] - base[half]);
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

  // Adds columns 64 * b and on of the values of keys 2c, 2c + 1, 2c + 8 and 2c + 9.
  __device__ void add(const uint4& weights, int b, const uint4 (&values)[4]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned selector = j & 1 ? 0x7632 : 0x5410;
      const unsigned b0 = __byte_perm(word(values[0], j / 2), word(values[1], j / 2), selector);
      const unsigned b1 = __byte_perm(word(values[2], j / 2), word(values[3], j / 2), selector);
      mma(acc[b][j], weights, b0, b1, T{});
    }
  }

  // Writes the rows below `held` of those from `first` on into shared memory: [slice][row][kPitch] and [slice][row][maximum, sum].
  __device__ void put(float* results, float* scales, int slice, int first, int held) {
    const int g = threadIdx.x % 32 / 4;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + g + half * 8;
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (row < held) {
        if (c == 0) {
          scales[(slice * held + row) * 2] = peak[half];
          scales[(slice * held + row) * 2 + 1] = sum[half];
        }
        float* to = results + (slice * held + row) * kPitch + c * 16;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
              const int i = half * 2 + e;
              *reinterpret_cast<float4*>(to + b * 64 + e * 8 + j) =
                  make_float4(acc[b][j][i], acc[b][j + 1][i], acc[b][j + 2][i], acc[b][j + 3][i]);
            }
          }
        }
      }
    }
  }
};

}  // namespace mlx_cuda
