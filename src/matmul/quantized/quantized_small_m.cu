// out = x @ w^T of few rows of x and quantized w (small-M GEMM) in the tiles of small_m_tile.cuh.
//
// A block keeps its part of x and processes tile after tile. Its warps work on `row_warps` tiles at once; the `inner_warps` of a
// tile take turns at its slices and add their sums at the end (split K).
#include "device/kernel.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "matmul/quantized/batch.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/small_m_tile.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileRows = SmallMTile::kRows;
[[maybe_unused]] constexpr int kSlice = SmallMTile::kSlice;

template <typename Format, typename T, int RowTiles>
struct SmallMTraits : SmallMSteps<Format, T> {
  static constexpr int kRowTiles = RowTiles;             // of 8 rows of x, of a block
  static constexpr int kUnit = Format::kBiased ? 2 : 1;  // bytes of a scale
  // Whether a step's registers are copied, so that they can be loaded again before the step is computed.
  static constexpr bool kCopiesSteps = RowTiles == 1 && Format::kBits != 5 && Format::kBits != 6;
  // Whether a thread's values of the two steps of a slice are adjacent, so that fewer, longer loads fetch them.
  static constexpr bool kAdjacentSteps = kWindows<Format>;
  static constexpr int kVector = Format::kBits % 2 == 0 ? 4 : 2;  // words of these loads
};

// The part of the GEMM that a block computes: some rows of x, a range of inner, and every `stride`-th tile.
template <typename Traits>
struct SmallMBlock {
  int split;
  int batch;
  int first_row;
  int rows;
  int row_tiles;
  int x_rows;  // in shared memory
  int inner;
  int slices;
  int tiles;
  int stride;
  bool vectors;  // whether rows of w are aligned to Traits::kVector words
  const typename Traits::T* x;
  const char* w;
  long long scales;  // where its scales begin, and its biases, in bytes

  __device__ explicit SmallMBlock(const SmallMParams& p)
      : split(blockIdx.y % p.splits),
        batch(blockIdx.z),
        first_row(blockIdx.y / p.splits * (Traits::kRowTiles * 8)),
        rows(min(p.rows - first_row, Traits::kRowTiles * 8)),
        row_tiles((rows + 7) / 8),
        x_rows(Traits::kRowTiles == 1 ? rows : row_tiles * 8),
        tiles((p.columns + kTileRows - 1) / kTileRows),
        stride(gridDim.x * p.row_warps) {
    const long long expert = w_expert(p, batch);
    const int begin = split * p.range;
    inner = min(p.inner - begin, p.range);
    slices = (inner + kSlice - 1) / kSlice;
    x = static_cast<const typename Traits::T*>(p.x) + x_matrix(p, batch) * p.x_distance + first_row * p.x_row + begin;
    w = static_cast<const char*>(p.w) + expert * p.w_distance + begin / 8 * Traits::kBits;
    vectors = (reinterpret_cast<unsigned long long>(w) | p.row_bytes | inner / 8 * Traits::kBits) % (Traits::kVector * 4) == 0;
    scales = expert * p.scale_distance + (begin >> p.group_shift) * Traits::kUnit;
  }
};

// x [rows, range] to shared memory as SmallMRow reads it. Zeros after the last row.
template <typename Traits>
__device__ inline void stage_x(unsigned char* to, const SmallMParams& p, const SmallMBlock<Traits>& block) {
  for (int row = 0; row < block.x_rows; row += 4) {
    for (int piece = threadIdx.x; piece < p.range / 8; piece += blockDim.x) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (row + i < block.rows && piece * 8 < block.inner) {
          v[i] = __ldg(reinterpret_cast<const uint4*>(block.x + (row + i) * p.x_row) + piece);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + i < block.x_rows) {
          // Steps of both halves of a thread's values, or one after the other.
          const int place = Traits::kAdjacentSteps ? piece / 32 * 32 + piece / 4 % 2 * 16 + piece / 8 % 4 * 4 + piece % 4 : piece;
          store_x<typename Traits::Format>(to, block.x_rows, row + i, place, v[i]);
        }
      }
    }
  }
}

// A warp at its slices of its tiles: current operands and prefetched ones.
template <typename Traits>
class SmallMWarp {
  using Format = typename Traits::Format;
  using T = typename Traits::T;
  using Chunks = typename Traits::Chunks;
  static constexpr int kUnit = Traits::kUnit;
  static constexpr int kWords = Traits::kWords;

 public:
  // Shared memory: x, the scales of each warp's slice, the sums of each warp.
  __device__ SmallMWarp(const SmallMParams& p, const SmallMBlock<Traits>& block, unsigned char* shared)
      : p_(p),
        block_(block),
        lane_(threadIdx.x % 32),
        inner_warp_(threadIdx.x / 32 % p.inner_warps),
        row_warp_(threadIdx.x / 32 / p.inner_warps),
        x_(shared, block.x_rows, lane_),
        tile_(blockIdx.x * p.row_warps + row_warp_),
        slice_(inner_warp_),
        next_tile_(tile_),
        next_slice_(slice_) {
    auto* after_x = reinterpret_cast<unsigned*>(shared + p.range * 2 * block.x_rows);
    scales_ = after_x + threadIdx.x / 32 * (SmallMTile::kScaleBytes / 4);
    results_ = reinterpret_cast<float*>(after_x + p.row_warps * p.inner_warps * (SmallMTile::kScaleBytes / 4)) +
               row_warp_ * p.inner_warps * block.rows * SmallMTile::kResultStride;
  }

