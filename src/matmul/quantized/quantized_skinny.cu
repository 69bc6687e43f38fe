// out = x @ w^T of few rows of x and quantised w, in tensor core products whose left operand is w.
//
// A tile is 32 rows of w (columns of the result), a slice 256 values of each, in two steps. In a step each thread of a warp has 32
// adjacent values (a chunk) of four rows, straight from global memory. Which value of inner an element of a product stands for does
// not matter as long as both operands agree: what a thread unpacks is its own part of the left operand, and x lies in shared memory
// in the order that matches.
//
// A block keeps its part of x and takes tile after tile. Its warps work on `row_warps` tiles at once; the `inner_warps` of a tile
// take turns at its slices and add their sums at the end.
#include "matmul/quantized/params.h"
#include "matmul/quantized/scales.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileRows = 32;
[[maybe_unused]] constexpr int kSlice = 256;
[[maybe_unused]] constexpr int kScaleStride =
    12;  // words of a row's scales of a slice (8 at most), so that 8 rows lie in different banks
[[maybe_unused]] constexpr int kResultStride = kTileRows + 4;

// Whether a step's registers are copied, so that they can be loaded again before the step is computed.
template <typename Format, int Tiles>
constexpr bool kEarly = Tiles == 1 && Format::kBits != 5 && Format::kBits != 6;

// Whether a thread's values of the two steps of a slice are adjacent, so that fewer, longer loads fetch them.
template <typename Format>
constexpr bool kTwoSteps = kWindows<Format>;

// x [rows, range] to shared memory, [range / 128][padded][128], in the order in which w is unpacked. Zeros after the last row.
template <typename Format, typename T>
__device__ inline void stage_x(unsigned char* to, const T* x, long long distance, int rows, int padded, int range, int there) {
  for (int row = 0; row < padded; row += 4) {
    for (int piece = threadIdx.x; piece < range / 8; piece += blockDim.x) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (row + i < rows && piece * 8 < there) {
          v[i] = __ldg(reinterpret_cast<const uint4*>(x + (row + i) * distance) + piece);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + i < padded) {
          // Steps of both halves of a thread's values, or one after the other.
          const int place = kTwoSteps<Format> ? piece / 32 * 32 + piece / 4 % 2 * 16 + piece / 8 % 4 * 4 + piece % 4 : piece;
          *reinterpret_cast<uint4*>(to + place / 16 * padded * 256 + x_place<Format>(row + i, place % 16)) =
              order_pairs<Format>(v[i]);
        }
      }
    }
  }
}

// Waits for the warps of a tile.
__device__ inline void sync_tile(int row_warp, int inner_warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(row_warp + 1), "r"(inner_warps * 32) : "memory");
}

