// Attention of few queries: one read of the keys and values, at the speed of memory.
//
// The queries of all heads that share a kv head are the rows of one tensor core tile, so K and V are read once for all of them.
// They go from global memory straight into the fragments of mma.m16n8k16: which of its k index is which element of head_dim is
// free, as long as Q agrees, and so is which column of V is which n index; both are chosen so that each thread reads 16 adjacent
// bytes and holds, at the end, 16 adjacent elements of the output. Warps of a block take tiles of 16 keys in turn and merge through
// shared memory; blocks (splits of the keys) merge in a second kernel. Sums are in a fixed order: the result does not depend on
// timing.
#include "kernels/decode.h"

#include "kernels/mma.cuh"
#include "kernels/vector.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileKeys = 16;
[[maybe_unused]] constexpr int kTileRows = 16;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Scales the scores of one row and hides the keys that it does not see.
template <typename T>
__device__ inline void restrict_scores_of(
    const DecodeParams& p,
    float (&scores)[2][4],
    int half,
    int row,
    int rows,
    int batch,
    int kv_head,
    int key0,
    int begin,
    int last,
    int end_all) {
  const int query = row % p.q_length;
  const int head = kv_head * p.group + row / p.q_length;
  const int diagonal = query + end_all - p.q_length;  // the key that stands at the query's own place
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = key0 + n * 8 + e;
      float& score = scores[n][half * 2 + e];
      score *= p.scale;
      if (p.softcap > 0) {
        score = p.softcap * kLog2e * (1.0f - 2.0f / (exp2f(2.0f * kLog2e * score) + 1.0f));
      }
      bool seen = row < rows && key >= begin && key < last;
      seen = seen && (p.window_left < 0 || key >= diagonal - p.window_left);
      seen = seen && (p.window_right < 0 || key <= diagonal + p.window_right);
      if (p.mask && seen) {
        const long long at =
            batch * p.mask_strides[0] + head * p.mask_strides[1] + query * p.mask_strides[2] + key * p.mask_strides[3];
        if (p.mask_is_bool) {
          seen = static_cast<const unsigned char*>(p.mask)[at] != 0;
        } else {
          // A finite number stays finite, however low.
          const float bias = to_float(static_cast<const T*>(p.mask)[at]);
          score = bias == -kInfinity ? bias : fmaxf(fmaf(kLog2e, bias, score), -kLargest);
        }
      }
      score = seen ? score : -kInfinity;
    }
  }
}

// Block (split, kv head, batch entry). Masked: a bool mask of one row hides keys. RowTiles: tiles of 16 rows that a warp holds.
// Parts: warps that share the columns of V between them.
template <typename T, int D, int RowTiles, int Parts, bool Shared, bool Masked>
__device__ inline void decode(const DecodeParams& p) {
  constexpr int kSteps = D / 16;           // of the k index of Q K^T
  constexpr int kLoads = D / 32;           // 16-byte loads of a row of K by a quad
  constexpr int kBlocks = D / 64 / Parts;  // 64 columns of V
  constexpr int kColumns = kBlocks * 64;
  constexpr int kPitch = kColumns + 4;  // of a row of results in shared memory
  const int threads = static_cast<int>(blockDim.x);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int batch = blockIdx.z;
  const int kv_head = blockIdx.y;
  const int split = blockIdx.x;
  const int rows = p.group * p.q_length;
  const int row_warps = (rows + RowTiles * kTileRows - 1) / (RowTiles * kTileRows);  // that share the keys and have different rows
  const int slices = threads / 32 / (row_warps * Parts);
  const int part = warp % Parts;
  const int row_warp = warp / Parts % row_warps;
  const int slice = warp / (Parts * row_warps);
  const bool idle = slice >= slices;

  const int begin_all = p.starts ? max(p.starts[batch], 0) : 0;
  const int end_all = p.ends ? min(p.ends[batch], p.kv_length) : p.kv_length;
  // The keys that some query of this batch entry sees.
  int begin = begin_all;
  int end = end_all;
  if (p.window_left >= 0) {
    begin = max(begin, end_all - p.q_length - p.window_left);
  }
  if (p.window_right >= 0) {
    end = min(end, end_all + p.window_right);
  }
  const int first = begin / kTileKeys * kTileKeys + split * p.chunk;
  const int last = min(end, first + p.chunk);

  // A bool mask of one row is read once, before the keys: tiles that it hides are never read.
  extern __shared__ uint4 memory[];
  unsigned* tile_bits = reinterpret_cast<unsigned*>(memory);  // [tile]: which of its keys are seen
  uint4* shared = memory + (Masked ? p.chunk / kTileKeys / 4 : 0);
  if constexpr (Masked) {
    const unsigned char* mask = static_cast<const unsigned char*>(p.mask) + batch * p.mask_strides[0];
    for (int index = threadIdx.x; index < (last - first + kTileKeys - 1) / kTileKeys; index += threads) {
      unsigned bits = 0;
      for (int i = 0; i < kTileKeys; ++i) {
        const int key = first + index * kTileKeys + i;
        if (key >= begin && key < last && mask[key * p.mask_strides[3]]) {
          bits |= 1u << i;
        }
      }
      tile_bits[index] = bits;
    }
  }
  // Q as fragments [row tile][step][lane]: the four words of a thread are adjacent.
  unsigned* q_words = reinterpret_cast<unsigned*>(shared);
  for (int index = threadIdx.x; index < row_warps * RowTiles * kTileRows * (D / 8); index += threads) {
    const int row = index / (D / 8);
    const int column = index % (D / 8) * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < rows && column < p.head_dim) {
      value = *reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.q) + batch * p.q_strides.batch + (kv_head * p.group + row / p.q_length) * p.q_strides.head +
          row % p.q_length * p.q_strides.row + column);
    }
    unsigned* to = q_words + ((row / kTileRows * kSteps + column / 32 * 2) * 32 + row % 8 * 4 + column / 8 % 4) * 4 + row / 8 % 2;
    to[0] = value.x;
    to[2] = value.y;
    to[32 * 4] = value.z;
    to[32 * 4 + 2] = value.w;
  }

  float acc[RowTiles][kBlocks][8][4];
  float peak[RowTiles][2];  // of rows g and g + 8, the same in all lanes of a quad
  float sum[RowTiles][2];   // of this lane's keys
