// Attention of few queries with wide heads (head_dim over 256, as in MLA): the warps of a block work on the same tile of keys.
//
// A result of 512 columns does not fit into the registers of one warp, so each warp has 64 columns of V for all rows of the block,
// and the scores of a tile of keys are computed once, by eight keys and 16 rows, and exchanged through shared memory. Where V is
// the first columns of K, as in MLA, it is read from K's tile, and there is room for tiles of 64 keys instead of 32. See rows.cuh
// for how the work is shared, and decode.cu for the order of the fragments. Pieces of 16 bytes lie in shared memory by rows,
// exchanged within a row such that neither the fragments of K (eight keys, four pieces) nor those of V (four keys, eight pieces)
// meet in a bank.
#include "attention/decode/results.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kWidest = 576;
[[maybe_unused]] constexpr int kWarps = 8;

// RowTiles: tiles of 16 rows of a block. Shared: V is the first columns of K.
template <typename T, int RowTiles, bool Shared>
__device__ inline void decode_wide(const DecodeParams& p) {
  constexpr int kTileKeys = Shared ? 64 : 32;
  constexpr int kLoads = kWidest / 32;
  constexpr int kParts = kTileKeys / 8;                                   // of a tile's scores
  constexpr int kTasks = (RowTiles * kParts + kWarps - 1) / kWarps;       // of these for one warp: one row tile
  constexpr int kHeldLoads = RowTiles == 1 ? 14 : RowTiles == 2 ? 8 : 0;  // whose part of Q is in registers
  constexpr int kSharedLoads = kLoads - kHeldLoads;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int key_pieces = p.head_dim <= kWidest - 64 ? kWidest / 8 - 8 : kWidest / 8;  // of 16 bytes in a row of K
  const int value_pieces = Shared ? key_pieces : (p.value_dim + 63) / 64 * 8;
  const int stage_pieces = kTileKeys * (key_pieces + (Shared ? 0 : value_pieces));
  const int loads = key_pieces / 4;
  const int mine = warp * kTasks / kParts;  // the row tile whose scores this warp computes
  const int part = warp * kTasks % kParts;  // and its first part
  const bool scoring = mine < RowTiles;
  const bool has_columns = warp * 64 < p.value_dim;

  extern __shared__ uint4 memory[];
  uint4* weights = memory;                                                            // fragments [row tile][step][lane]
  float* peaks = reinterpret_cast<float*>(weights + RowTiles * kTileKeys / 16 * 32);  // [row][part]; in the end sums
  float* tops = peaks + RowTiles * 16 * kParts;                                       // [row]
  uint4* q_shared = reinterpret_cast<uint4*>(tops + RowTiles * 16);                   // fragments [row tile][load][2][lane]
  uint4* ring = q_shared + RowTiles * kSharedLoads * 64;

  Segments segments(p);
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
    uint4 q_held[2 * kHeldLoads + 1];
#pragma unroll
    for (int i = 0; i < kHeldLoads; ++i) {
      const uint4 low = query_piece(mine * 16 + g, i * 32 + c * 8);
      const uint4 high = query_piece(mine * 16 + g + 8, i * 32 + c * 8);
      q_held[2 * i] = make_uint4(low.x, high.x, low.y, high.y);
      q_held[2 * i + 1] = make_uint4(low.z, high.z, low.w, high.w);
    }
    for (int index = threadIdx.x; index < RowTiles * kSharedLoads * 32; index += kWarps * 32) {
      const int tile = index / 32 / kSharedLoads;
      const int load = index / 32 % kSharedLoads;
      const int column = (kHeldLoads + load) * 32 + index % 4 * 8;
      const uint4 low = query_piece(tile * 16 + index % 32 / 4, column);
      const uint4 high = query_piece(tile * 16 + index % 32 / 4 + 8, column);
      uint4* to = q_shared + (tile * kSharedLoads + load) * 64 + index % 32;
      to[0] = make_uint4(low.x, high.x, low.y, high.y);
      to[32] = make_uint4(low.z, high.z, low.w, high.w);
    }

    float acc[RowTiles][8][4];
    float peak[RowTiles][2];
    float my_peak[2];
    float my_sum[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc[t][j][0] = acc[t][j][1] = acc[t][j][2] = acc[t][j][3] = 0;
      }
      peak[t][0] = peak[t][1] = -kInfinity;
    }
    my_peak[0] = my_peak[1] = -kInfinity;

    // Each lane copies pieces of one row: eight of every 64 columns' eight.
    constexpr int kRows = kTileKeys / 32;
    const int copied = warp * 4 + lane / 8;  // and 32 after it
    const T* k_head = static_cast<const T*>(p.k) + s.kv_head * p.k_strides.head + lane % 8 * 8;
    const T* v_head = static_cast<const T*>(p.v) + s.kv_head * p.v_strides.head + lane % 8 * 8;
    int pages[kRows] = {};  // of the rows of the next tile
    auto find_pages = [&](int tile) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int key = s.first + tile * kTileKeys + copied + i * 32;
        const bool there = tile < s.tiles && key >= s.span.begin && key < s.last;
        pages[i] = there ? p.table[s.batch * p.table_stride + key / p.page_size] : 0;
      }
    };
    auto copy = [&]<bool Paged>(int stage, int tile) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int key = s.first + tile * kTileKeys + copied + row * 32;
        const bool there = key >= s.span.begin && key < s.last;
        const long long outer = Paged ? pages[row] : s.batch;
        const int inner = Paged ? key % p.page_size : key;
        const T* k_row = k_head + outer * p.k_strides.batch + inner * p.k_strides.row;
        uint4* to = ring + stage * stage_pieces + (copied + row * 32) * key_pieces + place_of(copied, lane % 8);
