// Consumer warpgroups of flash_sm90.cu: computation on the tiles that the producer loads.
#pragma once

#include "attention/flash/ring_sm90.cuh"
#include "attention/flash/scores_sm90.cuh"
#include "attention/flash/tiles.cuh"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// Warpgroups take turns on the tensor cores, so that one computes its softmax during the GEMM of the other.
template <int Groups>
struct Order {
  static constexpr int kFirst = 2;  // number of the first group's barrier
  int group;

  __device__ explicit Order(int group) : group(group) {
    if (group == Groups - 1) {
      pass();
    }
  }
  __device__ void take() const {
    sync_some(kFirst + group, 256);
  }
  __device__ void pass() const {
    arrive_some(kFirst + (group + 1) % Groups, 256);
  }
};

// The part of a piece that one consumer warpgroup has. Arrays stand outside, so that all else is in registers at once.
template <typename Traits>
class Consumer {
  using T = typename Traits::T;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kGeneral = Traits::kGeneral;

 public:
  using Scores = float[kKeys / 2];
  using Weights = unsigned[kKeys / 16][4];
  using Out = float[kHeadDim / 2];

  // Of the two rows of this thread.
  struct Sums {
    float peak[2];  // raw or in units of log2(e), as `unit` says
    float sum[2];   // of this thread's columns
    float unit;
  };

