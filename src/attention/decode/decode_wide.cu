// Attention of few queries with wide heads (head_dim over 256, as in MLA): the warps of a block work on the same tile of keys.
//
// A result of 512 columns does not fit into the registers of one warp, so each warp has 64 columns of V for all rows of the block,
// and the scores of a tile of keys are computed once, by eight keys and 16 rows, and exchanged through shared memory. Where V is
// the first columns of K, as in MLA, it is read from K's tile, and there is room for tiles of 64 keys instead of 32. See work.cuh
// for how the work is shared, and tile.cuh for the order of the fragments.
#include "attention/decode/tile.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kWarps = WideTraits::kWarps;

// Where a warp stands, and where things lie in shared memory. RowTiles: tiles of 16 rows of a block. Shared: V is the first columns
// of K.
template <int RowTiles, bool Shared>
struct WideBlock {
  static constexpr WideTraits kTraits{RowTiles, Shared};
  static constexpr int kTileKeys = kTraits.tile_keys();
  static constexpr int kParts = kTraits.score_parts();
  static constexpr int kTasks = (RowTiles * kParts + kWarps - 1) / kWarps;  // parts for one warp, of one row tile

  static_assert(
      kTraits.query_bytes() + 2 * kTraits.stage_bytes(8, 8) >= RowTiles * kTileRows * result_pitch(WideTraits::kWidestValues) * 4,
      "results take the place of the queries and the ring");

  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  int g = lane / 4;
  int c = lane % 4;
  int row_tile = warp * kTasks / kParts;  // whose scores this warp computes
  int part = warp * kTasks % kParts;      // the first of its parts
  bool scoring = row_tile < RowTiles;

  int key_pieces;    // of 16 bytes in a row of K
  int value_pieces;  // and of V
  int stage_pieces;

  uint4* weights;   // fragments [row tile][step][lane]
  float* peaks;     // [row][part]; in the end sums
  float* tops;      // [row]
  uint4* q_shared;  // fragments [row tile][load][2][lane]
  uint4* ring;      // [stage][keys, values][key][piece]

  __device__ WideBlock(const DecodeParams& p, uint4* memory) {
    key_pieces = WideTraits::key_pieces(p.head_dim);
    value_pieces = Shared ? key_pieces : kTraits.value_pieces(p.value_dim);
    stage_pieces = kTraits.stage_bytes(p.head_dim, p.value_dim) / 16;
    weights = memory;
    peaks = reinterpret_cast<float*>(weights + kTraits.weight_bytes() / 16);
    tops = peaks + RowTiles * kTileRows * kParts;
    q_shared = reinterpret_cast<uint4*>(tops + RowTiles * kTileRows);
    ring = q_shared + kTraits.query_bytes() / 16;
  }
  __device__ const uint4* keys(int stage) const {
    return ring + stage * stage_pieces;
  }
  __device__ const uint4* values(int stage) const {
    return Shared ? keys(stage) : keys(stage) + kTileKeys * key_pieces;
  }

  // The higher of `before` and a row's maxima of all parts.
  __device__ float highest(int row, float before) const {
#pragma unroll
    for (int n = 0; n < kParts; n += 4) {
      const float4 these = *reinterpret_cast<const float4*>(peaks + row * kParts + n);
      before = fmaxf(before, fmaxf(fmaxf(these.x, these.y), fmaxf(these.z, these.w)));
    }
    return before;
  }
};

// Copies tiles into the ring. Each lane copies pieces of one row: eight of every 64 columns' eight.
template <typename T, int RowTiles, bool Shared>
struct WideCopies {
  using Block = WideBlock<RowTiles, Shared>;
  static constexpr int kTileKeys = Block::kTileKeys;
  static constexpr int kRows = kTileKeys / 32;

  const DecodeParams& p;
  const Segment& s;
  const Block& block;
  int row;  // which a lane copies, and those 32 after it
  const T* k_head;
  const T* v_head;
  int pages[kRows] = {};  // of the rows of the next tile
  int next = 0;           // tile to be copied