template <typename Format, typename T, int Tiles>
__device__ inline void few(const FewParams& p) {
  constexpr int bits = Format::kBits;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int inner_warp = warp % p.inner_warps;
  const int row_warp = warp / p.inner_warps;
  const int g = lane / 4;
  const int t = lane % 4;

  const int split = blockIdx.y % p.splits;
  const int first_row = blockIdx.y / p.splits * (Tiles * 8);
  const int rows = min(p.rows - first_row, Tiles * 8);
  const int tiles = (rows + 7) / 8;
  const int padded = Tiles == 1 ? rows : tiles * 8;  // rows of x in shared memory
  const int product = blockIdx.z;
  const long long batch = p.x_index ? min(p.x_index[product], static_cast<unsigned>(p.matrices - 1)) : product;
  const long long expert = p.w_index ? min(p.w_index[product], static_cast<unsigned>(p.experts - 1)) : product;
  const int begin = split * p.range;
  const int there = min(p.inner - begin, p.range);  // of inner, for this block
  const int slices = (there + kSlice - 1) / kSlice;

  const char* w = static_cast<const char*>(p.w) + expert * p.w_distance + begin / 8 * bits;
  constexpr int unit = Format::kBiased ? 2 : 1;
  const int first_group = begin >> p.group_shift;
  const char* scales = static_cast<const char*>(p.scales) + expert * p.scale_distance + first_group * unit;
  const char* biases = static_cast<const char*>(p.biases) + expert * p.scale_distance + first_group * unit;
  const int scale_bytes = (kSlice * unit) >> p.group_shift;
  const int scales_there = (there >> p.group_shift) * unit;

  // Shared memory: x, the scales of each warp's slice, the sums of each warp.
  unsigned* after_x = reinterpret_cast<unsigned*>(shared + p.range * 2 * padded);
  unsigned* scale_words = after_x + warp * (kTileRows * kScaleStride);
  float* results = reinterpret_cast<float*>(after_x + p.row_warps * p.inner_warps * (kTileRows * kScaleStride)) +
                   row_warp * p.inner_warps * rows * kResultStride;
  // This thread's row of x in each 8; a product has its own column for each, so that it does not matter what the missing ones are.
  const unsigned char* x_row[2] = {
      shared + x_place<Format>(min(g, padded - 1), t * (kChunk<Format> / 8)),
      shared + x_place<Format>(min(g, padded - 1), t * (kChunk<Format> / 8) + 1)};

  int tile = blockIdx.x * p.row_warps + row_warp;
  int slice = inner_warp;
  const int all_tiles = (p.columns + kTileRows - 1) / kTileRows;
  const int stride = gridDim.x * p.row_warps;

  constexpr int chunk_values = kChunk<Format>;
  constexpr int step_values = 4 * chunk_values;
  constexpr int words = chunk_values * bits / 32;
  constexpr int steps = kSlice / step_values;
  unsigned chunks[2][4][words];  // of rows g, g + 8, g + 16, g + 24, of two steps
  RowScales row_scales;
  float sums[2][Tiles][4] = {};
  unsigned nans[4] = {};

  int next_tile = tile;
  int next_slice = slice;

  auto load_scales_ahead = [&] {
    const long long row = min(next_tile * kTileRows + lane, p.columns - 1);
    const long long at = row * p.groups * unit + next_slice * scale_bytes;
    const int left = next_tile < all_tiles ? min(scales_there - next_slice * scale_bytes, scale_bytes) : 0;
    load_scales<unit>(row_scales.scale, scales + at, scale_bytes, left, p.wide);
    if constexpr (Format::kBiased) {
      load_scales<unit>(row_scales.bias, biases + at, scale_bytes, left, p.wide);
    }
  };

  // What a row has of both steps from `before` on, as vectors where it lies on them: those of the first step only, or the others.
  constexpr int vector = bits % 2 == 0 ? 4 : 2;  // words
  const int there_bytes = there / 8 * bits;
  const bool vectors = (reinterpret_cast<unsigned long long>(w) | p.row_bytes | there_bytes) % (vector * 4) == 0;
  auto load_two_steps = [&](int r, int step, const char* row, int before) {
#pragma unroll
    for (int i = 0; i < 2 * words; i += vector) {
      if ((i + vector <= words) == (step == 0)) {
        unsigned some[vector];
        if (vectors) {
          load_chunk<true>(some, row + min(before + i * 4, there_bytes - vector * 4));
        } else {
#pragma unroll
          for (int j = 0; j < vector; ++j) {
            some[j] = stream4<true>(row + min(before + (i + j) * 4, there_bytes - 4));
          }
        }
#pragma unroll
        for (int j = 0; j < vector; ++j) {
          chunks[(i + j) / words][r][(i + j) % words] = some[j];
        }
      }
    }
  };

  // The step after the next: of the next slice, but for the first ones of four.
  auto load_ahead = [&](int step, bool loaded) {
    const bool same = step + 2 < steps;
    const int ahead = same ? step + 2 : step + 2 - steps;
    const int of_tile = same ? tile : next_tile;
    if constexpr (kTwoSteps<Format>) {
      if (next_tile < all_tiles) {
        const char* from = w + next_tile * kTileRows * p.row_bytes;
        const int before = (next_slice * kSlice + t * (2 * chunk_values)) / 8 * bits;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = min(g + 8 * r, p.columns - 1 - next_tile * kTileRows);
          load_two_steps(r, step, from + row * static_cast<int>(p.row_bytes), before);
        }
      }
    } else if ((loaded || !same) && of_tile < all_tiles) {
      // What is not there has scales of zero, or its x is.
      const int value = min((same ? slice : next_slice) * kSlice + ahead * step_values + t * chunk_values, there - chunk_values);
      const char* from = w + of_tile * kTileRows * p.row_bytes + value / 8 * bits;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        // Rows after the last are the last again: what comes of them is not written.
        const int row = min(g + 8 * r, p.columns - 1 - of_tile * kTileRows);
        load_chunk<false>(chunks[ahead % 2][r], from + row * static_cast<int>(p.row_bytes));
      }
    }
  };

  auto multiply = [&](const unsigned (&chunk)[4][words], int step) {
    const int value = kTwoSteps<Format> ? (t * 2 + step) * chunk_values : step * step_values + t * chunk_values;
    const int word = Format::kBiased ? value >> p.group_shift : value / 32;
    Factors<Format, T> factors[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      factors[r] = Factors<Format, T>(scale_words[(g + 8 * r) * kScaleStride + word]);
      if constexpr (kFp8<Format>) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
          nans[r] |= fp8_nans(chunk[r][i]);
        }
      }
    }
    const int x_step = (slice * 2 + step * step_values / 128) * padded * 256;
