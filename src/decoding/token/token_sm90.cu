// A token's attention and everything between it and the projections, in one kernel: norms and RoPE of heads, the append to the KV
// cache, and attention.
//
// A cluster computes a kv head, each of its blocks a part of the keys, each warp some tiles of 16. Every warp prepares the
// queries by itself. The token's own key is a separate tile, so that no warp waits for its way through memory. At the end each
// block gets all sums for some columns of the result.
#include "attention/decode/tile.cuh"
#include "decoding/heads/heads.cuh"
#include "decoding/token/params.h"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

extern __shared__ uint4 token_memory[];

// The keys that were there before the token, whose row may still hold another's.
struct EarlierKeys {
  const Segment& s;
  int fresh;

  __device__ bool has(int key) const {
    return s.has(key) && key != fresh;
  }
};

template <typename T, int D>
class Token {
  using Traits = TokenTraits;
  static constexpr TokenTraits kTraits{D};
  static constexpr int kTileKeys = DirectTraits::kTileKeys;
  static constexpr bool kAhead = D <= 128;  // registers for the next tile

 public:
  __device__ explicit Token(const TokenParams& p)
      : p_(p.decode),
        h_(p.heads),
        settled_(p.settled != 0),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        part_(blockIdx.x),
        kv_head_(blockIdx.y),
        batch_(blockIdx.z) {}

  __device__ void run() {
    cluster_arrive();
    if (!settled_) {
      wait_for_grids();
    }
    const int fresh = __ldcg(h_.where + h_.batch);
    const Segment s = part_of(end_ahead(p_, batch_));
    const EarlierKeys earlier{s, fresh};
    const T* k = static_cast<const T*>(p_.k) + batch_ * p_.k_strides.batch + kv_head_ * p_.k_strides.head;
    const T* v = static_cast<const T*>(p_.v) + batch_ * p_.v_strides.batch + kv_head_ * p_.v_strides.head;
    uint4 keys[2][D / 32];
    uint4 values[D / 64][4];
    int tile = s.first + warp_ * kTileKeys;
    if (tile < s.last) {
      load_keys<T, D>(p_, earlier, k, tile, keys);
      if constexpr (kAhead) {
        load_values<T, D>(p_, earlier, v, tile, values);
      }
    }
    ask_ahead<T>(p_, batch_, kv_head_, s.first + Traits::kWarps * kTileKeys, s.last);
    launch_dependents();  // whose reading of weights comes after this
    for (int index = threadIdx.x; index < kTraits.query_bytes() / 16; index += Traits::kWarps * 32) {
      queries()[index] = make_uint4(0, 0, 0, 0);
    }
    const int heads = p_.group + (is_last() ? 2 : 0);
    Head<T, D> head;
    head.read_norms(h_, kind_of(warp_));
    Turns<D> turns;
    turns.make(h_, position_of(h_, batch_));
    __syncthreads();
    if (settled_) {
      wait_for_grids();
    }
    if (warp_ < heads) {
      head.read_row(h_, kind_of(warp_), row_of_head(warp_));
    }
    for (int index = warp_; index < heads; index += Traits::kWarps) {
      if (index != warp_) {
        head.read_norms(h_, kind_of(index));
        head.read_row(h_, kind_of(index), row_of_head(index));
      }
      make(head, index, fresh, turns);
    }
    __syncthreads();

    TileRows<T, D> rows;
    rows.clear();
    while (tile < s.last) {
      const int next = tile + Traits::kWarps * kTileKeys;
      float scores[2][4] = {};
      multiply(scores, keys);
      if (kAhead && next < s.last) {
        load_keys<T, D>(p_, earlier, k, next, keys);
      }
      const float unit = restrict_tile<T, 2, false>(p_, s, scores, lane_ / 4, tile);
      hide(scores, fresh - tile);
      const uint4 weights = rows.weigh(scores, unit);
      if constexpr (!kAhead) {
        load_values<T, D>(p_, earlier, v, tile, values);
      }
      add(rows, weights, values);
      if (next < s.last) {
        if constexpr (kAhead) {
          load_values<T, D>(p_, earlier, v, next, values);
        } else {
          load_keys<T, D>(p_, earlier, k, next, keys);
        }
      }
      tile = next;
    }
    if (is_last() && warp_ == Traits::kWarps - 1) {
      add_fresh(rows, keys, values);
    }
    cluster_wait();  // the others have begun
    hand_out(rows);
    cluster_arrive();
    cluster_wait();
    merge();
  }

 private:
  __device__ bool is_last() const {
    return part_ == Traits::kParts - 1;
  }

