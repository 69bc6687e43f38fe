// Attention of few queries: one read of the keys and values, at the speed of memory.
//
// The queries of all heads that share a kv head are the rows of one tensor core tile, so K and V are read once for all of them.
// Which k index of mma.m16n8k16 is which element of head_dim is free, as long as Q agrees, and so is which column of V is which n
// index; both are chosen so that a thread's fragments are 16 adjacent bytes of K and V, and that it holds, at the end, 16 adjacent
// elements of the output. So tiles of 16 keys are copied to shared memory in the order of the fragments, some tiles ahead of their
// use: a warp that has them for itself reads just what it has copied, and waits for no other. Where there are more rows than a warp
// holds, several warps share tiles. The warps of a block merge through shared memory, blocks in a second kernel.
#include "attention/decode/results.cuh"
#include "attention/decode/tile.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileKeys = 16;
[[maybe_unused]] constexpr int kStages = 3;  // tiles of K and V in shared memory

enum class Keys {
  plain,   // in one piece
  even,    // and the same ones in all units, without a mask: these kernels begin sooner
  masked,  // and a bool mask of one row hides some: tiles that it hides are never read
  paged,
};

// Team: warps share tiles of keys.
template <typename T, int D, bool Team, Keys Kind>
__device__ inline void decode(const DecodeParams& p) {
  constexpr int kSteps = D / 16;   // of the k index of Q K^T
  constexpr int kLoads = D / 32;   // 16-byte loads of a row of K by a quad
  constexpr int kBlocks = D / 64;  // 64 columns of V
  constexpr int kPieces = D / 8;   // of 16 bytes in a row
  constexpr int kStage = 2 * kTileKeys * kPieces;
  constexpr bool kHeldQ = D <= 128;  // in registers
  const int threads = static_cast<int>(blockDim.x);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int row_warps = Team ? p.row_warps : 1;
  const int slices = threads / 32 / row_warps;  // that take tiles in turn
  const int row_warp = Team ? warp % row_warps : 0;
  const int slice = Team ? warp / row_warps : warp;

  extern __shared__ uint4 memory[];
  uint4* q_shared = memory;  // fragments [row tile][step][lane]
  uint4* ring = memory + (kHeldQ ? 0 : row_warps * kSteps * 32);
  uint4* my_ring = ring + slice * kStages * kStage;
  float* results = reinterpret_cast<float*>(ring);
  const uint4* my_q = q_shared + row_warp * kSteps * 32 + lane;

  if constexpr (!Team && Kind != Keys::even) {
    write_nothing<T>(p);
  }
  Segments<Kind == Keys::even> segments(p);
  Segment s;
  while (segments.next(s)) {
    auto query_piece = [&](int row, int column) {
      if (row >= s.rows || column >= p.head_dim) {
        return make_uint4(0, 0, 0, 0);
      }
      const Row place = row_of(p, s, row);
      return *reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.q) + s.batch * p.q_strides.batch + place.head * p.q_strides.head + place.query * p.q_strides.row +
          column);
    };
    TileRows<T, D> rows;
    rows.clear();

    const T* k_head = static_cast<const T*>(p.k) + s.kv_head * p.k_strides.head + lane % 8 * 8;
    const T* v_head = static_cast<const T*>(p.v) + s.kv_head * p.v_strides.head + lane % 8 * 8;
    if constexpr (Kind != Keys::paged) {
      k_head += s.batch * p.k_strides.batch;
      v_head += s.batch * p.v_strides.batch;
    }
    const bool page_holds_tile = p.page_size % kTileKeys == 0;

    // This warp's tiles are numbers slice, slice + slices, ... What is known of 32 of them lies in the lanes of a warp: which keys
    // are seen, or the page.
    int ordinal = 0;
    int known = 0;
    auto find_out = [&](int tile) {
      const int key0 = s.first + tile * kTileKeys;
      if (tile >= s.tiles) {
        return 0;
      }
      if constexpr (Kind == Keys::paged) {
        return page_holds_tile ? p.table[s.batch * p.table_stride + key0 / p.page_size] : 0;
      } else {
        const unsigned char* mask = static_cast<const unsigned char*>(p.mask) + s.batch * p.mask_strides[0];
        int bits = 0;
#pragma unroll
        for (int i = 0; i < kTileKeys; ++i) {
          const int key = key0 + i;
          if (key >= s.span.begin && key < s.last && mask[key * p.mask_strides[3]]) {
            bits |= 1 << i;
          }
        }
        return bits;
      }
    };
    // The next tile to be copied, or s.tiles or more.
    auto next_tile = [&](int& about) {
      for (;;) {
        const int tile = slice + ordinal * slices;
        if (Kind == Keys::plain || Kind == Keys::even || tile >= s.tiles) {
          ++ordinal;
          return tile;
        }
        if (ordinal % 32 == 0) {
          known = find_out(tile + lane * slices);
        }
        about = __shfl_sync(~0u, known, ordinal % 32);
        ++ordinal;
        if (Kind == Keys::paged || about != 0) {
          return tile;
        }
      }
    };

    auto copy = [&](int stage, int tile, int about) {
      const int key0 = s.first + tile * kTileKeys;
      const bool all = key0 >= s.span.begin && key0 + kTileKeys <= s.last;
      long long k_tile = key0 * p.k_strides.row;
      long long v_tile = key0 * p.v_strides.row;
      int page = 0;
      int inside = 0;
      if constexpr (Kind == Keys::paged) {
        if (page_holds_tile) {
          inside = key0 % p.page_size;
          k_tile = about * p.k_strides.batch + inside * p.k_strides.row;
          v_tile = about * p.v_strides.batch + inside * p.v_strides.row;
        } else {  // each key of its own
          const int key = key0 + lane % kTileKeys;
          const bool there = key >= s.span.begin && key < s.last;
          page = there ? p.table[s.batch * p.table_stride + key / p.page_size] : 0;
          inside = key % p.page_size;
        }
      }
      uint4* to = my_ring + stage * kStage;
      auto copy_piece = [&](int part, int b) {  // eight lanes have one row
        const int i = part * 4 + lane / 8;
        const T* k_row = k_head + k_tile + i * p.k_strides.row;
        const T* v_row = v_head + v_tile + i * p.v_strides.row;
        if (Kind == Keys::paged && !page_holds_tile) {
          const long long own_page = __shfl_sync(~0u, page, i);
          const long long own_place = __shfl_sync(~0u, inside, i);
          k_row = k_head + own_page * p.k_strides.batch + own_place * p.k_strides.row;
          v_row = v_head + own_page * p.v_strides.batch + own_place * p.v_strides.row;
        }
        const bool there = all || (key0 + i >= s.span.begin && key0 + i < s.last);
        const int column = b * 64 + lane % 8 * 8;
        uint4* piece = to + i * kPieces + place_of(i, lane % 8) + b * 8;
        copy16(piece, k_row + b * 64, there && column < p.head_dim);
        copy16(piece + kTileKeys * kPieces, v_row + b * 64, there && column < p.value_dim);
      };
      if constexpr (Team) {
#pragma unroll 1
        for (int job = row_warp; job < 4 * kBlocks; job += row_warps) {
          copy_piece(job / kBlocks, job % kBlocks);
        }
      } else {
#pragma unroll
        for (int job = 0; job < 4 * kBlocks; ++job) {
          copy_piece(job / kBlocks, job % kBlocks);
        }
      }
    };

    int tiles[kStages] = {};  // that are copied or under way; the last place is the newest
    int abouts[kStages] = {};
    auto copy_next = [&](int stage) {
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) {
        tiles[i] = tiles[i + 1];
        abouts[i] = abouts[i + 1];
      }
      tiles[kStages - 1] = next_tile(abouts[kStages - 1]);
      if (tiles[kStages - 1] < s.tiles) {
        copy(stage, tiles[kStages - 1], abouts[kStages - 1]);
      }
      commit_copies();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      copy_next(i);
    }
    uint4 q_held[kHeldQ ? kSteps : 1];
    if constexpr (kHeldQ) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 low = query_piece(row_warp * kTileRows + g, i * 32 + c * 8);
        const uint4 high = query_piece(row_warp * kTileRows + g + 8, i * 32 + c * 8);
        q_held[2 * i] = make_uint4(low.x, high.x, low.y, high.y);
        q_held[2 * i + 1] = make_uint4(low.z, high.z, low.w, high.w);
      }
    } else {
      unsigned* words = reinterpret_cast<unsigned*>(q_shared);
#pragma unroll 1
      for (int index = threadIdx.x; index < row_warps * kTileRows * (D / 8); index += threads) {
        const int row = index / (D / 8);
        const int column = index % (D / 8) * 8;
        const uint4 value = query_piece(row, column);
        unsigned* to = words + ((row / kTileRows * kSteps + column / 32 * 2) * 32 + row % 8 * 4 + column / 8 % 4) * 4 + row / 8 % 2;
        to[0] = value.x;
        to[2] = value.y;
        to[32 * 4] = value.z;
        to[32 * 4 + 2] = value.w;
      }
    }
    if constexpr (!kHeldQ) {
      __syncthreads();
    }
    for (int stage = 0; tiles[1] < s.tiles; stage = stage + 1 == kStages ? 0 : stage + 1) {
      wait_copies<kStages - 2>();
      __syncwarp();
      if constexpr (Team) {  // all have copied their part of this tile, and are done with the one before
        asm volatile("bar.sync %0, %1;" ::"r"(slice + 1), "r"(row_warps * 32) : "memory");
      }
      copy_next(stage == 0 ? kStages - 1 : stage - 1);

      const int tile = s.first + tiles[0] * kTileKeys;
      const uint4* pieces = my_ring + stage * kStage;
      float scores[2][4] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4* piece = pieces + g * kPieces + place_of(g, i % 2 * 4 + c) + i / 2 * 8;
        const uint4 keys[2] = {piece[0], piece[8 * kPieces]};
        const uint4 q0 = kHeldQ ? q_held[2 * i % (kHeldQ ? kSteps : 1)] : my_q[2 * i * 32];
        const uint4 q1 = kHeldQ ? q_held[(2 * i + 1) % (kHeldQ ? kSteps : 1)] : my_q[(2 * i + 1) * 32];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma(scores[n], q0, keys[n].x, keys[n].y, T{});
          mma(scores[n], q1, keys[n].z, keys[n].w, T{});
        }
      }

      // Whether every row sees every key of this tile, as in nearly all of them.
      const int bits = abouts[0];
      const bool whole = Kind == Keys::masked ? bits == 0xffff && p.scale > 0 : whole_tile(p, s, tile);
      if (Kind == Keys::masked && !whole) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& score = scores[i / 4][i % 4];
          score = bits >> (i / 4 * 8 + 2 * c + i % 2) & 1 ? score * p.scale : -kInfinity;
        }
      } else if (!whole) {
        restrict_scores<T, 2, Kind != Keys::even>(p, s, scores, row_warp * kTileRows + g, tile + 2 * c);
      }
      const uint4 weights = rows.weigh(scores, whole ? p.scale : 1.0f);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint4 values[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int key = 2 * c + (r & 1) + (r >> 1) * 8;
          values[r] = pieces[(kTileKeys + key) * kPieces + place_of(key, g) + b * 8];
        }
        rows.add(weights, b, values);
      }
    }

    // All slices write what they have, then all threads read.
    const unsigned long long ticket = Team ? 0 : read_ticket(p, s);
    __syncthreads();
    const int held = min(row_warps * kTileRows, s.rows);  // rows that anybody holds
    float* scales = results + slices * held * rows.kPitch;
    rows.put(results, scales, slice, row_warp * kTileRows, held);
    __syncthreads();
    merge_slices<T, rows.kPitch>(p, s, results, scales, slices, held);
    if (!Team && s.slot >= 0) {
      merge_parts<T>(p, s, segments.parts(s), ticket, results);
    }
    __syncthreads();
  }
}