  __device__ Consumer(const FlashParams& p, const Place& place, const Tiles& tiles, const Shared<Traits>& shared, int group)
      : p(p), place(place), tiles(tiles), shared(shared), queries(shared.queries + group * 64 * 128) {
    const int row0 = place.row0 + group * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = row0 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
      lows[half] = place.lowest(rows[half]);
      highs[half] = place.highest(rows[half]);
    }
    whole_from = place.lowest(min(row0 + 63, place.rows - 1));
    whole_to = place.highest(row0);
    ragged = p.starts || p.ends || p.cu_k;
    if constexpr (Traits::kBiased) {
      bias = {p, place, rows};
    }
  }

  __device__ void clear(Out& out, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      out[i] = 0;
    }
    sums = {{-kInfinity, -kInfinity}, {0, 0}, p.scale * kLog2e};
    if constexpr (Traits::kBiased) {
      sums.peak[0] = sums.peak[1] = bias.first_peak();
      sums.unit = bias.unit_of_scores();
    }
  }

  // Begins Q K^T of a tile.
  __device__ void score(Scores& scores, int stage) const {
    const char* tile = shared.keys + stage * Traits::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const auto a = descriptor(queries + step / 4 * Traits::kRows * 128 + step % 4 * 32);
      const auto b = descriptor(tile + step / 4 * kKeys * 128 + step % 4 * 32);
      wgmma_shared(scores, a, b, step > 0, T{});
    }
    wgmma_commit();
  }

  // Begins P V of a tile.
  __device__ void add_values(Out& out, const Weights& weights, int stage) const {
    const char* tile = shared.values + stage * Traits::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_registers(out, weights[step], descriptor(tile + step * 2048, kKeys * 128), T{});
    }
    wgmma_commit();
  }

  // Turns the scores of the current tile into weights in place; returns the factors by which earlier sums shrink.
  __device__ void soften(Scores& scores, int i, const Turn<Traits>& turn, Sums& sums, float (&shrink)[2]) const {
    const Tile tile = tiles[i];
    if constexpr (Traits::kBiased) {
      add_bias(scores, tile.masked, turn);
    }
    const int key0 = place.first_key(tile.index, kKeys);
    const bool whole = key0 >= whole_from && key0 + kKeys <= whole_to;
    const float restricted =
        restrict_scores<T, kKeys, Traits::kKind>(p, place, scores, key0, rows, lows, highs, whole, kGeneral && tile.masked);
    sums.unit = Traits::kBiased ? sums.unit : restricted;
    // Masks make some tiles raw and some not: peaks of the general kernel are in units of log2(e).
    const float peak_unit = kGeneral ? 1.0f : sums.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = scores[half * 2];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = nan_max(top, nan_max(scores[j * 4 + half * 2], scores[j * 4 + half * 2 + 1]));
      }
      top = quad_max(top);
      top = nan_max(kGeneral ? top * sums.unit : top, sums.peak[half]);
      shrink[half] = top == -kInfinity ? 1.0f : exp2_approx((sums.peak[half] - top) * peak_unit);
      sums.peak[half] = top;
      const float zero = top == -kInfinity ? 0.0f : top * peak_unit;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + half * 2 + e];
          score = exp2_approx(fmaf(score, sums.unit, -zero));
          total += score;
        }
      }
      sums.sum[half] = sums.sum[half] * shrink[half] + total;
    }
  }

  static __device__ void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1], T{});
      }
    }
  }

  static __device__ void shrink_sums(Out& out, const float (&shrink)[2]) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      out[j * 4] *= shrink[0];
      out[j * 4 + 1] *= shrink[0];
      out[j * 4 + 2] *= shrink[1];
      out[j * 4 + 3] *= shrink[1];
    }
  }

  __device__ void wait_values(int i, const Turn<Traits>& turn) const {
    barrier_wait(shared.values_full + turn.stage(), turn.parity());
    const int key0 = place.first_key(tiles[i].index, kKeys);
    if (ragged && (key0 < place.begin || key0 + kKeys > place.end)) {
      clear_rows(shared.values + turn.stage() * Traits::kTileBytes, place.begin - key0, place.end - key0);
    }
  }

  __device__ void write(const Out& out, const Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = normalize(sums, half);
      const int row = rows[half];
      const int lane = threadIdx.x % 4;
      T* to = static_cast<T*>(p.out) + (p.cu_q ? 0 : place.batch * p.out_strides.batch) + place.head * p.out_strides.head +
              static_cast<long long>(place.q_offset + row) * p.out_strides.row;
      // The four lanes of a row have 2 columns of each 8: each takes 8 adjacent ones.
#pragma unroll
      for (int block = 0; block < kHeadDim / 32; ++block) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (block * 4 + j) * 4 + half * 2;
          words[j] = pack(out[at] * factor, out[at + 1] * factor, T{});
        }
        const uint4 mine = gather_quad(words);
        const int column = block * 32 + lane * 8;
        if (row < place.rows && column < p.v_head_dim) {
          *reinterpret_cast<uint4*>(to + column) = mine;
        }
      }
    }
  }

 private:
  __device__ void add_bias(Scores& scores, bool masked, const Turn<Traits>& turn) const {
    barrier_wait(shared.bias_full + turn.stage(), turn.parity());
    if (masked) {
      bias.add(scores, shared.bias + turn.stage() * Traits::kBiasBytes);
    } else {
      bias.add_nothing(scores);
    }
    barrier_arrive(shared.bias_empty + turn.stage());
  }

  // Rows of a tile of values that are not there may hold anything, and 0 * NaN is NaN.
  static __device__ void clear_rows(char* tile, int begin, int end) {
    sync_some(1, Traits::kConsumers);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    for (int i = thread; i < kKeys * (kHeadDim / 8); i += Traits::kConsumers) {
      const int row = i / (kHeadDim / 8);
      if (row < begin || row >= end) {
        const int column = i % (kHeadDim / 8);
        *reinterpret_cast<uint4*>(tile + column / 8 * kKeys * 128 + row * 128 + column % 8 * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    shared_writes_fence();
    sync_some(1, Traits::kConsumers);
  }

  // The factor of a row's sums. Writes the log-sum-exp if it is needed.
  __device__ float normalize(const Sums& sums, int half) const {
    float total = quad_sum(sums.sum[half]);
    float top = sums.peak[half] == -kInfinity || kGeneral ? sums.peak[half] : sums.peak[half] * sums.unit;
    float factor = 1.0f;
    if (p.sinks) {
      const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[place.head]);
      const float higher = nan_max(top, sink);
      factor = top == -kInfinity ? 0.0f : exp2f(top - higher);
      total = total * factor + (sink == -kInfinity ? 0.0f : exp2f(sink - higher));
      top = higher;
    }
    if (p.lse && rows[half] < place.rows && threadIdx.x % 4 == 0) {
      const long long sequence = p.cu_q ? place.q_offset : place.batch * p.lse_strides[0];
      p.lse[sequence + place.head * p.lse_strides[1] + rows[half]] = total == 0 ? -kInfinity : (top + log2f(total)) * kLn2;
    }
    return total == 0 ? 0.0f : factor / total;  // NaN stays
  }

  const FlashParams& p;
  const Place& place;
  const Tiles& tiles;
  const Shared<Traits>& shared;
  const char* queries;
  int rows[2];
  int lows[2];  // keys that they see
  int highs[2];
  int whole_from;  // keys that all rows of the warpgroup see
  int whole_to;
  bool ragged;
  TileBias<T, kKeys, Traits::kRows> bias;
};

template <typename Traits>
__device__ inline void consume(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<Traits>& shared,
    const Order<Traits::kGroups>& order,
    Turn<Traits>& turn) {
  using Part = Consumer<Traits>;
  const Part part(p, place, tiles, shared, order.group);
  typename Part::Out out;
  typename Part::Sums sums;
  part.clear(out, sums);
  if (tiles.first < tiles.last) {
    typename Part::Weights weights;
    float shrink[2];
    barrier_wait(shared.queries_full, turn.block % 2);
    {
      typename Part::Scores scores;
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      part.score(scores, turn.stage());
      wgmma_wait<0>();
      barrier_arrive(shared.keys_empty + turn.stage());
      part.soften(scores, tiles.first, turn, sums, shrink);
      part.pack_weights(scores, weights);
    }
    for (int i = tiles.first + 1; i < tiles.last; ++i) {
      const Turn<Traits> last = turn;
      ++turn.tile;
      typename Part::Scores scores;
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      part.wait_values(i - 1, last);
      order.take();
      part.score(scores, turn.stage());
      part.add_values(out, weights, last.stage());
      order.pass();
      wgmma_wait<1>();
      barrier_arrive(shared.keys_empty + turn.stage());
      part.soften(scores, i, turn, sums, shrink);
      wgmma_wait<0>();
      barrier_arrive(shared.values_empty + last.stage());
      part.shrink_sums(out, shrink);
      part.pack_weights(scores, weights);
    }
    barrier_arrive(shared.queries_empty);
    part.wait_values(tiles.last - 1, turn);
    part.add_values(out, weights, turn.stage());
    wgmma_wait<0>();
    barrier_arrive(shared.values_empty + turn.stage());
    ++turn.tile;
    ++turn.block;
  }
  part.write(out, sums);
}

}  // namespace mlx_cuda