  // A block's share of the tiles of keys that there are.
  __device__ Segment part_of(int end) const {
    Segment s{};
    s.span.begin = p_.starts ? max(p_.starts[batch_], 0) : 0;
    s.span.end = end;
    s.span.diagonal = end - 1;
    if (p_.window_left >= 0) {
      s.span.begin = max(s.span.begin, s.span.diagonal - p_.window_left);
    }
    const int first = s.span.begin / kTileKeys * kTileKeys;
    const int tiles = (end - first + kTileKeys - 1) / kTileKeys;
    const int keys = (tiles + Traits::kParts - 1) / Traits::kParts * kTileKeys;
    s.batch = batch_;
    s.kv_head = kv_head_;
    s.rows = p_.group;
    s.first = first + part_ * keys;
    s.last = min(end, s.first + keys);
    return s;
  }

  // --------------------------------------------------------------------------------------------------------------------- heads
  // Of a block: the group's queries; in the last one also the key and the value.
  __device__ int kind_of(int index) const {
    return index < p_.group ? 0 : min(index - p_.group + HeadsParams::kKeys, HeadsParams::kValues);
  }
  __device__ int row_of_head(int index) const {
    const int head = batch_ * p_.kv_heads + kv_head_;
    return index < p_.group ? head * p_.group + index : head;
  }

  __device__ void make(const Head<T, D>& head, int index, int fresh, const Turns<D>& turns) const {
    const int kind = kind_of(index);
    float* const on_the_way = reinterpret_cast<float*>(fresh_rows() + 2 * D) + warp_ * D;
    if (kind == 0) {
      T* const to = reinterpret_cast<T*>(queries());
      head.make(h_, kind, turns, on_the_way, [&](int column, T value) {  // as share_queries
        const int word = ((column / 32 * 2) * 32 + index % 8 * 4 + column / 8 % 4) * 4 + index / 8 % 2;
        to[(word + column / 2 % 2 * 2 + column / 4 % 2 * 128) * 2 + column % 2] = value;
      });
    } else {
      T* const mine = fresh_rows() + (kind - HeadsParams::kKeys) * D;
      T* const to = static_cast<T*>(h_.caches[kind - HeadsParams::kKeys]) +
                    (static_cast<long long>(row_of_head(index)) * h_.capacity + fresh) * h_.dim;
      head.make(h_, kind, turns, on_the_way, [&](int column, T value) { mine[column] = to[column] = value; });
    }
  }

  // --------------------------------------------------------------------------------------------------------------------- tiles
  __device__ void multiply(float (&scores)[2][4], const uint4 (&keys)[2][D / 32]) const {
    const uint4* const mine = queries() + lane_;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      add_scores<T>(scores, mine[2 * i * 32], mine[(2 * i + 1) * 32], keys[0][i], keys[1][i]);
    }
  }

  __device__ static void add(TileRows<T, D>& rows, const uint4& weights, const uint4 (&values)[D / 64][4]) {
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      rows.add(weights, b, values[b]);
    }
  }

  // One key of a tile, if it is one.
  __device__ void hide(float (&scores)[2][4], int key) const {
    if (key < 0 || key >= kTileKeys) {
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i / 4 * 8 + lane_ % 4 * 2 + i % 2 == key) {
        scores[i / 4][i % 4] = -kInfinity;
      }
    }
  }

  // The token's own key, as the first of a tile.
  __device__ void add_fresh(TileRows<T, D>& rows, uint4 (&keys)[2][D / 32], uint4 (&values)[D / 64][4]) const {
    const int g = lane_ / 4;
    const int c = lane_ % 4;
    const auto* const fresh = reinterpret_cast<const uint4*>(fresh_rows());
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      keys[0][i] = g == 0 && i * 32 + c * 8 < h_.dim ? fresh[i * 4 + c] : none;
      keys[1][i] = none;
    }
    float scores[2][4] = {};
    multiply(scores, keys);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = scores[i / 4][i % 4];
      score = i / 4 == 0 && c == 0 && i % 2 == 0 ? capped(p_, score * p_.scale) : -kInfinity;
    }
    const uint4 weights = rows.weigh(scores, 1.0f);
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      values[b][0] = c == 0 && b * 64 + g * 8 < h_.dim ? fresh[D / 8 + b * 8 + g] : none;
      values[b][1] = values[b][2] = values[b][3] = none;
    }
    add(rows, weights, values);
  }

  // ------------------------------------------------------------------------------------------------------------------- results
  // Sends the sums of this warp's rows to the block of their columns, and their maxima and sums to all.
  __device__ void hand_out(TileRows<T, D>& rows) const {
    const int c = lane_ % 4;
    const int slice = part_ * Traits::kWarps + warp_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + half * 8;
      const float sum = quad_sum(rows.sum[half]);
      if (row >= p_.group) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < Traits::kParts / 4; ++i) {
        const unsigned to = address_in(i * 4 + c, scales() + slice * p_.group + row);
        store_in_cluster(to, rows.peak[half], sum);
      }
