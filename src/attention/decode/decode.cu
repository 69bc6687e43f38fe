// Decode attention: one read of the keys and values, at memory bandwidth.
//
// The queries of all heads that share a kv head are the rows of one tensor core tile, so K and V are read once for all of them.
// Tiles of 16 keys are copied to shared memory in the order of the fragments (tile.cuh), some stages ahead: a warp that owns its
// tiles reads only what it has copied, and waits for no other. If there are more rows than a warp holds, a team of warps shares
// tiles. The warps of a block merge through shared memory; blocks by tickets, or for a team in a second kernel.
#include "attention/decode/kernels.h"
#include "attention/decode/tile.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileKeys = NarrowTraits::kTileKeys;
[[maybe_unused]] constexpr int kStages = NarrowTraits::kStages;

// Slices of a block take turns at tiles. A slice is a warp, or a team of warps with different rows.
template <bool Team>
struct Slice {
  int row_warps;
  int row_warp;
  int count;
  int index;

  __device__ explicit Slice(const DecodeParams& p) {
    const int warp = threadIdx.x / 32;
    row_warps = Team ? p.row_warps : 1;
    row_warp = Team ? warp % row_warps : 0;
    count = static_cast<int>(blockDim.x) / 32 / row_warps;
    index = Team ? warp / row_warps : warp;
  }
};

// The tiles of a segment that a slice computes: index, index + count, … The lanes of each warp hold the state of 32 of them: the
// visible keys, or the page, which holds whole tiles.
template <bool Team, Keys Kind>
struct TileSequence {
  const DecodeParams& p;
  const Segment& s;
  const Slice<Team>& slice;
  int ordinal = 0;
  int known = 0;

  __device__ int look_up(int tile) const {
    if (tile >= s.tiles) {
      return 0;
    }
    const int key = s.first + tile * kTileKeys;
    if constexpr (Kind == Keys::paged) {
      return p.table[s.batch * p.table_stride + key / p.page_size];
    } else {
      return static_cast<int>(mask_bits(p, s, key));
    }
  }

  // The next tile to be copied, or s.tiles or more.
  __device__ int next(int& about) {
    for (;;) {
      const int tile = slice.index + ordinal * slice.count;
      if (Kind == Keys::plain || Kind == Keys::even || tile >= s.tiles) {
        ++ordinal;
        return tile;
      }
      if (ordinal % 32 == 0) {
        known = look_up(tile + static_cast<int>(threadIdx.x % 32) * slice.count);
      }
      about = __shfl_sync(~0u, known, ordinal % 32);
      ++ordinal;
      if (Kind == Keys::paged || about != 0) {
        return tile;
      }
    }
  }
};

// The pipeline stages of a slice in shared memory, [stage][keys, values][key][unit of 16 bytes], and their contents.
template <typename T, int D, bool Team, Keys Kind>
struct TileRing {
  static constexpr int kPieces = D / 8;  // of a row
  static constexpr int kStagePieces = NarrowTraits{D}.stage_bytes() / 16;

  const DecodeParams& p;
  const Segment& s;
  const Slice<Team>& slice;
  uint4* ring;
  TileSequence<Team, Kind> sequence;
  const T* k_head;  // where this lane's piece of the first 64 columns is
  const T* v_head;
  int tiles[kStages] = {};  // loaded or in flight; the last is the newest
  int abouts[kStages] = {};

  __device__ TileRing(const DecodeParams& p, const Segment& s, const Slice<Team>& slice, uint4* rings)
      : p(p), s(s), slice(slice), ring(rings + slice.index * kStages * kStagePieces), sequence{p, s, slice} {
    k_head = static_cast<const T*>(p.k) + s.kv_head * p.k_strides.head + threadIdx.x % 8 * 8;
    v_head = static_cast<const T*>(p.v) + s.kv_head * p.v_strides.head + threadIdx.x % 8 * 8;
    if constexpr (Kind != Keys::paged) {
      k_head += s.batch * p.k_strides.batch;
      v_head += s.batch * p.v_strides.batch;
    }
  }

  __device__ const uint4* keys(int stage) const {
    return ring + stage * kStagePieces;
  }
  __device__ const uint4* values(int stage) const {
    return keys(stage) + kTileKeys * kPieces;
  }

  __device__ void copy(int stage, int tile, int about) {
    const int lane = threadIdx.x % 32;
    const int key0 = s.first + tile * kTileKeys;
    const bool all = key0 >= s.span.begin && key0 + kTileKeys <= s.last;
    const T* k_tile = k_head;
    const T* v_tile = v_head;
    if constexpr (Kind == Keys::paged) {
      const int inside = key0 % p.page_size;
      k_tile += about * p.k_strides.batch + inside * p.k_strides.row;
      v_tile += about * p.v_strides.batch + inside * p.v_strides.row;
    } else {
      k_tile += key0 * p.k_strides.row;
      v_tile += key0 * p.v_strides.row;
    }
    auto copy_piece = [&](int job) {  // of four rows, eight lanes for each, 64 columns
      const int i = job / (D / 64) * 4 + lane / 8;
      const int b = job % (D / 64);
      const bool there = all || s.has(key0 + i);
      const int column = b * 64 + lane % 8 * 8;
      uint4* piece = ring + stage * kStagePieces + i * kPieces + place_of(i, lane % 8) + b * 8;
      copy16_once(piece, k_tile + i * p.k_strides.row + b * 64, there && column < p.head_dim);
      copy16_once(piece + kTileKeys * kPieces, v_tile + i * p.v_strides.row + b * 64, there && column < p.value_dim);
    };
    if constexpr (Team) {
#pragma unroll 1
      for (int job = slice.row_warp; job < D / 16; job += slice.row_warps) {
        copy_piece(job);
      }
    } else {
#pragma unroll
      for (int job = 0; job < D / 16; ++job) {
        copy_piece(job);
      }
    }
  }

