// The block of the kernels of flash.cu (FlashAttention-2, arXiv:2307.08691): a tile of rows of one head, and a loop over tiles of
// keys. Scores and weights stay in registers, with an online softmax.
//
// If head_dim is too large for one warp to hold 16 rows of the output, several warps ("parts") share the rows: each computes the
// scores of its part of the keys, they exchange maxima and weights through shared memory, and each accumulates its part of the
// columns.
#pragma once

#include "attention/flash/kernels.h"
#include "attention/flash/loads.cuh"
#include "attention/flash/mask.cuh"
#include "attention/flash/softcap.cuh"
#include "attention/flash/threads.cuh"
#include "attention/flash/tiles.cuh"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// A maximum may be this much too low, in units of log2: weights grow to 64 at most, and the sums are scaled less often.
[[maybe_unused]] constexpr float kSlack = 6;

// How much of a tile of keys the rows of a warp see.
enum class View { none, partial, whole };

// A block and a thread's part of its rows and columns, in the layout of mma.sync accumulators: of each 16 rows g and g + 8, of
// each 8 columns 2 c and 2 c + 1. Arrays are outside, so that everything else is in registers at once.
template <typename T, FlashShape S>
class FlashBlock : FlashThreads<S> {
  static constexpr bool kFloat = sizeof(T) == 4;
  static constexpr int kWarpRows = S.row_tiles * 16;
  static constexpr int kKeyTiles = S.keys / S.parts / 8;   // of 8 keys, whose scores a warp makes
  static constexpr int kColumns = S.v_head_dim / S.parts;  // of the output, that a warp sums up
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kSteps = S.head_dim * S.itemsize / 32;  // of a GEMM over head_dim
  static_assert(sizeof(T) == S.itemsize && kKeyTiles % 2 == 0 && S.keys % 32 == 0 && !(kFloat && S.parts > 1));
  static_assert(!S.swizzled() || (S.pitch() % 128 == 0 && kColumns * S.itemsize % 128 == 0));  // as along() needs

  using Scores = float[S.row_tiles][kKeyTiles][4];  // and then weights
  using RowNumbers = float[S.row_tiles][2];         // of rows g and g + 8

 public:
  using Queries = uint4[S.holds_queries ? S.row_tiles : 1][S.holds_queries ? kSteps : 1];

  struct Sums {
    float out[S.row_tiles][kColumnTiles][4];
    RowNumbers peak;  // maxima so far, in units of log2, the same in all lanes of a quad
    RowNumbers sum;   // of this lane's keys
  };

  __device__ FlashBlock(const FlashParams& params, const Place& place, uint4* memory)
      : p(params), place(place), load(params, place, shared_address(memory)), memory(memory) {
    const unsigned shared = shared_address(memory);
    shared_weights = shared + S.weights_at();
    row_numbers = reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + S.row_numbers_at());
    // A lane's address for ldmatrix: rows 8 (m % 2) or 8 (m / 2) of matrix m.
    q_address = shared + (group() * kWarpRows + lane() % 16) * S.pitch() + unit_at(lane() / 16);
    k_address =
        shared + S.keys_at() + (part() * kKeyTiles * 8 + lane() / 16 * 8 + lane() % 8) * S.pitch() + unit_at(lane() / 8 % 2);
    v_address =
        kFloat ? shared + S.values_at() + 2 * c() * S.value_pitch() + g() * 4
               : shared + S.values_at() + lane() % 16 * S.value_pitch() + unit_at(lane() / 16) + part() * kColumns * S.itemsize;
    weight_address = shared_weights + (group() * kWarpRows + lane() % 16) * S.weight_pitch() + lane() / 16 * 16;

