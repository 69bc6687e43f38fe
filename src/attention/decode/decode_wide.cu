// Attention of few queries with wide heads (head_dim over 256, as in MLA): the warps of a block work on the same tile of keys.
//
// A result of 512 columns does not fit into the registers of one warp, so each warp has 64 columns of V for all rows of the block,
// and the scores of a tile of keys are computed once, by eight keys and 16 rows, and exchanged through shared memory. Where V is
// the first columns of K, as in MLA, it is read from K's tile, and there is room for tiles of 64 keys instead of 32. See work.cuh
// for how the work is shared, and tile.cuh for the order of the fragments.
#include "attention/decode/kernels.h"
#include "attention/decode/tile.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kWarps = WideTraits::kWarps;

// A unit, or a part of one, as the block computes it. RowTiles: tiles of 16 rows. Shared: V is the first columns of K.
template <typename T, int RowTiles, bool Shared>
struct WideUnit {
  static constexpr WideTraits kTraits{RowTiles, Shared};
  static constexpr int kTileKeys = kTraits.tile_keys();
  static constexpr int kCopiedRows = kTileKeys / 32;  // of a tile, by one lane
  static constexpr int kParts = kTraits.score_parts();
  static constexpr int kTasks = (RowTiles * kParts + kWarps - 1) / kWarps;  // parts for one warp, of one row tile
  static constexpr int kChains = kTasks == 1 ? 2 : 1;                       // of dependent MMAs
  static constexpr int kLoads = WideTraits::kLoads;
  static constexpr int kHeldLoads = kTraits.held_loads();  // whose part of Q is in registers
  static constexpr int kSharedLoads = kTraits.shared_loads();
  static constexpr int kPitch = result_pitch(WideTraits::kWidestValues);

  static_assert(
      kTraits.query_bytes() + 2 * kTraits.stage_bytes(8, 8) >= RowTiles * kTileRows * kPitch * 4,
      "results take the place of the queries and the ring");

  const DecodeParams& p;
  const Segment& s;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int row_tile = warp * kTasks / kParts;  // whose scores this warp computes
  const int part = warp * kTasks % kParts;      // the first of its parts
  const bool scoring = row_tile < RowTiles;
  const int copied = warp * 4 + lane / 8;  // the row of a tile that this lane copies, and those 32 after it

  const int key_pieces = WideTraits::key_pieces(p.head_dim);  // of 16 bytes in a row of K
  const int value_pieces = Shared ? key_pieces : kTraits.value_pieces(p.value_dim);
  const int stage_pieces = kTraits.stage_bytes(p.head_dim, p.value_dim) / 16;

  uint4* weights;   // fragments [row tile][step][lane]
  float* peaks;     // [row][part]; in the end sums
  float* tops;      // [row]
  uint4* q_shared;  // fragments [row tile][load][2][lane]
  uint4* ring;      // [stage][keys, values][key][piece]
  float* results;   // in the end [row][kPitch]

  uint4 q_held[2 * kHeldLoads + 1];
  float scores[kTasks][4];
  float unit;                                   // their factor
  float my_peak[2] = {-kInfinity, -kInfinity};  // of the rows whose scores this warp computes
  float my_sum[2] = {0, 0};
  TileRows<T, 64> rows[RowTiles];  // 64 columns of all rows

  const T* k_head = static_cast<const T*>(p.k) + s.kv_head * p.k_strides.head + lane % 8 * 8;
  const T* v_head = static_cast<const T*>(p.v) + s.kv_head * p.v_strides.head + lane % 8 * 8;
  int pages[kCopiedRows] = {};  // of the rows of the next tile
  int next = 0;                 // tile to be copied

  __device__ WideUnit(const DecodeParams& p, const Segment& s, uint4* memory) : p(p), s(s), weights(memory) {
    peaks = reinterpret_cast<float*>(weights + kTraits.weight_bytes() / 16);
    tops = peaks + RowTiles * kTileRows * kParts;
    q_shared = reinterpret_cast<uint4*>(tops + RowTiles * kTileRows);
    ring = q_shared + kTraits.query_bytes() / 16;
    results = reinterpret_cast<float*>(q_shared);
  }

  __device__ void load_queries() {
#pragma unroll
    for (int i = 0; i < kHeldLoads; ++i) {
      load_fragments<T>(p, s, row_tile * 16 + g, i * 32 + c * 8, q_held[2 * i], q_held[2 * i + 1]);
    }
    for (int index = threadIdx.x; index < RowTiles * kSharedLoads * 32; index += kWarps * 32) {
      const int tile = index / 32 / kSharedLoads;
      const int load = index / 32 % kSharedLoads;
      uint4* to = q_shared + (tile * kSharedLoads + load) * 64 + index % 32;
      load_fragments<T>(p, s, tile * 16 + index % 32 / 4, (kHeldLoads + load) * 32 + index % 4 * 8, to[0], to[32]);
    }
  }