  __device__ bool has_tile() const {
    return tile_ < block_.tiles;
  }
  __device__ bool ends_tile() const {
    return next_slice_ <= slice_;
  }
  __device__ void advance() {
    tile_ = next_tile_;
    slice_ = next_slice_;
    next_slice_ = slice_ + p_.inner_warps;
    if (next_slice_ >= block_.slices) {
      next_slice_ = inner_warp_;
      next_tile_ += block_.stride;
    }
  }

  // The scales that have been loaded become those of the slice.
  __device__ void store_loaded_scales() {
    __syncwarp();
    store_scales<Format, T>(scales_ + lane_ * SmallMTile::kScaleStride, loaded_scales_);
    __syncwarp();
  }

  // Those of the next slice, a lane a row.
  __device__ void load_next_scales() {
    const int bytes = (kSlice * kUnit) >> p_.group_shift;
    const int all = (block_.inner >> p_.group_shift) * kUnit;
    const long long row = min(next_tile_ * kTileRows + lane_, p_.columns - 1);
    const long long at = block_.scales + row * p_.groups * kUnit + next_slice_ * bytes;
    const int left = next_tile_ < block_.tiles ? min(all - next_slice_ * bytes, bytes) : 0;
    load_scales<kUnit>(loaded_scales_.scale, static_cast<const char*>(p_.scales) + at, bytes, left, p_.wide);
    if constexpr (Format::kBiased) {
      load_scales<kUnit>(loaded_scales_.bias, static_cast<const char*>(p_.biases) + at, bytes, left, p_.wide);
    }
  }