    warp_row0 = place.row0 + group() * kWarpRows;
    const int warp_last = min(warp_row0 + kWarpRows, place.rows) - 1;
    const bool idle = warp_last < warp_row0;
    seen_from = place.lowest(warp_row0);
    seen_to = idle ? seen_from : place.highest(warp_last);
    whole_from = place.lowest(warp_last);
    whole_to = place.highest(warp_row0);
  }

  static __device__ void clear(Sums& sums) {
    for_each_row([&](int t, int half) {
      sums.peak[t][half] = -kInfinity;
      sums.sum[t][half] = 0;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        sums.out[t][j][half * 2] = sums.out[t][j][half * 2 + 1] = 0;
      }
    });
  }

  // Copies the queries, and begins to copy the first tile of keys (with more stages, of values as well).
  __device__ void begin(int tile, Queries& held_queries) const {
    load.queries();
    commit_copies();
    load.keys(tile, 0);
    if constexpr (S.stages > 1) {
      load.values(tile, 0);
    }
    commit_copies();
    if constexpr (S.holds_queries || kFloat) {
      wait_copies<1>();
      __syncthreads();
    }
    if constexpr (kFloat) {
      constexpr int fours = S.head_dim / 4;
      for (int i = threadIdx.x; i < S.rows() * fours; i += S.threads()) {
        round_to_tf32(reinterpret_cast<float*>(memory) + i / fours * (S.pitch() / 4) + i % fours * 4);
      }
    }
    if constexpr (S.holds_queries) {
#pragma unroll
      for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          held_queries[t][s] = load_matrices(along<S.swizzled()>(q_address + t * 16 * S.pitch(), s * 32));
        }
      }
    }
  }

  // Accumulates a tile of keys, and begins to load the next.
  __device__ void visit(const Tile& tile, const Tile& next, bool last, int stage, const Queries& held_queries, Sums& sums) const {
    const int key0 = place.first_key(tile.index, S.keys);
    const View view = view_of(key0, tile.masked);

    wait_copies<0>();
    __syncthreads();
    if constexpr (S.stages > 1) {
      if (!last) {
        load.keys(next.index, stage ^ 1);
        load.values(next.index, stage ^ 1);
      }
    } else {
      load.values(tile.index, 0);
    }
    commit_copies();

    Scores scores;
    if (view != View::none) {
      multiply_keys(scores, held_queries, stage);
    }
    if constexpr (S.stages == 1) {
      wait_copies<0>();
      __syncthreads();  // the values have arrived, and the keys are no longer read
      if (!last) {
        load.keys(next.index, 0);
      }
      commit_copies();
    }
    if (view != View::none) {
      const float unit = restrict_scores(scores, key0, view);
      soften(scores, unit, sums);
      if constexpr (kFloat) {
        add_values_tf32(scores, stage, sums);
      } else {
        add_values(scores, stage, sums);
      }
    }
  }

  // Writes the rows of the output, and their log-sum-exp.
  __device__ void finish(Sums& sums) const {
    for_each_row([&](int t, int half) {
      sums.sum[t][half] = quad_sum(sums.sum[t][half]);
      if constexpr (S.parts > 1) {
        if (t == 0 && half == 0) {
          meet();  // the maxima have been read
        }
        show(t, half, sums.sum[t][half]);
      }
    });
    if constexpr (S.parts > 1) {
      meet();
    }
    const float sink = p.sinks ? kLog2e * to_float(static_cast<const T*>(p.sinks)[place.head]) : -kInfinity;
    float* lse = p.lse && c() == 0 && part() == 0
                     ? p.lse + place.batch * p.lse_strides[0] + place.head * p.lse_strides[1] + place.q_offset
                     : nullptr;
    const long long row_stride = p.out_strides.row;
    T* to = static_cast<T*>(p.out) + place.batch * p.out_strides.batch + place.head * p.out_strides.head +
            place.q_offset * row_stride + part() * kColumns;
    const int columns = p.v_head_dim - part() * kColumns;
    const int length = place.rows;
    for_each_row([&](int t, int half) {
      const int row = warp_row0 + t * 16 + half * 8 + g();
      const bool there = row < length;
      const float factor = normalize(sums, t, half, sink, there && lse ? lse + row : nullptr);
      write_row(sums, t, half, factor, to + row * row_stride, there, columns);
    });
    wait_copies<0>();
  }

 private:
  using Threads = FlashThreads<S>;
  using Threads::block_row, Threads::c, Threads::for_each_row, Threads::g, Threads::group, Threads::lane, Threads::part,
      Threads::unit_at;

  __device__ View view_of(int key0, bool masked) const {
    const int key1 = key0 + S.keys;
    const View view = !masked && key0 >= whole_from && key1 <= whole_to ? View::whole : View::partial;
    return key0 < seen_to && key1 > seen_from ? view : View::none;
  }

  // Q K^T of a tile.
  __device__ void multiply_keys(Scores& scores, const Queries& held_queries, int stage) const {
#pragma unroll
    for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        scores[t][n][0] = scores[t][n][1] = scores[t][n][2] = scores[t][n][3] = 0;
      }
    }
    const unsigned from = k_address + (S.stages > 1 ? stage * S.keys * S.pitch() : 0);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint4 a[S.row_tiles];