  __device__ void find_pages(int tile) {
#pragma unroll
    for (int i = 0; i < kCopiedRows; ++i) {
      const int key = s.first + tile * kTileKeys + copied + i * 32;
      pages[i] = tile < s.tiles && s.has(key) ? p.table[s.batch * p.table_stride + key / p.page_size] : 0;
    }
  }

  // Each lane copies eight of every 64 columns' pieces of its rows.
  template <bool Paged>
  __device__ void copy(int stage, int tile) {
    const int column = lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < kCopiedRows; ++i) {
      const int key = s.first + tile * kTileKeys + copied + i * 32;
      const bool there = s.has(key);
      const long long outer = Paged ? pages[i] : s.batch;
      const int inner = Paged ? key % p.page_size : key;
      const T* k_row = k_head + outer * p.k_strides.batch + inner * p.k_strides.row;
      uint4* to = ring + stage * stage_pieces + (copied + i * 32) * key_pieces + place_of(copied, lane % 8);
#pragma unroll 3
      for (int j = 0; j < key_pieces / 8; ++j) {
        copy16_once(to + j * 8, k_row + j * 64, there && j * 64 + column < p.head_dim);
      }
      if constexpr (!Shared) {
        const T* v_row = v_head + outer * p.v_strides.batch + inner * p.v_strides.row;
        to = ring + stage * stage_pieces + kTileKeys * key_pieces + copied * value_pieces + place_of(copied, lane % 8);
#pragma unroll 2
        for (int j = 0; j < value_pieces / 8; ++j) {
          copy16_once(to + j * 8, v_row + j * 64, there && j * 64 + column < p.value_dim);
        }
      }
    }
  }

  __device__ void copy_next(int stage) {
    if (next < s.tiles && p.table) {
      copy<true>(stage, next);
      find_pages(next + 1);
    } else if (next < s.tiles) {
      copy<false>(stage, next);
    }
    ++next;
    commit_copies();
  }

  __device__ void begin_copies() {
    if (p.table) {
      find_pages(0);
    }
#pragma unroll 1
    for (int stage = 0; stage < p.stages - 1; ++stage) {
      copy_next(stage);
    }
  }

  // Waits for the tile of a stage and loads another into the previous stage.
  __device__ void advance(int stage) {
    if (p.stages > 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();  // all have copied their part of this tile, and are done with the one before
    copy_next(stage == 0 ? p.stages - 1 : stage - 1);
  }

  // Adds 32 columns of Q K^T.
  __device__ void add_scores(float (&sums)[kTasks][kChains][4], const uint4* keys, int i) const {
    const uint4* q = q_shared + (row_tile * kSharedLoads + i - kHeldLoads) * 64 + lane;
    const uint4 q0 = i < kHeldLoads ? q_held[2 * min(i, kHeldLoads)] : q[0];
    const uint4 q1 = i < kHeldLoads ? q_held[min(2 * i + 1, 2 * kHeldLoads)] : q[32];
    const uint4* row = keys + (part * 8 + g) * key_pieces + place_of(g, c + i % 2 * 4) + i / 2 * 8;
#pragma unroll
    for (int n = 0; n < kTasks; ++n) {
      const uint4 key = row[n * 8 * key_pieces];
      mma(sums[n][0], q0, key.x, key.y, T{});
      mma(sums[n][kChains - 1], q1, key.z, key.w, T{});
    }
  }

  // The scores of this warp's parts; all warps learn their maxima.
  __device__ void score(const uint4* keys, int key0) {
    float sums[kTasks][kChains][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads - 2; ++i) {
      add_scores(sums, keys, i);
    }
    if (key_pieces == kLoads * 4) {
      add_scores(sums, keys, kLoads - 2);
      add_scores(sums, keys, kLoads - 1);
    }
#pragma unroll
    for (int i = 0; i < kTasks * 4; ++i) {
      scores[i / 4][i % 4] = sums[i / 4][0][i % 4] + (kChains > 1 ? sums[i / 4][kChains - 1][i % 4] : 0.0f);
    }
    unit = restrict_tile<T, kTasks>(p, s, scores, row_tile * 16 + g, key0, part * 8);
#pragma unroll
    for (int i = 0; i < kTasks * 2; ++i) {
      const float top = quad_max(nan_max(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]));
      if (c == 0) {
        peaks[(row_tile * 16 + g + i % 2 * 8) * kParts + part + i / 2] = top * unit;
      }
    }
  }

  // The higher of `before` and a row's maxima of all parts.
  __device__ float highest(int row, float before) const {
#pragma unroll
    for (int n = 0; n < kParts; n += 4) {
      const float4 these = *reinterpret_cast<const float4*>(peaks + row * kParts + n);
      before = nan_max(before, nan_max(nan_max(these.x, these.y), nan_max(these.z, these.w)));
    }
    return before;
  }

  // Makes weights of the scores, for all warps.
  __device__ void weigh() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = highest(row_tile * 16 + g + half * 8, my_peak[half]);
      const float zero = base == -kInfinity ? 0.0f : base;
      my_sum[half] *= shrinking(my_peak[half], base);
      my_peak[half] = base;