  __device__ WideCopies(const DecodeParams& p, const Segment& s, const Block& block)
      : p(p), s(s), block(block), row(block.warp * 4 + block.lane / 8) {
    k_head = static_cast<const T*>(p.k) + s.kv_head * p.k_strides.head + block.lane % 8 * 8;
    v_head = static_cast<const T*>(p.v) + s.kv_head * p.v_strides.head + block.lane % 8 * 8;
    if (p.table) {
      find_pages(0);
    }
  }

  __device__ void find_pages(int tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = s.first + tile * kTileKeys + row + i * 32;
      pages[i] = tile < s.tiles && s.has(key) ? p.table[s.batch * p.table_stride + key / p.page_size] : 0;
    }
  }

  template <bool Paged>
  __device__ void copy(int stage, int tile) {
    const int column = block.lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = s.first + tile * kTileKeys + row + i * 32;
      const bool there = s.has(key);
      const long long outer = Paged ? pages[i] : s.batch;
      const int inner = Paged ? key % p.page_size : key;
      const T* k_row = k_head + outer * p.k_strides.batch + inner * p.k_strides.row;
      uint4* to = block.ring + stage * block.stage_pieces + (row + i * 32) * block.key_pieces + place_of(row, column / 8);
#pragma unroll 3
      for (int j = 0; j < block.key_pieces / 8; ++j) {
        copy16_once(to + j * 8, k_row + j * 64, there && j * 64 + column < p.head_dim);
      }
      if constexpr (!Shared) {
        const T* v_row = v_head + outer * p.v_strides.batch + inner * p.v_strides.row;
        to = block.ring + stage * block.stage_pieces + kTileKeys * block.key_pieces + row * block.value_pieces +
             place_of(row, column / 8);
#pragma unroll 2
        for (int j = 0; j < block.value_pieces / 8; ++j) {
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

  // Waits for the tile of a stage, which nobody needs any more, and copies another.
  __device__ void advance(int stage) {
    if (p.stages > 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();  // all have copied their part of this tile, and are done with the one before
    copy_next(stage == 0 ? p.stages - 1 : stage - 1);
  }
};

// The scores of the parts of a warp: its queries, and the maxima and sums of their rows.
template <typename T, int RowTiles, bool Shared>
struct WideScores {
  using Block = WideBlock<RowTiles, Shared>;
  static constexpr WideTraits kTraits = Block::kTraits;
  static constexpr int kParts = Block::kParts;
  static constexpr int kTasks = Block::kTasks;
  static constexpr int kLoads = WideTraits::kLoads;
  static constexpr int kHeldLoads = kTraits.held_loads();  // whose part of Q is in registers
  static constexpr int kSharedLoads = kTraits.shared_loads();
  static constexpr int kChains = kTasks == 1 ? 2 : 1;  // of dependent products

  uint4 held[2 * kHeldLoads + 1];
  float scores[kTasks][4];
  float unit;  // what they are to be multiplied by
  float peak[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};

  __device__ void load_queries(const DecodeParams& p, const Segment& s, const Block& block) {
#pragma unroll
    for (int i = 0; i < kHeldLoads; ++i) {
      load_fragments<T>(p, s, block.row_tile * 16 + block.g, i * 32 + block.c * 8, held[2 * i], held[2 * i + 1]);
    }
    for (int index = threadIdx.x; index < RowTiles * kSharedLoads * 32; index += kWarps * 32) {
      const int tile = index / 32 / kSharedLoads;
      const int load = index / 32 % kSharedLoads;
      uint4* to = block.q_shared + (tile * kSharedLoads + load) * 64 + index % 32;
      load_fragments<T>(p, s, tile * 16 + index % 32 / 4, (kHeldLoads + load) * 32 + index % 4 * 8, to[0], to[32]);
    }
  }

  // Adds 32 columns of Q K^T.
  __device__ void add_products(const Block& block, float (&sums)[kTasks][kChains][4], const uint4* keys, int i) const {
    const uint4* q = block.q_shared + (block.row_tile * kSharedLoads + i - kHeldLoads) * 64 + block.lane;
    const uint4 q0 = i < kHeldLoads ? held[2 * min(i, kHeldLoads)] : q[0];
    const uint4 q1 = i < kHeldLoads ? held[min(2 * i + 1, 2 * kHeldLoads)] : q[32];
    const uint4* row = keys + (block.part * 8 + block.g) * block.key_pieces + place_of(block.g, block.c + i % 2 * 4) + i / 2 * 8;
#pragma unroll
    for (int n = 0; n < kTasks; ++n) {
      const uint4 key = row[n * 8 * block.key_pieces];
      mma(sums[n][0], q0, key.x, key.y, T{});
      mma(sums[n][kChains - 1], q1, key.z, key.w, T{});
    }
  }

  // Computes the scores of the tile that begins at a key, and tells the others their maxima.
  __device__ void compute(const DecodeParams& p, const Segment& s, const Block& block, const uint4* keys, int key0) {
    const bool whole = whole_tile(p, s, key0);
    unit = whole ? p.scale : 1.0f;
    if (!block.scoring) {
      return;
    }
    float sums[kTasks][kChains][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads - 2; ++i) {
      add_products(block, sums, keys, i);
    }
    if (block.key_pieces == kLoads * 4) {
      add_products(block, sums, keys, kLoads - 2);
      add_products(block, sums, keys, kLoads - 1);
    }
#pragma unroll
    for (int i = 0; i < kTasks * 4; ++i) {
      scores[i / 4][i % 4] = sums[i / 4][0][i % 4] + (kChains > 1 ? sums[i / 4][kChains - 1][i % 4] : 0.0f);
    }
    if (!whole) {
      restrict_scores<T, kTasks>(p, s, scores, block.row_tile * 16 + block.g, key0 + block.part * 8 + 2 * block.c);
    }
#pragma unroll
    for (int i = 0; i < kTasks * 2; ++i) {
      const float top = quad_max(fmaxf(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]));
      if (block.c == 0) {
        block.peaks[(block.row_tile * 16 + block.g + i % 2 * 8) * kParts + block.part + i / 2] = top * unit;
      }
    }
  }

  // Makes weights of them for all warps.
  __device__ void weigh(const Block& block) {
    if (!block.scoring) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = block.highest(block.row_tile * 16 + block.g + half * 8, peak[half]);
      const float zero = base == -kInfinity ? 0.0f : base;
      sum[half] *= shrinking(peak[half], base);
      peak[half] = base;
#pragma unroll
      for (int n = 0; n < kTasks; ++n) {
        const int part = block.part + n;
        const float low = exp2_approx(fmaf(scores[n][half * 2], unit, -zero));
        const float high = exp2_approx(fmaf(scores[n][half * 2 + 1], unit, -zero));
        sum[half] += low + high;
        unsigned* to =
            reinterpret_cast<unsigned*>(block.weights + (block.row_tile * (Block::kTileKeys / 16) + part / 2) * 32 + block.lane);
        to[part % 2 * 2 + half] = pack(low, high, T{});
      }
    }
  }

  // Leaves the sums in the place of the maxima.
  __device__ void leave(const Block& block) {
    if (!block.scoring) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(sum[half]);
      if (block.c == 0) {
        block.peaks[(block.row_tile * 16 + block.g + half * 8) * kParts + block.part] = sum[half];
      }
    }
  }
};