#pragma unroll
  for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc[t][b][j][0] = acc[t][b][j][1] = acc[t][b][j][2] = acc[t][b][j][3] = 0;
      }
    }
    peak[t][0] = peak[t][1] = -kInfinity;
    sum[t][0] = sum[t][1] = 0;
  }

  const T* k_head = static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head;
  const T* v_head = static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head + part * kColumns;
  const uint4* my_q = shared + row_warp * RowTiles * kSteps * 32 + lane;

  uint4 keys[2][kLoads];
  auto load_keys = [&](int tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = tile + n * 8 + g;
      const bool there = key >= begin && key < last;
      const T* row = k_head + key * p.k_strides.row + c * 8;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        keys[n][i] = there && i * 32 + c * 8 < p.head_dim ? load16<Shared>(row + i * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };

  const int stride = slices * kTileKeys;
  auto seen_from = [&](int tile) {
    while (Masked && tile < last && tile_bits[(tile - first) / kTileKeys] == 0) {
      tile += stride;
    }
    return tile;
  };
  if constexpr (Masked) {
    __syncthreads();
  }
  int tile = idle ? last : seen_from(first + slice * kTileKeys);
  if (tile < last) {
    load_keys(tile);
  }
  __syncthreads();
  while (tile < last) {
    const int next = seen_from(tile + stride);
    float scores[RowTiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int t = 0; t < RowTiles; ++t) {
        const uint4 q0 = my_q[(t * kSteps + 2 * i) * 32];
        const uint4 q1 = my_q[(t * kSteps + 2 * i + 1) * 32];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma(scores[t][n], q0, keys[n][i].x, keys[n][i].y, T{});
          mma(scores[t][n], q1, keys[n][i].z, keys[n][i].w, T{});
        }
      }
    }
    uint4 values[kBlocks][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int key = tile + 2 * c + (r & 1) + (r >> 1) * 8;
      const bool there = key >= begin && key < last;
      const T* row = v_head + key * p.v_strides.row + g * 8;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        values[b][r] =
            there && part * kColumns + b * 64 + g * 8 < p.head_dim ? load16<Shared>(row + b * 64) : make_uint4(0, 0, 0, 0);
      }
    }
    if (next < last) {
      load_keys(next);
    }

    // Whether every row sees every key of this tile, as in nearly all of them.
    const unsigned bits = Masked ? tile_bits[(tile - first) / kTileKeys] : 0;
    const bool whole = Masked ? bits == 0xffff
                              : p.plain && tile >= begin && tile + kTileKeys <= last &&
                                    (p.window_left < 0 || tile >= end_all - 1 - p.window_left) &&
                                    (p.window_right < 0 || tile + kTileKeys - 1 <= end_all - p.q_length + p.window_right);
    // What this lane has: rows g (index 0, 1) and g + 8 (2, 3), keys 2c, 2c + 1 of each half tile.
    uint4 weights[RowTiles];
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
      if (Masked && !whole) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& score = scores[t][i / 4][i % 4];
          score = bits >> (i / 4 * 8 + 2 * c + i % 2) & 1 ? score * p.scale : -kInfinity;
        }
      } else if (!whole) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (row_warp * RowTiles + t) * kTileRows + g + half * 8;
          restrict_scores_of<T>(p, scores[t], half, row, rows, batch, kv_head, tile + 2 * c, begin, last, end_all);
        }
      }
      // From here on in units of log2(e).
      const float unit = whole ? p.scale : 1.0f;
      float base[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(
            fmaxf(scores[t][0][half * 2], scores[t][0][half * 2 + 1]), fmaxf(scores[t][1][half * 2], scores[t][1][half * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        base[half] = fmaxf(top * unit, peak[t][half]);
      }
      if (__any_sync(~0u, base[0] > peak[t][0] || base[1] > peak[t][1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float shrink = peak[t][half] == -kInfinity ? 0.0f : exp2f(peak[t][half] - base[half]);
          peak[t][half] = base[half];
          sum[t][half] *= shrink;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              acc[t][b][j][half * 2] *= shrink;
              acc[t][b][j][half * 2 + 1] *= shrink;
            }
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float zero = base[half] == -kInfinity ? 0.0f : base[half];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[t][n][half * 2 + e];
            score = exp2_approx(fmaf(score, unit, -zero));
            sum[t][half] += score;
          }
        }
      }
      weights[t] = make_uint4(
          pack(scores[t][0][0], scores[t][0][1], T{}), pack(scores[t][0][2], scores[t][0][3], T{}),
          pack(scores[t][1][0], scores[t][1][1], T{}), pack(scores[t][1][2], scores[t][1][3], T{}));
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned selector = j & 1 ? 0x7632 : 0x5410;
        const unsigned b0 = __byte_perm(word(values[b][0], j / 2), word(values[b][1], j / 2), selector);
        const unsigned b1 = __byte_perm(word(values[b][2], j / 2), word(values[b][3], j / 2), selector);
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
          mma(acc[t][b][j], weights[t], b0, b1, T{});
        }
      }
    }
    tile = next;
  }

  // Merge the slices, in their order: all write, then all read.
  __syncthreads();
  const int held = min(row_warps * RowTiles * kTileRows, (rows + 7) / 8 * 8);  // rows that anybody holds
  float* results = reinterpret_cast<float*>(shared);                           // [slice][part][row][pitch]
  float* scales = results + slices * Parts * held * kPitch;                    // [slice][row][2]
  if (!idle) {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (row_warp * RowTiles + t) * kTileRows + g + half * 8;
        sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 1);
        sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 2);
        if (row < held) {
          if (c == 0 && part == 0) {
            scales[(slice * held + row) * 2] = peak[t][half];
            scales[(slice * held + row) * 2 + 1] = sum[t][half];
          }
          float* to = results + ((slice * Parts + part) * held + row) * kPitch + c * 16;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
              for (int j = 0; j < 8; j += 4) {
                const int i = half * 2 + e;
                *reinterpret_cast<float4*>(to + b * 64 + e * 8 + j) =
                    make_float4(acc[t][b][j][i], acc[t][b][j + 1][i], acc[t][b][j + 2][i], acc[t][b][j + 3][i]);
              }
            }
          }
        }
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < rows * (D / 4); index += threads) {
    const int row = index / (D / 4);
    const int column = index % (D / 4) * 4;
    if (column >= p.head_dim) {
      continue;
    }
    float top = -kInfinity;
    for (int s = 0; s < slices; ++s) {
      top = fmaxf(top, scales[(s * held + row) * 2]);
    }
    float total = 0;
    float4 value = make_float4(0, 0, 0, 0);
    for (int s = 0; s < slices; ++s) {
      const float mine = scales[(s * held + row) * 2];
      const float weight = mine == -kInfinity ? 0.0f : exp2f(mine - top);
      total += weight * scales[(s * held + row) * 2 + 1];
      const float4 from =
          *reinterpret_cast<const float4*>(results + ((s * Parts + column / kColumns) * held + row) * kPitch + column % kColumns);
      value.x += weight * from.x;
      value.y += weight * from.y;
      value.z += weight * from.z;
      value.w += weight * from.w;
    }
    const int head = kv_head * p.group + row / p.q_length;
    const int query = row % p.q_length;
    if (p.splits > 1) {
      const long long at = ((static_cast<long long>(split) * p.batch + batch) * (p.kv_heads * p.group) + head) * p.q_length + query;
      *reinterpret_cast<float4*>(p.partial + at * p.head_dim + column) = value;
      if (column == 0) {
        p.partial_scale[at * 2] = top;
        p.partial_scale[at * 2 + 1] = total;
      }
      continue;
    }
    if (p.sinks) {
      const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[head]);
      const float higher = fmaxf(top, sink);
      const float weight = top == -kInfinity ? 0.0f : exp2f(top - higher);
      total = total * weight + exp2f(sink - higher);
      value = make_float4(value.x * weight, value.y * weight, value.z * weight, value.w * weight);
    }
    const float factor = total > 0 ? 1.0f / total : 0.0f;
    T* to = static_cast<T*>(p.out) + batch * p.out_strides.batch + head * p.out_strides.head + query * p.out_strides.row + column;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack(value.x * factor, value.y * factor, T{}), pack(value.z * factor, value.w * factor, T{}));
  }
}