  // Computes the slice, if it is `loaded`, and loads what comes two steps after each of its steps.
  __device__ void run_slice(bool loaded) {
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      if constexpr (Traits::kCopiesSteps) {
        Chunks chunks;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            chunks[r][i] = chunks_[step % 2][r][i];
          }
        }
        load_ahead(step, loaded);
        if (loaded) {
          multiply(chunks, step);
        }
      } else {
        if (loaded) {
          multiply(chunks_[step % 2], step);
        }
        load_ahead(step, loaded);
      }
    }
  }

  // The sums of the warps of a tile, through shared memory, to the result.
  __device__ void write_tile() {
    share_nans<Format>(nans_);
    write_sums();
    sync_tile();
    add_sums();
    sync_tile();
  }

 private:
  // Waits for the warps of the tile.
  __device__ void sync_tile() const {
    sync_some(row_warp_ + 1, p_.inner_warps * 32);
  }

  // The step after the next; for the last steps of a slice, one of the next slice.
  __device__ void load_ahead(int step, bool loaded) {
    const bool same = step + 2 < Traits::kSteps;
    const int ahead = same ? step + 2 : step + 2 - Traits::kSteps;
    const int tile = same ? tile_ : next_tile_;
    if constexpr (Traits::kAdjacentSteps) {
      if (next_tile_ < block_.tiles) {
        const char* from = block_.w + next_tile_ * kTileRows * p_.row_bytes;
        const int at = (next_slice_ * kSlice + lane_ % 4 * (2 * Traits::kValues)) / 8 * Traits::kBits;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          load_adjacent_steps(r, step, from + row_of(next_tile_, r) * static_cast<int>(p_.row_bytes), at);
        }
      }
    } else if ((loaded || !same) && tile < block_.tiles) {
      // Out of bounds, the scales or x are zero.
      const int value =
          min((same ? slice_ : next_slice_) * kSlice + ahead * Traits::kStep + lane_ % 4 * Traits::kValues,
              block_.inner - Traits::kValues);
      const char* from = block_.w + tile * kTileRows * p_.row_bytes + value / 8 * Traits::kBits;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        load_chunk<false>(chunks_[ahead % 2][r], from + row_of(tile, r) * static_cast<int>(p_.row_bytes));
      }
    }
  }

  // Of the tile. Rows after the last are the last again: what comes of them is not written.
  __device__ int row_of(int tile, int r) const {
    return min(lane_ / 4 + 8 * r, p_.columns - 1 - tile * kTileRows);
  }

  // A row's data of both steps from byte `at` on, as vectors if aligned: only that of the first step, or the rest.
  __device__ void load_adjacent_steps(int r, int step, const char* row, int at) {
    constexpr int vector = Traits::kVector;
    const int all = block_.inner / 8 * Traits::kBits;
#pragma unroll
    for (int i = 0; i < 2 * kWords; i += vector) {
      if ((i + vector <= kWords) == (step == 0)) {
        unsigned some[vector];
        if (block_.vectors) {
          load_chunk<true>(some, row + min(at + i * 4, all - vector * 4));
        } else {
#pragma unroll
          for (int j = 0; j < vector; ++j) {
            stream<true, 1>(some + j, row + min(at + (i + j) * 4, all - 4));
          }
        }
#pragma unroll
        for (int j = 0; j < vector; ++j) {
          chunks_[(i + j) / kWords][r][(i + j) % kWords] = some[j];
        }
      }
    }
  }

  __device__ void multiply(const Chunks& chunks, int step) {
    const int t = lane_ % 4;
    const int value = Traits::kAdjacentSteps ? (t * 2 + step) * Traits::kValues : step * Traits::kStep + t * Traits::kValues;
    const int word = Format::kBiased ? value >> p_.group_shift : value / 32;
    Factors<Format, T> factors[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      factors[r] = Factors<Format, T>(scales_[(lane_ / 4 + 8 * r) * SmallMTile::kScaleStride + word]);
      note_nans<Format>(nans_[r], chunks[r]);
    }
    const int line = x_.line(block_.x_rows, slice_, step);
#pragma unroll
    for (int j = 0; j < Traits::kValues / 8; ++j) {
      unsigned weights[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        factors[r].weights(chunks[r], j, weights[r]);
      }
#pragma unroll
      for (int i = 0; i < Traits::kRowTiles; ++i) {
        if (Traits::kRowTiles == 1 || i < block_.row_tiles) {
          const uint4 b = x_.load(line, step, j, i);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const unsigned (&u)[4] = weights[2 * m];
            const unsigned (&v)[4] = weights[2 * m + 1];
            mma(sums_[m][i], make_uint4(u[0], v[0], u[1], v[1]), b.x, b.y, T{});
            mma(sums_[m][i], make_uint4(u[2], v[2], u[3], v[3]), b.z, b.w, T{});
          }
        }
      }
    }
  }

  // To shared memory [inner_warps][row of x][row of w], and begins new ones.
  __device__ void write_sums() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < Traits::kRowTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = i * 8 + 2 * (lane_ % 4) + c % 2;
          if (row < block_.rows) {
            results_[(inner_warp_ * block_.rows + row) * SmallMTile::kResultStride + m * 16 + lane_ / 4 + c / 2 * 8] =
                result_or_nan<Format>(sums_[m][i][c], nans_[2 * m + c / 2]);
          }
          sums_[m][i][c] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      nans_[r] = 0;
    }
  }

  __device__ void add_sums() const {
    const int column = tile_ * kTileRows + lane_;
    if (column >= p_.columns) {
      return;
    }
#pragma unroll 1
    for (int row = inner_warp_; row < block_.rows; row += p_.inner_warps) {
      float sum = 0.0f;
#pragma unroll 1
      for (int part = 0; part < p_.inner_warps; ++part) {
        sum += results_[(part * block_.rows + row) * SmallMTile::kResultStride + lane_];
      }
      sum *= kResultFactor<Format, T>;
      const long long place = (block_.batch * static_cast<long long>(p_.rows) + block_.first_row + row) * p_.columns + column;
      if (p_.partial) {
        p_.partial[static_cast<long long>(block_.split) * gridDim.z * p_.rows * p_.columns + place] = sum;
      } else {
        static_cast<T*>(p_.out)[place] = from_float<T>(sum);
      }
    }
  }

  const SmallMParams& p_;
  const SmallMBlock<Traits>& block_;
  int lane_;
  int inner_warp_;
  int row_warp_;
  SmallMRow<Traits> x_;
  unsigned* scales_;  // in shared memory, of the slice
  float* results_;    // of the warps of the tile
  int tile_;          // being computed
  int slice_;
  int next_tile_;  // being loaded
  int next_slice_;
  Chunks chunks_[2];  // of two steps
  RowScales loaded_scales_;
  float sums_[2][Traits::kRowTiles][4] = {};  // of 16 rows of w and 8 of x
  unsigned nans_[4] = {};
};

template <typename Traits>
__device__ inline void small_m(const SmallMParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const SmallMBlock<Traits> block(p);
  SmallMWarp<Traits> warp(p, block, shared);
  // The first iteration only loads: each computes with the operands that the one before has loaded.
  for (bool loaded = false; warp.has_tile() || !loaded; loaded = true) {
    if (loaded) {
      warp.store_loaded_scales();
    }
    warp.load_next_scales();
    warp.run_slice(loaded);
    if (!loaded) {
      stage_x<Traits>(shared, p, block);
      __syncthreads();
    } else if (warp.ends_tile()) {
      warp.write_tile();
    }
    warp.advance();
  }
}

#define MLX_CUDA_SMALL_M(name, dtype, format, row_tiles) \
  MLX_CUDA_KERNEL(                                       \
      name, (SmallMParams::kMostThreads, 1), SmallMParams, small_m<SmallMTraits<formats::format, types::dtype, row_tiles>>)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MLX_CUDA_SMALL_M_NONE(...)
MLX_CUDA_SMALL_M_KERNELS(MLX_CUDA_SMALL_M, MLX_CUDA_SMALL_M_NONE)
#else
MLX_CUDA_SMALL_M_KERNELS(MLX_CUDA_SMALL_M, MLX_CUDA_SMALL_M)
#endif

}  // namespace mlx_cuda