#pragma unroll
      for (int t = 0; t < S.row_tiles; ++t) {
        if constexpr (S.holds_queries) {
          a[t] = held_queries[t][s];
        } else {
          a[t] = load_matrices(along<S.swizzled()>(q_address + t * 16 * S.pitch(), s * 32));
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint4 b = load_matrices(along<S.swizzled()>(from + n * 8 * S.pitch(), s * 32));
        if constexpr (kFloat) {
          b = make_uint4(
              to_tf32(__uint_as_float(b.x)), to_tf32(__uint_as_float(b.y)), to_tf32(__uint_as_float(b.z)),
              to_tf32(__uint_as_float(b.w)));
        }
#pragma unroll
        for (int t = 0; t < S.row_tiles; ++t) {
          mma(scores[t][n], a[t], b.x, b.y, T{});
          mma(scores[t][n + 1], a[t], b.z, b.w, T{});
        }
      }
    }
  }

  // Softcap and masks: hidden scores become -inf. Returns the unit of the scores then, in units of log2.
  __device__ float restrict_scores(Scores& scores, int key0, View view) const {
    float unit = scale;
    if (S.general && p.softcap > 0) {
      unit = 1;
#pragma unroll
      for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[t][n][i] = capped(scores[t][n][i], p.cap.inner, p.cap.outer);
          }
        }
      }
    }
    if (view == View::partial) {
      for_each_row([&](int t, int half) {
        const int row = min(warp_row0 + t * 16 + half * 8 + g(), place.rows - 1);
        restrict_row<T, S.general>(p, place, scores[t], row, half, unit, key0 + part() * kKeyTiles * 8);
      });
      unit = S.general && p.mask.values ? 1.0f : unit;
    }
    return unit;
  }

  // The online softmax: scores become weights, and what has been summed so far shrinks where a maximum grows.
  __device__ void soften(Scores& scores, float unit, Sums& sums) const {
    RowNumbers top;
    row_maxima(scores, top);
    bool higher = false;
    for_each_row([&](int t, int half) {
      top[t][half] *= unit;
      higher = higher || top[t][half] > sums.peak[t][half] + kSlack;
    });
    if (__any_sync(~0u, higher)) {
      for_each_row([&](int t, int half) {
        const float most = nan_max(top[t][half], sums.peak[t][half]);
        const float shrink = most == -kInfinity ? 0.0f : exp2_approx(sums.peak[t][half] - most);
        sums.peak[t][half] = most;
        sums.sum[t][half] *= shrink;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          sums.out[t][j][half * 2] *= shrink;
          sums.out[t][j][half * 2 + 1] *= shrink;
        }
      });
    }
    for_each_row([&](int t, int half) {
      const float zero = sums.peak[t][half] == -kInfinity ? 0.0f : sums.peak[t][half];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[t][n][half * 2 + e];
          score = exp2_approx(fmaf(score, unit, -zero));
          sums.sum[t][half] += score;
        }
      }
    });
  }

  // The largest score of each row of the tile.
  __device__ void row_maxima(const Scores& scores, RowNumbers& top) const {
    for_each_row([&](int t, int half) {
      float most = nan_max(scores[t][0][half * 2], scores[t][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kKeyTiles; ++n) {
        most = nan_max(most, nan_max(scores[t][n][half * 2], scores[t][n][half * 2 + 1]));
      }
      most = quad_max(most);
      if constexpr (S.parts > 1) {
        show(t, half, most);
      }
      top[t][half] = most;
    });
    if constexpr (S.parts > 1) {
      meet();
      for_each_row([&](int t, int half) {
#pragma unroll
        for (int i = 0; i < S.parts; ++i) {
          top[t][half] = nan_max(top[t][half], shown(t, half, i));
        }
      });
    }
  }

  // P V of a tile of float32. Which key is which k index is free: keys 2 c and 2 c + 1 are indices c and c + 4.
  __device__ void add_values_tf32(const Scores& weights, int stage, Sums& sums) const {
    const unsigned from = value_rows(stage);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      uint4 a[S.row_tiles];
#pragma unroll
      for (int t = 0; t < S.row_tiles; ++t) {
        const auto& w = weights[t][n];
        a[t] = make_uint4(to_tf32(w[0]), to_tf32(w[2]), to_tf32(w[1]), to_tf32(w[3]));
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const unsigned b0 = to_tf32(load_shared(from + n * 8 * S.value_pitch() + j * 32));
        const unsigned b1 = to_tf32(load_shared(from + (n * 8 + 1) * S.value_pitch() + j * 32));
#pragma unroll
        for (int t = 0; t < S.row_tiles; ++t) {
          mma(sums.out[t][j], a[t], b0, b1, T{});
        }
      }
    }
  }

  // The same for 16 bits, where warps that share rows exchange their weights.
  __device__ void add_values(const Scores& scores, int stage, Sums& sums) const {
    uint4 weights[S.row_tiles][kKeyTiles / 2];
#pragma unroll
    for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        weights[t][n / 2] = make_uint4(
            pack(scores[t][n][0], scores[t][n][1], T{}), pack(scores[t][n][2], scores[t][n][3], T{}),
            pack(scores[t][n + 1][0], scores[t][n + 1][1], T{}), pack(scores[t][n + 1][2], scores[t][n + 1][3], T{}));
      }
    }
    if constexpr (S.parts > 1) {
      share_weights(weights);
    }
    const unsigned from = value_rows(stage);