// One block for each query of each head: the splits' results, in their order.
template <typename T>
__device__ inline void merge(const DecodeParams& p) {
  const int heads = p.kv_heads * p.group;
  const int row = blockIdx.x;  // [B, H, Tq]
  const int query = row % p.q_length;
  const int head = row / p.q_length % heads;
  const int batch = row / p.q_length / heads;
  const long long rows = static_cast<long long>(p.batch) * heads * p.q_length;
  float top = -kInfinity;
  for (int s = 0; s < p.splits; ++s) {
    top = fmaxf(top, p.partial_scale[(s * rows + row) * 2]);
  }
  float sink = -kInfinity;
  if (p.sinks) {
    sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[head]);
  }
  const float base = fmaxf(top, sink);
  const int column = threadIdx.x * 2;
  float total = p.sinks ? exp2f(sink - base) : 0.0f;
  float2 value = make_float2(0, 0);
  for (int s = 0; s < p.splits; ++s) {
    const long long at = s * rows + row;
    const float peak = p.partial_scale[at * 2];
    if (peak == -kInfinity) {
      continue;  // nothing was seen there, and nothing may have been written
    }
    const float weight = exp2f(peak - base);
    total += weight * p.partial_scale[at * 2 + 1];
    if (column < p.head_dim) {
      const float2 part = *reinterpret_cast<const float2*>(p.partial + at * p.head_dim + column);
      value.x += weight * part.x;
      value.y += weight * part.y;
    }
  }
  if (column < p.head_dim) {
    const float factor = total > 0 ? 1.0f / total : 0.0f;
    T* to = static_cast<T*>(p.out) + batch * p.out_strides.batch + head * p.out_strides.head + query * p.out_strides.row + column;
    *reinterpret_cast<unsigned*>(to) = pack(value.x * factor, value.y * factor, T{});
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_DECODE_BODY(...) mlx_cuda::decode<__VA_ARGS__>(params);
#else
#define MLX_CUDA_DECODE_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_DECODE_KERNEL(name, BLOCKS, ...)                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) name(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    MLX_CUDA_DECODE_BODY(__VA_ARGS__)                                                                                     \
  }

// `BLOCKS` blocks of 8 warps with one row tile each fit on a multiprocessor; for more rows a warp takes two row tiles.
#define MLX_CUDA_DECODE(dtype, T, D, BLOCKS, PARTS, ROWS_PARTS)                                    \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D, BLOCKS, T, D, 1, PARTS, (PARTS > 1), false)         \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_masked, BLOCKS, T, D, 1, PARTS, (PARTS > 1), true) \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_##D##_rows, 1, T, D, 2, ROWS_PARTS, true, false)

#define MLX_CUDA_DECODE_ALL(dtype, T)                                                 \
  MLX_CUDA_DECODE(dtype, T, 64, 2, 1, 1)                                              \
  MLX_CUDA_DECODE(dtype, T, 128, 1, 1, 1)                                             \
  MLX_CUDA_DECODE(dtype, T, 256, 1, 2, 4)                                             \
  extern "C" __global__ void __launch_bounds__(128)                                   \
      decode_##dtype##_merge(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    mlx_cuda::merge<T>(params);                                                       \
  }

MLX_CUDA_DECODE_ALL(float16, __half)
MLX_CUDA_DECODE_ALL(bfloat16, __nv_bfloat16)