#pragma unroll
      for (int b = 0; b < D / 64; ++b) {
        const int columns = b * 4 + c;  // 16 of them
        const unsigned to =
            address_in(columns % Traits::kParts, sums(columns / Traits::kParts, slice) + row * Traits::kSliceColumns);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // as put_rows
          const int e = half * 2 + i / 2;
          const int j = i % 2 * 4;
          const auto& acc = rows.acc[b];
          store_in_cluster(to + i * 16, acc[j][e], acc[j + 1][e], acc[j + 2][e], acc[j + 3][e]);
        }
      }
    }
  }

  // Half a warp for four columns of a row, always in the order of the slices.
  __device__ void merge() const {
    constexpr int lanes = 16;
    constexpr int each = Traits::kSlices / lanes;
    const int lane = threadIdx.x % lanes;
    const int tasks = kTraits.column_slices() * p_.group * 4;
#pragma unroll 1
    for (int first = 0; first < tasks; first += Traits::kWarps * 32 / lanes) {
      const int task = min(first + static_cast<int>(threadIdx.x) / lanes, tasks - 1);
      const int row = task / 4 % p_.group;
      const int column_slice = task / 4 / p_.group;
      float2 scale[each];
      float peak = -kInfinity;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        scale[i] = scales()[(i * lanes + lane) * p_.group + row];
        peak = nan_max(peak, scale[i].x);
      }
#pragma unroll
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        peak = nan_max(peak, __shfl_xor_sync(~0u, peak, offset, lanes));
      }
      float total[5] = {};
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const float weight = shrinking_approx(scale[i].x, peak);
        const float4 value =
            *reinterpret_cast<const float4*>(sums(column_slice, i * lanes + lane) + row * Traits::kSliceColumns + task % 4 * 4);
        const float terms[5] = {scale[i].y, value.x, value.y, value.z, value.w};
#pragma unroll
        for (int j = 0; j < 5; ++j) {
          total[j] = fmaf(weight, terms[j], total[j]);
        }
      }
#pragma unroll
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (float& each_total : total) {
          each_total += __shfl_xor_sync(~0u, each_total, offset, lanes);
        }
      }
      const int column = (column_slice * Traits::kParts + part_) * Traits::kSliceColumns + task % 4 * 4;
      if (lane == 0 && column < p_.value_dim) {
        finish<T>(
            p_, batch_, {kv_head_ * p_.group + row, 0}, column,
            {peak, total[0], make_float4(total[1], total[2], total[3], total[4])});
      }
    }
  }

  // -------------------------------------------------------------------------------------------------------------------- shared
  __device__ static uint4* queries() {
    return token_memory;
  }
  __device__ static T* fresh_rows() {  // the key and the value
    return reinterpret_cast<T*>(queries() + kTraits.query_bytes() / 16);
  }
  __device__ float* sums(int column_slice, int slice) const {
    auto* const all = reinterpret_cast<float*>(fresh_rows() + 2 * D) + Traits::kWarps * D;
    return all + (column_slice * Traits::kSlices + slice) * Traits::sums_pitch(p_.group);
  }
  __device__ float2* scales() const {  // [slice][row]: maxima and sums
    return reinterpret_cast<float2*>(sums(kTraits.column_slices(), 0));
  }

  const DecodeParams& p_;
  const HeadsParams& h_;
  const bool settled_;
  const int lane_;
  const int warp_;
  const int part_;
  const int kv_head_;
  const int batch_;
};

}  // namespace mlx_cuda

#define MLX_CUDA_TOKEN(name, dtype, D)                                                                                             \
  extern "C" __global__ void __cluster_dims__(mlx_cuda::TokenTraits::kParts) __launch_bounds__(mlx_cuda::TokenTraits::kWarps * 32) \
      name(const __grid_constant__ mlx_cuda::TokenParams params) {                                                                 \
    mlx_cuda::Token<mlx_cuda::types::dtype, D>(params).run();                                                                      \
  }
MLX_CUDA_TOKEN_KERNELS(MLX_CUDA_TOKEN)
