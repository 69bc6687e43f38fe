// A block's part of a token's attention before results are merged: heads are prepared (norms, RoPE, the append to the KV cache),
// and each warp attends to tiles of 16 keys. Every block prepares its queries by itself, and that with the token's own key prepares
// this as well, so that no warp waits for its way through memory.
#pragma once

#include "attention/decode/tile.cuh"
#include "decoding/heads/heads.cuh"
#include "decoding/token/params.h"

namespace mlx_cuda {

// Some of the keys in memory.
struct EarlierKeys {
  int begin;
  int last;   // after them
  int fresh;  // the token's own, which is not in memory yet

  __device__ bool has(int key) const {
    return key >= begin && key < last && key != fresh;
  }
};

// `Warps`: of the block; `Ahead`: whether there are registers for the next tile before a tile's values are used.
template <typename T, int D, int Warps, bool Ahead>
class TokenPart {
  static constexpr TokenTraits kTraits{D};
  static constexpr int kTileKeys = DirectTraits::kTileKeys;
  static constexpr int kStep = Warps * kTileKeys;

 public:
  // Part `part` of `parts` of the keys of a unit: a kv head, or some of its rows. `memory`: TokenTraits::part_bytes, shared.
  // `thread`: of those that compute it.
  __device__ TokenPart(const TokenParams& p, void* memory, int thread, int part, int parts, int unit, int batch)
      : p_(p.decode),
        h_(p.heads),
        queries_(static_cast<T*>(memory)),
        fresh_rows_(queries_ + kTraits.query_bytes() / 2),
        rows_(p.rows),
        lane_(thread % 32),
        warp_(thread / 32),
        part_(part),
        parts_(parts),
        kv_head_(unit / p.row_blocks),
        first_row_(unit % p.row_blocks * p.rows),
        batch_(batch) {}

  // Loads the first tile.
  __device__ void begin() {
    const int end = end_ahead(p_, batch_);
    there_.fresh = __ldcg(h_.where + h_.batch);
    there_.begin = p_.starts ? max(p_.starts[batch_], 0) : 0;
    if (p_.window_left >= 0) {
      there_.begin = max(there_.begin, end - 1 - p_.window_left);
    }
    const int all = there_.begin / kTileKeys * kTileKeys;
    const int tiles = (end - all + kTileKeys - 1) / kTileKeys;
    const int keys = max((tiles + parts_ - 1) / parts_, 1) * kTileKeys;
    const int first = all + part_ * keys;
    there_.last = min(end, first + keys);
    has_fresh_ = part_ == min(max(there_.fresh - all, 0) / keys, parts_ - 1);
    tile_ = first + warp_ * kTileKeys;
    load_keys();
    load_values();
    ask_ahead<T>(p_, batch_, kv_head_, first + kStep, there_.last, warp_ * 32 + lane_, Warps * 32);
  }

  // `settle` waits for the projections, with a barrier of the block; `read(head, kind, row)` reads one of their rows. A barrier
  // must follow.
  template <typename Settle, typename Read>
  __device__ void make_heads(const Settle& settle, const Read& read) const {
    for (int index = warp_ * 32 + lane_; index < kTraits.query_bytes() / 16; index += Warps * 32) {
      reinterpret_cast<uint4*>(queries_)[index] = make_uint4(0, 0, 0, 0);
    }
    const int queries = min(rows_, p_.group - first_row_);
    const int heads = queries + (has_fresh_ ? 2 : 0);
    const auto kind_of = [&](int index) {
      return index < queries ? 0 : min(index - queries + HeadsParams::kKeys, HeadsParams::kValues);
    };
    Head<T, D> head;
    head.read_norms(h_, kind_of(warp_));
    Turns<D> turns;
    turns.make(h_, position_of(h_, batch_));
    settle();
#pragma unroll 1
    for (int index = warp_; index < heads; index += Warps) {
      const int kind = kind_of(index);
      if (index != warp_) {
        head.read_norms(h_, kind);
      }
      const int row = batch_ * p_.kv_heads + kv_head_;
      read(head, kind, kind == 0 ? row * p_.group + first_row_ + index : row);
      make(head, kind, index, turns);
    }
  }

  // Computes the sums of the warp's keys.
  __device__ void attend() {
    clear();
#pragma unroll 1
    while (tile_ < there_.last) {
      const int tile = tile_;
      const int fresh = there_.fresh - tile;
      const bool is_here = fresh >= 0 && fresh < kTileKeys;
      if (is_here) {
        take_fresh(fresh);
      }
      float scores[4] = {};
      multiply(scores);
      tile_ += kStep;
      if constexpr (Ahead) {
        load_keys();
      }
      const float unit = restrict_scores(scores, tile);
      weigh(scores, unit);
      add(scores);
      if constexpr (!Ahead) {
        load_keys();
      }
      load_values();
    }
  }

