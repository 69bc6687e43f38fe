// A token's query, key or value of one head, by a warp: RMS norm and rotary embedding.
#pragma once

#include "decoding/heads/params.h"
#include "device/reduce.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// The angle of a batch entry's rotation, for a frequency of 1.
__device__ inline float position_of(const HeadsParams& p, int batch) {
  return p.scale * static_cast<float>(__ldcg(p.offset + batch * p.offset_distance));
}

// Sine and cosine for the pairs of a lane: pair i * 32 + lane is its pair i.
template <int Dim>
struct Turns {
  static constexpr int kMost = (Dim / 2 + 31) / 32;

  float position;
  float2 of[kMost];

  __device__ void make(const HeadsParams& p, float at) {
    const int half = p.rotated / 2;
    position = at;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int pair = i * 32 + static_cast<int>(threadIdx.x) % 32;
      if (pair < half) {
        const float frequency =
            p.freqs ? 1.0f / p.freqs[pair] : exp2f(-static_cast<float>(pair) / static_cast<float>(half) * p.log2_base);
        sincosf(position * frequency, &of[i].x, &of[i].y);
      }
    }
  }
};

// Column i * 32 + lane is the lane's value i; `Dim`: the most columns.
template <typename T, int Dim>
struct Head {
  static constexpr int kMost = Dim / 32;

  T norms[kMost];
  T row[kMost];

  // Weights are never a result of an earlier kernel: they may be read before earlier kernels end (PDL).
  __device__ void read_norms(const HeadsParams& p, int kind) {
    read(norms, kind < HeadsParams::kValues ? static_cast<const T*>(p.norms[kind]) : nullptr, p.dim);
  }
  // Of `head` of all of the batch.
  __device__ void read_row(const HeadsParams& p, int kind, int head) {
    read(row, static_cast<const T*>(p.rows[kind]) + static_cast<long long>(head) * p.dim, p.dim);
  }

  // Gives (column, value) to `put`. `values`: [dim] in shared memory, of this warp.
  template <typename Put>
  __device__ void make(const HeadsParams& p, int kind, const Turns<Dim>& turns, float* values, const Put& put) const {
    const int lane = threadIdx.x % 32;
    const bool normed = kind < HeadsParams::kValues && p.norms[kind];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float value = to_float(row[i]);
      squares = fmaf(value, value, squares);
    }
    squares = warp_sum(squares);
    const float factor = normed ? rsqrtf(squares / static_cast<float>(p.dim) + p.eps[kind]) : 0.0f;
    const int rotated = kind == HeadsParams::kValues ? 0 : p.rotated;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int at = i * 32 + lane;
      const T value = normed ? from_float<T>(to_float(row[i]) * factor * to_float(norms[i])) : row[i];
      if (at < rotated) {
        values[at] = to_float(value);
      } else if (at < p.dim) {
        put(at, value);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Turns<Dim>::kMost; ++i) {
      const int pair = i * 32 + lane;
      if (pair < rotated / 2) {
        const auto [sine, cosine] = turns.of[i];
        const int first = p.neighbours ? 2 * pair : pair;
        const int second = p.neighbours ? 2 * pair + 1 : pair + rotated / 2;
        put(first, from_float<T>(values[first] * cosine - values[second] * sine));
        put(second, from_float<T>(values[first] * sine + values[second] * cosine));
      }
    }
    __syncwarp();
  }

 private:
  __device__ static void read(T (&to)[kMost], const T* from, int dim) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      to[i] = from && i * 32 + lane < dim ? from[i * 32 + lane] : T{};
    }
  }
};

}  // namespace mlx_cuda