#pragma unroll
    for (int j = 0; j < chunk_values / 8; ++j) {
      unsigned weights[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        factors[r].weights(chunk[r], j, weights[r]);
      }
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        if (Tiles == 1 || i < tiles) {
          const int turn = step * step_values % 128 / 32 + j / 2 * 2;  // see x_place
          const uint4 b = *reinterpret_cast<const uint4*>(x_row[j % 2] + x_step + i * 2048 + turn * 64);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const unsigned (&u)[4] = weights[2 * m];
            const unsigned (&v)[4] = weights[2 * m + 1];
            mma(sums[m][i], make_uint4(u[0], v[0], u[1], v[1]), b.x, b.y, T{});
            mma(sums[m][i], make_uint4(u[2], v[2], u[3], v[3]), b.z, b.w, T{});
          }
        }
      }
    }
  };

  // The first turn only loads: what a turn computes with has been loaded in the one before.
  for (bool loaded = false; tile < all_tiles || !loaded; loaded = true) {
    if (loaded) {
      __syncwarp();
      store_scales<Format, T>(scale_words + lane * kScaleStride, row_scales);
      __syncwarp();
    }
    load_scales_ahead();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if constexpr (kEarly<Format, Tiles>) {
        unsigned chunk[4][words];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int i = 0; i < words; ++i) {
            chunk[r][i] = chunks[step % 2][r][i];
          }
        }
        load_ahead(step, loaded);
        if (loaded) {
          multiply(chunk, step);
        }
      } else {
        if (loaded) {
          multiply(chunks[step % 2], step);
        }
        load_ahead(step, loaded);
      }
    }
    if (!loaded) {
      const T* from = static_cast<const T*>(p.x) + batch * p.x_distance + first_row * p.x_row + begin;
      stage_x<Format>(shared, from, p.x_row, rows, padded, p.range, there);
      __syncthreads();
    }
    const bool last = loaded && next_slice <= slice;

    if (last) {
      if constexpr (kFp8<Format>) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          nans[r] |= __shfl_xor_sync(~0u, nans[r], 1);
          nans[r] |= __shfl_xor_sync(~0u, nans[r], 2);
        }
      }
      // The sums of the warps of a tile, through shared memory: [inner_warps][row of x][row of w].
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < Tiles; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int row = i * 8 + 2 * t + c % 2;
            if (row < rows) {
              const bool nan = kFp8<Format> && nans[2 * m + c / 2];
              results[(inner_warp * rows + row) * kResultStride + m * 16 + g + c / 2 * 8] =
                  nan ? __uint_as_float(0x7fc00000u) : sums[m][i][c];
            }
            sums[m][i][c] = 0.0f;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        nans[r] = 0;
      }
      sync_tile(row_warp, p.inner_warps);
      const int column = tile * kTileRows + lane;
      if (column < p.columns) {
#pragma unroll 1
        for (int row = inner_warp; row < rows; row += p.inner_warps) {
          float sum = 0.0f;
#pragma unroll 1
          for (int part = 0; part < p.inner_warps; ++part) {
            sum += results[(part * rows + row) * kResultStride + lane];
          }
          const long long place = (product * static_cast<long long>(p.rows) + first_row + row) * p.columns + column;
          if (p.partial) {
            p.partial[static_cast<long long>(split) * gridDim.z * p.rows * p.columns + place] = sum * kResultFactor<Format, T>;
          } else {
            static_cast<T*>(p.out)[place] = from_float<T>(sum * kResultFactor<Format, T>);
          }
        }
      }
      sync_tile(row_warp, p.inner_warps);
    }
    tile = next_tile;
    slice = next_slice;
    next_slice = slice + p.inner_warps;
    if (next_slice >= slices) {
      next_slice = inner_warp;
      next_tile += stride;
    }
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_FEW_BODY(...) mlx_cuda::few<__VA_ARGS__>(params);
#else
#define MLX_CUDA_FEW_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_FEW(name, ...)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(512, 1) quantized_few_##name(const __grid_constant__ mlx_cuda::FewParams params) { \
    MLX_CUDA_FEW_BODY(__VA_ARGS__)                                                                                                \
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // has quantized_sm90.cu for more rows, and sooner for 2, 3, 5 and 6 bits
#define MLX_CUDA_FEW_MORE(...)
#else
#define MLX_CUDA_FEW_MORE(...) MLX_CUDA_FEW(__VA_ARGS__)
#endif

#define MLX_CUDA_FEW_TYPES(some, rows, name, ...) \
  some(name##_float16_##rows, __VA_ARGS__, __half, rows) some(name##_bfloat16_##rows, __VA_ARGS__, __nv_bfloat16, rows)

#define MLX_CUDA_FEW_FORMAT(sixteen, ...)          \
  MLX_CUDA_FEW_TYPES(MLX_CUDA_FEW, 1, __VA_ARGS__) \
  MLX_CUDA_FEW_TYPES(sixteen, 2, __VA_ARGS__)      \
  MLX_CUDA_FEW_TYPES(MLX_CUDA_FEW_MORE, 4, __VA_ARGS__)

MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW_MORE, affine2, mlx_cuda::Affine<2>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW_MORE, affine3, mlx_cuda::Affine<3>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW, affine4, mlx_cuda::Affine<4>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW_MORE, affine5, mlx_cuda::Affine<5>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW_MORE, affine6, mlx_cuda::Affine<6>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW, affine8, mlx_cuda::Affine<8>)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW, mxfp4, mlx_cuda::Mxfp4)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW, mxfp8, mlx_cuda::Mxfp8)
MLX_CUDA_FEW_FORMAT(MLX_CUDA_FEW, nvfp4, mlx_cuda::Nvfp4)