// A warp's 64 columns of the output of all rows.
template <typename T, int RowTiles, bool Shared>
struct WideColumns {
  using Block = WideBlock<RowTiles, Shared>;
  static constexpr int kPitch = result_pitch(WideTraits::kWidestValues);

  TileRows<T, 64> rows[RowTiles];  // their sums are WideScores'

  __device__ WideColumns() {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      rows[t].clear();
    }
  }

  // Shrinks what there is where a row's maximum rises.
  __device__ void raise(const Block& block) {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      const float base[2] = {
          block.highest(t * 16 + block.g, rows[t].peak[0]), block.highest(t * 16 + block.g + 8, rows[t].peak[1])};
      rows[t].raise(base);
    }
  }

  __device__ void add(const Block& block, const uint4* values) {
#pragma unroll
    for (int step = 0; step < Block::kTileKeys / 16; ++step) {
      uint4 pieces[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = step * 16 + value_key(r);
        pieces[r] = values[key * block.value_pieces + place_of(key, block.warp * 8 + block.g)];
      }
      uint4 factors[RowTiles];
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
        factors[t] = block.weights[(t * (Block::kTileKeys / 16) + step) * 32 + block.lane];
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

  // Leaves them in shared memory in the place of Q and K, [row][kPitch].
  __device__ void leave(const Block& block, float* results) const {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      const auto& acc = rows[t].acc[0];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // half of the row tile, eight columns, four of these
        const int half = i / 4 * 2;
        const int e = half + i / 2 % 2;
        const int j = i % 2 * 4;
        *reinterpret_cast<float4*>(results + (t * 16 + block.g + half * 4) * kPitch + block.warp * 64 + block.c * 16 + i % 4 * 4) =
            make_float4(acc[j][e], acc[j + 1][e], acc[j + 2][e], acc[j + 3][e]);
      }
      if (block.warp == 0 && block.c == 0) {
        block.tops[t * 16 + block.g] = rows[t].peak[0];
        block.tops[t * 16 + block.g + 8] = rows[t].peak[1];
      }
    }
  }
};