// One block for each query of each head: what the workers have put aside, in their order, and zeros where nobody had anything to
// do.
template <typename T>
__device__ inline void merge(const DecodeParams& p) {
  __shared__ float4 values[8][128];  // [group][lane]
  __shared__ float2 scales[8];
  const int index = blockIdx.x;  // [B, H, Tq]
  const int heads = p.kv_heads * p.group;
  const Row place{index / p.q_length % heads, index % p.q_length};
  const int batch = index / p.q_length / heads;
  const int row = place.head % p.group * p.q_length + place.query;
  const int lanes = static_cast<int>(blockDim.x) / p.merge_groups;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  const int column = lane * 4;
  float top = -kInfinity;
  float total = 0;
  float4 value = make_float4(0, 0, 0, 0);
  auto add = [&](const float2& scale, const float4& part) {  // a maximum and a sum
    if (scale.x == -kInfinity) {
      return;
    }
    const float higher = fmaxf(top, scale.x);
    const float mine = exp2_approx(top - higher);
    const float theirs = exp2_approx(scale.x - higher);
    total = mine * total + theirs * scale.y;
    value.x = mine * value.x + theirs * part.x;
    value.y = mine * value.y + theirs * part.y;
    value.z = mine * value.z + theirs * part.z;
    value.w = mine * value.w + theirs * part.w;
    top = higher;
  };
  const int tiles = p.unit_tiles > 0 ? p.unit_tiles : span_of(p, batch).tiles;
  if (tiles > 0) {
    const Work work = share_work(p);
    const unsigned before = p.unit_tiles > 0 ? batch * (p.unit_tiles * p.kv_heads * p.row_blocks) : tiles_before(p, batch);
    const int unit = place.head / p.group * p.row_blocks + row / p.block_rows;
    const unsigned begin = before + unit * tiles;
    const int first = work.worker_of(begin);
    const int last = work.worker_of(begin + tiles - 1);
    if (first == last) {
      return;  // it has written the result
    }
#pragma unroll 4
    for (int worker = first + group; worker <= last; worker += p.merge_groups) {
      const int slot = 2 * worker + (worker == first && work.start(worker) != begin);
      const long long at = static_cast<long long>(slot) * p.block_rows + row % p.block_rows;
      const float2 scale = *reinterpret_cast<const float2*>(p.partial_scale + at * 2);
      float4 part = make_float4(0, 0, 0, 0);
      if (column < p.value_dim) {
        part = *reinterpret_cast<const float4*>(p.partial + at * p.value_dim + column);
      }
      add(scale, part);
    }
    if (p.merge_groups > 1) {
      values[group][lane] = value;
      if (lane == 0) {
        scales[group] = make_float2(top, total);
      }
      __syncthreads();
      for (int other = 1; group == 0 && other < p.merge_groups; ++other) {
        add(scales[other], values[other][lane]);
      }
    }
  }
  if (group == 0 && column < p.value_dim) {
    finish<T>(p, batch, place, column, top, total, value);
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_DECODE_BODY(...) mlx_cuda::decode<__VA_ARGS__>(params);
#else
#define MLX_CUDA_DECODE_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_DECODE_KERNEL(name, THREADS, ...)                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    MLX_CUDA_DECODE_BODY(__VA_ARGS__)                                                                                    \
  }

// For rows that one warp holds (a block of `WARPS` warps), and for more (of `TEAM` warps).
#define MLX_CUDA_DECODE(dtype, T, D, WARPS, TEAM)                                                        \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D, WARPS * 32, T, D, false, mlx_cuda::Keys::plain)           \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_even, WARPS * 32, T, D, false, mlx_cuda::Keys::even)     \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_masked, WARPS * 32, T, D, false, mlx_cuda::Keys::masked) \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_paged, WARPS * 32, T, D, false, mlx_cuda::Keys::paged)   \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_rows, TEAM * 32, T, D, true, mlx_cuda::Keys::plain)      \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_rows_paged, TEAM * 32, T, D, true, mlx_cuda::Keys::paged)

#define MLX_CUDA_DECODE_ALL(dtype, T)                                                 \
  MLX_CUDA_DECODE(dtype, T, 64, 16, 16)                                               \
  MLX_CUDA_DECODE(dtype, T, 128, 8, 12)                                               \
  MLX_CUDA_DECODE(dtype, T, 256, 4, 8)                                                \
  extern "C" __global__ void __launch_bounds__(1024)                                  \
      decode_##dtype##_merge(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    mlx_cuda::merge<T>(params);                                                       \
  }

MLX_CUDA_DECODE_ALL(float16, __half)
MLX_CUDA_DECODE_ALL(bfloat16, __nv_bfloat16)