  // Gives the sums to `put(row, column, float4)`, and maxima and sums of weights, by all lanes of a row, to `put_scale`.
  template <typename PutScale, typename Put>
  __device__ void give(const PutScale& put_scale, const Put& put) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = lane_ % 4 * 2 + e;
      const float sum = of_near_lanes<4, 32>(sum_[e], Sum{});
      if (row >= rows_) {
        continue;
      }
      put_scale(row, peak_[e], sum);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const auto& low = acc_[i / 2][i % 2 * 2];
        const auto& high = acc_[i / 2][i % 2 * 2 + 1];
        put(row, i / 2 * 64 + lane_ / 4 * 8 + i % 2 * 4, make_float4(low[e], low[2 + e], high[e], high[2 + e]));
      }
    }
  }

 private:
  __device__ void make(const Head<T, D>& head, int kind, int index, const Turns<D>& turns) const {
    float* const on_the_way = reinterpret_cast<float*>(fresh_rows_ + 2 * D) + warp_ * D;
    T* mine = queries_ + index * kTraits.query_pitch();
    T* to = mine;
    if (kind != 0) {
      mine = fresh_rows_ + (kind - HeadsParams::kKeys) * D;
      to = static_cast<T*>(h_.caches[kind - HeadsParams::kKeys]) +
           (static_cast<long long>(batch_ * p_.kv_heads + kv_head_) * h_.capacity + there_.fresh) * h_.dim;
    }
    head.make(h_, kind, turns, on_the_way, [&](int column, T value) { mine[column] = to[column] = value; });
  }

  // --------------------------------------------------------------------------------------------------------------------- tiles
  // Keys are the rows of A and queries the columns of B, as a group has few: lane 4 * g + c has the scores of keys g and g + 8 and
  // rows 2c and 2c + 1. Sums have their columns as rows: those of a lane are 8 * g to 8 * g + 7 of each 64, for the same two rows.
  __device__ void load_keys() {
    if (tile_ < there_.last) {
      const T* k = static_cast<const T*>(p_.k) + batch_ * p_.k_strides.batch + kv_head_ * p_.k_strides.head;
      mlx_cuda::load_keys<T, D>(p_, there_, k, tile_, keys_);
    }
  }
  __device__ void load_values() {
    if (tile_ < there_.last) {
      const T* v = static_cast<const T*>(p_.v) + batch_ * p_.v_strides.batch + kv_head_ * p_.v_strides.head;
      mlx_cuda::load_values<T, D>(p_, there_, v, tile_, values_);
    }
  }

  // The token's own key and value into their place in a tile.
  __device__ void take_fresh(int key) {
    const auto* const rows = reinterpret_cast<const uint4*>(fresh_rows_);
    const int g = lane_ / 4;
    const int c = lane_ % 4;
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2 * (D / 32); ++i) {
      const int column = i / 2 * 32 + c * 8;
      if (key == i % 2 * 8 + g) {
        keys_[i % 2][i / 2] = column < h_.dim ? rows[column / 8] : none;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * (D / 64); ++i) {
      const int column = i / 4 * 64 + g * 8;
      if (key == value_key(i % 4)) {
        values_[i / 4][i % 4] = column < h_.dim ? rows[(D + column) / 8] : none;
      }
    }
  }

  __device__ void multiply(float (&scores)[4]) const {
    const T* const mine = queries_ + lane_ / 4 * kTraits.query_pitch() + lane_ % 4 * 8;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const uint4 q = *reinterpret_cast<const uint4*>(mine + i * 32);
      const uint4& low = keys_[0][i];
      const uint4& high = keys_[1][i];
      mma(scores, make_uint4(low.x, high.x, low.y, high.y), q.x, q.y, T{});
      mma(scores, make_uint4(low.z, high.z, low.w, high.w), q.z, q.w, T{});
    }
  }

  // The remaining factor of the scores: the scale, or 1 where it is applied.
  __device__ float restrict_scores(float (&scores)[4], int tile) const {
    if (p_.plain && tile >= there_.begin && tile + kTileKeys <= there_.last) {
      return p_.scale;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = tile + i / 2 * 8 + lane_ / 4;
      scores[i] = key >= there_.begin && key < there_.last ? capped(p_, scores[i] * p_.scale) : -kInfinity;
    }
    return 1.0f;
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      acc_[i / 16][i / 4 % 4][i % 4] = 0;
    }
    peak_[0] = peak_[1] = -kInfinity;
    sum_[0] = sum_[1] = 0;
  }

  // Makes weights of the scores, which times `unit` are in units of log2(e).
  __device__ void weigh(float (&scores)[4], float unit) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float top = of_near_lanes<4, 32>(nan_max(scores[row], scores[2 + row]), NanMax{});
      const float base = nan_max(top * unit, peak_[row]);
      const float shrink = shrinking_approx(peak_[row], base);
      peak_[row] = base;
      sum_[row] *= shrink;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        acc_[i / 8][i / 2 % 4][i % 2 * 2 + row] *= shrink;
      }
      const float zero = base == -kInfinity ? 0.0f : base;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[i * 2 + row];
        score = exp2_approx(fmaf(score, unit, -zero));
        sum_[row] += score;
      }
    }
  }

  __device__ void add(const float (&weights)[4]) {
    const unsigned low = transposed(pack(weights[0], weights[1], T{}));
    const unsigned high = transposed(pack(weights[2], weights[3], T{}));
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 even = value_fragment(values_[b], 2 * j);
        const uint2 odd = value_fragment(values_[b], 2 * j + 1);
        mma(acc_[b][j], make_uint4(even.x, odd.x, even.y, odd.y), low, high, T{});
      }
    }
  }

  const DecodeParams& p_;
  const HeadsParams& h_;
  T* const queries_;     // [row][query_pitch]
  T* const fresh_rows_;  // the token's key and value
  const int rows_;
  const int lane_;
  const int warp_;
  const int part_;
  const int parts_;
  const int kv_head_;
  const int first_row_;
  const int batch_;
  EarlierKeys there_{};
  bool has_fresh_ = false;  // whether this part has the token's key
  int tile_ = 0;            // that is loaded
  uint4 keys_[2][D / 32];
  uint4 values_[D / 64][4];
  float acc_[D / 64][4][4];
  float peak_[2];  // of both rows, and
  float sum_[2];   // of this lane's keys
};

}  // namespace mlx_cuda