#pragma unroll 3
        for (int i = 0; i < key_pieces / 8; ++i) {
          copy16(to + i * 8, k_row + i * 64, there && i * 64 + lane % 8 * 8 < p.head_dim);
        }
        if constexpr (!Shared) {
          const T* v_row = v_head + outer * p.v_strides.batch + inner * p.v_strides.row;
          to = ring + stage * stage_pieces + kTileKeys * key_pieces + copied * value_pieces + place_of(copied, lane % 8);
#pragma unroll 2
          for (int i = 0; i < value_pieces / 8; ++i) {
            copy16(to + i * 8, v_row + i * 64, there && i * 64 + lane % 8 * 8 < p.value_dim);
          }
        }
      }
    };
    int next = 0;  // tile to be copied
    if (p.table) {
      find_pages(0);
    }
    auto copy_next = [&](int stage) {
      if (next < s.tiles && p.table) {
        copy.template operator()<true>(stage, next);
        find_pages(next + 1);
      } else if (next < s.tiles) {
        copy.template operator()<false>(stage, next);
      }
      ++next;
      commit_copies();
    };
#pragma unroll 1
    while (next < p.stages - 1) {
      copy_next(next);
    }

    int stage = 0;
    for (int tile = 0; tile < s.tiles; ++tile) {
      if (p.stages > 2) {
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();  // all have copied their part of this tile, and are done with the one before
      copy_next(stage == 0 ? p.stages - 1 : stage - 1);
      const int key0 = s.first + tile * kTileKeys;
      const uint4* keys = ring + stage * stage_pieces;
      const uint4* values = Shared ? keys : keys + kTileKeys * key_pieces;
      stage = stage + 1 == p.stages ? 0 : stage + 1;

      const bool whole = whole_tile(p, s, key0);
      const float unit = whole ? p.scale : 1.0f;
      float scores[kTasks][4];
      if (scoring) {
        constexpr int kChains = kTasks == 1 ? 2 : 1;  // of dependent products
        float halves[kTasks][kChains][4] = {};
        const int even = (part * 8 + g) * key_pieces + place_of(g, c);
        const int odd = (part * 8 + g) * key_pieces + place_of(g, c + 4);
        auto add = [&](int i) {
          const uint4* q = q_shared + (mine * kSharedLoads + i - kHeldLoads) * 64 + lane;
          const uint4 q0 = i < kHeldLoads ? q_held[2 * min(i, kHeldLoads)] : q[0];
          const uint4 q1 = i < kHeldLoads ? q_held[min(2 * i + 1, 2 * kHeldLoads)] : q[32];
#pragma unroll
          for (int n = 0; n < kTasks; ++n) {
            const uint4 key = keys[n * 8 * key_pieces + (i % 2 ? odd : even) + i / 2 * 8];
            mma(halves[n][0], q0, key.x, key.y, T{});
            mma(halves[n][kChains - 1], q1, key.z, key.w, T{});
          }
        };
#pragma unroll
        for (int i = 0; i < kLoads - 2; ++i) {
          add(i);
        }
        if (loads == kLoads) {
          add(kLoads - 2);
          add(kLoads - 1);
        }
#pragma unroll
        for (int i = 0; i < kTasks * 4; ++i) {
          scores[i / 4][i % 4] = halves[i / 4][0][i % 4] + (kChains > 1 ? halves[i / 4][kChains - 1][i % 4] : 0.0f);
        }
        if (!whole) {
          restrict_scores<T, kTasks>(p, s, scores, mine * 16 + g, key0 + part * 8 + 2 * c);
        }
#pragma unroll
        for (int i = 0; i < kTasks * 2; ++i) {
          float top = fmaxf(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
          if (c == 0) {
            peaks[(mine * 16 + g + i % 2 * 8) * kParts + part + i / 2] = top * unit;
          }
        }
      }
      __syncthreads();
      auto higher = [&](int row, float before) {
#pragma unroll
        for (int n = 0; n < kParts; n += 4) {
          const float4 these = *reinterpret_cast<const float4*>(peaks + row * kParts + n);
          before = fmaxf(before, fmaxf(fmaxf(these.x, these.y), fmaxf(these.z, these.w)));
        }
        return before;
      };
      if (scoring) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float base = higher(mine * 16 + g + half * 8, my_peak[half]);
          const float zero = base == -kInfinity ? 0.0f : base;
          my_sum[half] *= my_peak[half] == -kInfinity ? 0.0f : exp2f(my_peak[half] - base);
          my_peak[half] = base;
#pragma unroll
          for (int n = 0; n < kTasks; ++n) {
            const float low = exp2_approx(fmaf(scores[n][half * 2], unit, -zero));
            const float high = exp2_approx(fmaf(scores[n][half * 2 + 1], unit, -zero));
            my_sum[half] += low + high;
            unsigned* to = reinterpret_cast<unsigned*>(weights + (mine * (kTileKeys / 16) + (part + n) / 2) * 32 + lane);
            to[(part + n) % 2 * 2 + half] = pack(low, high, T{});
          }
        }
      }
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
        const float base[2] = {higher(t * 16 + g, peak[t][0]), higher(t * 16 + g + 8, peak[t][1])};
        if (__any_sync(~0u, base[0] > peak[t][0] || base[1] > peak[t][1])) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float shrink = peak[t][half] == -kInfinity ? 0.0f : exp2f(peak[t][half] - base[half]);
            peak[t][half] = base[half];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              acc[t][j][half * 2] *= shrink;
              acc[t][j][half * 2 + 1] *= shrink;
            }
          }
        }
      }
      __syncthreads();
      if (has_columns) {
#pragma unroll
        for (int step = 0; step < kTileKeys / 16; ++step) {
          uint4 pieces[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int key = step * 16 + 2 * c + (r & 1) + (r >> 1) * 8;
            pieces[r] = values[key * value_pieces + place_of(key, warp * 8 + g)];
          }
          uint4 factors[RowTiles];
#pragma unroll
          for (int t = 0; t < RowTiles; ++t) {
            factors[t] = weights[(t * (kTileKeys / 16) + step) * 32 + lane];
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const unsigned selector = j & 1 ? 0x7632 : 0x5410;
            const unsigned b0 = __byte_perm(word(pieces[0], j / 2), word(pieces[1], j / 2), selector);
            const unsigned b1 = __byte_perm(word(pieces[2], j / 2), word(pieces[3], j / 2), selector);
#pragma unroll
            for (int t = 0; t < RowTiles; ++t) {
              mma(acc[t][j], factors[t], b0, b1, T{});
            }
          }
        }
      }
    }

    __syncthreads();
    if (scoring) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        my_sum[half] += __shfl_xor_sync(~0u, my_sum[half], 1);
        my_sum[half] += __shfl_xor_sync(~0u, my_sum[half], 2);
        if (c == 0) {
          peaks[(mine * 16 + g + half * 8) * kParts + part] = my_sum[half];
        }
      }
    }
    // Through shared memory, in the place of Q and K, into rows.
    float* results = reinterpret_cast<float*>(q_shared);  // [row][pitch]
    constexpr int pitch = 512 + 4;
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // half of the row tile, eight columns, four of these
        const int half = i / 4 * 2;
        const int e = half + i / 2 % 2;
        const int j = i % 2 * 4;
        *reinterpret_cast<float4*>(results + (t * 16 + g + half * 4) * pitch + warp * 64 + c * 16 + i % 4 * 4) =
            make_float4(acc[t][j][e], acc[t][j + 1][e], acc[t][j + 2][e], acc[t][j + 3][e]);
      }
      if (warp == 0 && c == 0) {
        tops[t * 16 + g] = peak[t][0];
        tops[t * 16 + g + 8] = peak[t][1];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int index = threadIdx.x; index < s.rows * (p.value_dim / 4); index += kWarps * 32) {
      const int row = index / (p.value_dim / 4);
      const int column = index % (p.value_dim / 4) * 4;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kParts; n += kTasks) {
        total += peaks[row * kParts + n];
      }
      write_result<T>(p, s, row, column, tops[row], total, *reinterpret_cast<const float4*>(results + row * pitch + column));
    }
    __syncthreads();
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_WIDE_BODY(...) mlx_cuda::decode_wide<__VA_ARGS__>(params);
#else
#define MLX_CUDA_WIDE_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_WIDE(name, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    MLX_CUDA_WIDE_BODY(__VA_ARGS__)                                                                                  \
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