#pragma unroll
      for (int n = 0; n < kTasks; ++n) {
        const float low = exp2_approx(fmaf(scores[n][half * 2], unit, -zero));
        const float high = exp2_approx(fmaf(scores[n][half * 2 + 1], unit, -zero));
        my_sum[half] += low + high;
        unsigned* to = reinterpret_cast<unsigned*>(weights + (row_tile * (kTileKeys / 16) + (part + n) / 2) * 32 + lane);
        to[(part + n) % 2 * 2 + half] = pack(low, high, T{});
      }
    }
  }

  __device__ void raise_peaks() {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      const float base[2] = {highest(t * 16 + g, rows[t].peak[0]), highest(t * 16 + g + 8, rows[t].peak[1])};
      rows[t].raise(base);
    }
  }

  __device__ void add_values(const uint4* values) {
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint4 pieces[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = step * 16 + value_key(r);
        pieces[r] = values[key * value_pieces + place_of(key, warp * 8 + g)];
      }
      uint4 factors[RowTiles];
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
        factors[t] = weights[(t * (kTileKeys / 16) + step) * 32 + lane];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint2 fragment = value_fragment(pieces, j);
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
          mma(rows[t].acc[0][j], factors[t], fragment.x, fragment.y, T{});
        }
      }
    }
  }

  // Leaves sums, maxima and this warp's columns in shared memory.
  __device__ void leave() {
    if (scoring) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        my_sum[half] = quad_sum(my_sum[half]);
        if (c == 0) {
          peaks[(row_tile * 16 + g + half * 8) * kParts + part] = my_sum[half];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      rows[t].put_rows(results + warp * 64, kPitch, t * 16);
      if (warp == 0 && c == 0) {
        tops[t * 16 + g] = rows[t].peak[0];
        tops[t * 16 + g + 8] = rows[t].peak[1];
      }
    }
  }

  __device__ void write() const {
#pragma unroll 1
    for (int index = threadIdx.x; index < s.rows * (p.value_dim / 4); index += kWarps * 32) {
      const int row = index / (p.value_dim / 4);
      const int column = index % (p.value_dim / 4) * 4;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kParts; n += kTasks) {
        total += peaks[row * kParts + n];
      }
      write_result<T>(p, s, row, column, {tops[row], total, *reinterpret_cast<const float4*>(results + row * kPitch + column)});
    }
  }

  __device__ void compute() {
    load_queries();
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      rows[t].clear();
    }
    begin_copies();
    int stage = 0;
    for (int tile = 0; tile < s.tiles; ++tile) {
      advance(stage);
      const uint4* keys = ring + stage * stage_pieces;
      if (scoring) {
        score(keys, s.first + tile * kTileKeys);
      }
      __syncthreads();
      if (scoring) {
        weigh();
      }
      raise_peaks();
      __syncthreads();
      if (warp * 64 < p.value_dim) {
        add_values(Shared ? keys : keys + kTileKeys * key_pieces);
      }
      stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
    __syncthreads();
    leave();
    __syncthreads();
    write();
    __syncthreads();
  }
};

template <typename T, int RowTiles, bool Shared>
__device__ inline void decode_wide(const DecodeParams& p) {
  extern __shared__ uint4 memory[];
  Segments segments(p);
  Segment s;
  while (segments.next(s)) {
    WideUnit<T, RowTiles, Shared>(p, s, memory).compute();
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_WIDE(name, dtype, ROWS, SHARED)                              \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kWarps * 32, 1)      \
      name(const __grid_constant__ mlx_cuda::DecodeParams params) {           \
    mlx_cuda::decode_wide<mlx_cuda::types::dtype, ROWS / 16, SHARED>(params); \
  }
MLX_CUDA_WIDE_KERNELS(MLX_CUDA_WIDE)