#pragma unroll
    for (int s = 0; s < S.keys / 16; ++s) {
      uint4 a[S.row_tiles];
#pragma unroll
      for (int t = 0; t < S.row_tiles; ++t) {
        if constexpr (S.parts > 1) {
          a[t] = load_matrices(weight_address + t * 16 * S.weight_pitch() + s * 32);
        } else {
          a[t] = weights[t][s];
        }
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        const uint4 b = load_matrices_transposed(along<S.swizzled()>(from + s * 16 * S.value_pitch(), j * 16));
#pragma unroll
        for (int t = 0; t < S.row_tiles; ++t) {
          mma(sums.out[t][j], a[t], b.x, b.y, T{});
          mma(sums.out[t][j + 1], a[t], b.z, b.w, T{});
        }
      }
    }
  }

  __device__ void share_weights(const uint4 (&weights)[S.row_tiles][kKeyTiles / 2]) const {
#pragma unroll
    for (int t = 0; t < S.row_tiles; ++t) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const unsigned to = shared_weights + block_row(t, 0) * S.weight_pitch() + ((part() * kKeyTiles + n) * 8 + 2 * c()) * 2;
        const uint4& both = weights[t][n / 2];
        store_shared(to, n % 2 ? both.z : both.x);
        store_shared(to + 8 * S.weight_pitch(), n % 2 ? both.w : both.y);
      }
    }
    meet();
  }

  __device__ unsigned value_rows(int stage) const {
    return v_address + (S.stages > 1 ? stage * S.keys * S.value_pitch() : 0);
  }

  // The factor of a row's sums. Writes the log-sum-exp if there is an output for it.
  __device__ float normalize(const Sums& sums, int t, int half, float sink, float* lse) const {
    float total = sums.sum[t][half];
    if constexpr (S.parts > 1) {
      total = 0;
#pragma unroll
      for (int i = 0; i < S.parts; ++i) {
        total += shown(t, half, i);
      }
    }
    const float base = nan_max(sums.peak[t][half], sink);
    float weight = 1;
    if (sink != -kInfinity) {
      weight = sums.peak[t][half] == -kInfinity ? 0.0f : exp2f(sums.peak[t][half] - base);
      total = total * weight + exp2f(sink - base);
    }
    if (lse) {
      *lse = total == 0 ? -kInfinity : (base + log2f(total)) * kLn2;
    }
    return total == 0 ? 0.0f : weight / total;  // NaN stays
  }

  __device__ void write_row(const Sums& sums, int t, int half, float factor, T* to, bool there, int columns) const {
    if constexpr (kFloat) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        if (there && j * 8 < columns) {
          *reinterpret_cast<float2*>(to + j * 8 + 2 * c()) =
              make_float2(sums.out[t][j][half * 2] * factor, sums.out[t][j][half * 2 + 1] * factor);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 4) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = pack(sums.out[t][j + i][half * 2] * factor, sums.out[t][j + i][half * 2 + 1] * factor, T{});
        }
        const uint4 block = gather_quad(words);
        if (there && (j + c()) * 8 < columns) {
          *reinterpret_cast<uint4*>(to + (j + c()) * 8) = block;
        }
      }
    }
  }

  // Between the warps that share rows: a barrier, and a number of each row and part.
  __device__ void meet() const {
    sync_some(group() + 1, S.parts * 32);
  }
  __device__ void show(int t, int half, float number) const {
    if (c() == 0) {
      row_numbers[part() * S.rows() + block_row(t, half)] = number;
    }
  }
  __device__ float shown(int t, int half, int part) const {
    return row_numbers[part * S.rows() + block_row(t, half)];
  }

  const FlashParams& p;
  const Place& place;
  const Loader<T, S> load;
  uint4* memory;
  unsigned shared_weights;
  float* row_numbers;
  unsigned q_address;
  unsigned k_address;
  unsigned v_address;
  unsigned weight_address;
  int warp_row0;
  int seen_from;  // keys that some row of this warp sees
  int seen_to;
  int whole_from;  // keys that all of them see
  int whole_to;
  float scale = p.scale * kLog2e;
};

}  // namespace mlx_cuda