  __device__ void copy_next(int stage) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      tiles[i] = tiles[i + 1];
      abouts[i] = abouts[i + 1];
    }
    tiles[kStages - 1] = sequence.next(abouts[kStages - 1]);
    if (tiles[kStages - 1] < s.tiles) {
      copy(stage, tiles[kStages - 1], abouts[kStages - 1]);
    }
    commit_copies();
  }

  // Waits for the tile of a stage and loads another into the stage that is free.
  __device__ void advance(int stage) {
    wait_copies<kStages - 2>();
    __syncwarp();
    if constexpr (Team) {  // all have copied their part of this tile, and are done with the one before
      sync_some(slice.index + 1, slice.row_warps * 32);
    }
    copy_next(stage == 0 ? kStages - 1 : stage - 1);
  }
};

// A lane's queries: in registers, or in shared memory where they are many.
template <typename T, int D>
struct Queries {
  static constexpr bool kHeld = NarrowTraits{D}.queries_in_registers();
  static constexpr int kSteps = D / 16;

  uint4 held[kHeld ? kSteps : 1];
  const uint4* shared;

  __device__ void load(const DecodeParams& p, const Segment& s, int row_warp, int row_warps, uint4* memory) {
    const int lane = threadIdx.x % 32;
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        load_fragments<T>(p, s, row_warp * kTileRows + lane / 4, i * 32 + lane % 4 * 8, held[2 * i], held[2 * i + 1]);
      }
    } else {
      share_queries<T, D>(p, s, memory, row_warps * kTileRows);
      shared = memory + row_warp * kSteps * 32 + lane;
      __syncthreads();
    }
  }

  __device__ uint4 step(int i) const {
    if constexpr (kHeld) {
      return held[i];
    } else {
      return shared[i * 32];
    }
  }

  // The scores of a tile.
  __device__ void multiply(float (&scores)[2][4], const uint4* keys) const {
    const int g = threadIdx.x % 32 / 4;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const uint4* piece = keys + g * (D / 8) + place_of(g, i % 2 * 4 + c) + i / 2 * 8;
      add_scores<T>(scores, step(2 * i), step(2 * i + 1), piece[0], piece[8 * (D / 8)]);
    }
  }
};

template <typename T, int D>
__device__ inline void add_values(TileRows<T, D>& rows, const uint4& weights, const uint4* values) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int b = 0; b < D / 64; ++b) {
    uint4 pieces[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int key = value_key(r);
      pieces[r] = values[key * (D / 8) + place_of(key, g) + b * 8];
    }
    rows.add(weights, b, pieces);
  }
}

template <typename T, int D, bool Team, Keys Kind>
__device__ inline void decode(const DecodeParams& p) {
  const Slice<Team> slice(p);
  const int first_row = slice.row_warp * kTileRows;
  extern __shared__ uint4 memory[];
  uint4* rings = memory + NarrowTraits{D}.query_bytes(slice.row_warps * kTileRows) / 16;
  float* results = reinterpret_cast<float*>(rings);

  if constexpr (!Team && Kind != Keys::even) {
    write_nothing<T>(p);
  }
  Segments<Kind == Keys::even> segments(p);
  Segment s;
  while (segments.next(s)) {
    TileRows<T, D> rows;
    rows.clear();
    TileRing<T, D, Team, Kind> ring(p, s, slice, rings);
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) {
      ring.copy_next(stage);
    }
    Queries<T, D> queries;
    queries.load(p, s, slice.row_warp, slice.row_warps, memory);
    for (int stage = 0; ring.tiles[1] < s.tiles; stage = stage + 1 == kStages ? 0 : stage + 1) {
      ring.advance(stage);
      float scores[2][4] = {};
      queries.multiply(scores, ring.keys(stage));
      float unit;
      if constexpr (Kind == Keys::masked) {
        unit = mask_tile(p, scores, ring.abouts[0]);
      } else {
        const int row = first_row + static_cast<int>(threadIdx.x) % 32 / 4;
        unit = restrict_tile<T, 2, Kind != Keys::even>(p, s, scores, row, s.first + ring.tiles[0] * kTileKeys);
      }
      add_values(rows, rows.weigh(scores, unit), ring.values(stage));
    }

    const unsigned long long ticket = Team ? 0 : read_ticket(p, s);
    rows.write(p, s, results, slice.index, slice.count, first_row, min(slice.row_warps * kTileRows, s.rows));
    if (!Team && s.slot >= 0) {
      merge_parts<T>(p, s, segments.parts(s), ticket, results);
    }
    __syncthreads();
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_DECODE(name, dtype, D, TEAM, KEYS)                                                     \
  extern "C" __global__ void __launch_bounds__(                                                         \
      (TEAM ? mlx_cuda::NarrowTraits{D}.team_warps() : mlx_cuda::NarrowTraits{D}.solo_warps()) * 32, 1) \
      name(const __grid_constant__ mlx_cuda::DecodeParams params) {                                     \
    mlx_cuda::begin_pdl();                                                                              \
    mlx_cuda::decode<mlx_cuda::types::dtype, D, TEAM, KEYS>(params);                                    \
  }
#define MLX_CUDA_DECODE_MERGE(name, dtype)                                                                         \
  extern "C" __global__ void __launch_bounds__(1024) name(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    mlx_cuda::begin_pdl();                                                                                         \
    mlx_cuda::merge<mlx_cuda::types::dtype>(params);                                                               \
  }
MLX_CUDA_DECODE_KERNELS(MLX_CUDA_DECODE, MLX_CUDA_DECODE_MERGE)