// Writes what all warps have left in shared memory.
template <typename T, int RowTiles, bool Shared>
__device__ inline void write_rows(
    const DecodeParams& p, const Segment& s, const WideBlock<RowTiles, Shared>& block, const float* results, int pitch) {
  using Block = WideBlock<RowTiles, Shared>;
#pragma unroll 1
  for (int index = threadIdx.x; index < s.rows * (p.value_dim / 4); index += kWarps * 32) {
    const int row = index / (p.value_dim / 4);
    const int column = index % (p.value_dim / 4) * 4;
    float total = 0;
#pragma unroll
    for (int n = 0; n < Block::kParts; n += Block::kTasks) {
      total += block.peaks[row * Block::kParts + n];
    }
    write_result<T>(p, s, row, column, {block.tops[row], total, *reinterpret_cast<const float4*>(results + row * pitch + column)});
  }
}

template <typename T, int RowTiles, bool Shared>
__device__ inline void decode_wide(const DecodeParams& p) {
  extern __shared__ uint4 memory[];
  const WideBlock<RowTiles, Shared> block(p, memory);
  const bool has_columns = block.warp * 64 < p.value_dim;
  Segments segments(p);
  Segment s;
  while (segments.next(s)) {
    WideScores<T, RowTiles, Shared> scores;
    scores.load_queries(p, s, block);
    WideColumns<T, RowTiles, Shared> columns;
    WideCopies<T, RowTiles, Shared> copies(p, s, block);
#pragma unroll 1
    for (int stage = 0; stage < p.stages - 1; ++stage) {
      copies.copy_next(stage);
    }
    int stage = 0;
    for (int tile = 0; tile < s.tiles; ++tile) {
      copies.advance(stage);
      scores.compute(p, s, block, block.keys(stage), s.first + tile * block.kTileKeys);
      __syncthreads();
      scores.weigh(block);
      columns.raise(block);
      __syncthreads();
      if (has_columns) {
        columns.add(block, block.values(stage));
      }
      stage = stage + 1 == p.stages ? 0 : stage + 1;
    }

    __syncthreads();
    float* results = reinterpret_cast<float*>(block.q_shared);
    scores.leave(block);
    columns.leave(block, results);
    __syncthreads();
    write_rows<T>(p, s, block, results, columns.kPitch);
    __syncthreads();
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_WIDE_BODY(...) mlx_cuda::decode_wide<__VA_ARGS__>(params);
#else
#define MLX_CUDA_WIDE_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_WIDE(name, ...)                                         \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kWarps * 32, 1) \
      name(const __grid_constant__ mlx_cuda::DecodeParams params) {      \
    MLX_CUDA_WIDE_BODY(__VA_ARGS__)                                      \
  }

#define MLX_CUDA_WIDE_ROWS(dtype, T, ROWS)                  \
  MLX_CUDA_WIDE(wide_##dtype##_##ROWS, T, ROWS / 16, false) \
  MLX_CUDA_WIDE(wide_##dtype##_##ROWS##_shared, T, ROWS / 16, true)

#define MLX_CUDA_WIDE_ALL(dtype, T) \
  MLX_CUDA_WIDE_ROWS(dtype, T, 16)  \
  MLX_CUDA_WIDE_ROWS(dtype, T, 32)  \
  MLX_CUDA_WIDE_ROWS(dtype, T, 64)

MLX_CUDA_WIDE_ALL(float16, __half)
MLX_CUDA_WIDE_ALL(bfloat16, __nv_bfloat16)
