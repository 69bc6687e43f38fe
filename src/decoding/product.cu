// Few rows of x times several matrices, x normalised on the way and the sums added, or gated, at the end: what a transformer's block
// does between its attentions. The time is that of reading w, so all that a warp needs of it is asked for before x is waited for.
//
// A block has tiles of 16 rows of w, whose warps have different parts of inner. They are the left operand of tensor core products;
// the rows of x are columns of the right one. Which value of inner an element stands for does not matter as long as both agree: a
// thread's values of a row of w are adjacent in memory.
#include "decoding/product_params.h"
#include "device/grid.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "matmul/quantized/unpack.cuh"

namespace mlx_cuda {

// w of 16-bit numbers.
struct Plain {
  static constexpr int kBits = 16;
};

template <typename T>
inline constexpr bool kShortRange = false;
template <>
inline constexpr bool kShortRange<__half> = true;

template <typename FormatOf, typename TypeOf, int TilesOf>
struct RowTraits {
  using Format = FormatOf;
  using T = TypeOf;
  static constexpr int kTiles = TilesOf;  // of a warp
  static constexpr int kBits = Format::kBits;
  static constexpr int kValues = RowProductParams::values(kBits);
  static constexpr int kStep = 4 * kValues;
  static constexpr int kAhead = RowProductParams::ahead(kBits, kTiles);
};

// 16 bytes of two rows of each tile, and their scales.
template <typename Traits>
struct RowChunk {
  uint4 packed[Traits::kTiles][2];
  unsigned scale[Traits::kTiles][2];  // and the bias above it
};

template <typename Traits>
class RowProduct {
  using T = typename Traits::T;
  using Format = typename Traits::Format;
  static constexpr int kTiles = Traits::kTiles;
  // float16 does not hold x times the norm's weights before it is divided by its size; elsewhere sums are, so that nobody waits.
  static constexpr bool kScalesFirst = kShortRange<T>;

 public:
  __device__ explicit RowProduct(const RowProductParams& p)
      : p_(p), warp_(threadIdx.x / 32), warps_(blockDim.x / 32), group_(threadIdx.x % 32 / 4), member_(threadIdx.x % 4) {
    const int steps = (p.inner + Traits::kStep - 1) / Traits::kStep;
    begin_ = steps * warp_ / warps_;
    end_ = steps * (warp_ + 1) / warps_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      find(tile);
    }
  }

  __device__ void run() {
    launch_dependents();
    RowChunk<Traits> chunks[Traits::kAhead];
#pragma unroll
    for (int i = 0; i < Traits::kAhead; ++i) {
      load(chunks[i], begin_ + i);
    }
    wait_for_grids();
    if (p_.norm) {
      sum_squares();
      if constexpr (kScalesFirst) {
        __syncthreads();
        factor_ = group_ < p_.rows ? factor_of(group_) : 0.0f;
      }
    }
#pragma unroll 1
    for (int step = begin_; step < end_; step += Traits::kAhead) {
#pragma unroll
      for (int i = 0; i < Traits::kAhead; ++i) {
        if (step + i < end_) {
          multiply(chunks[i], step + i);
          load(chunks[i], step + i + Traits::kAhead);
        }
      }
    }
    share();
    finish();
  }

 private:
  static constexpr int kTileRows = RowProductParams::kTileRows;
  static constexpr int kRows = RowProductParams::kMostRows;
  static constexpr int kMostWarps = RowProductParams::kMostWarps;
  struct Shared {
    float sums[kMostWarps][kTiles][kTileRows][kRows];
    float squares[kMostWarps][kRows];
  };
  static __device__ Shared& shared() {
    __shared__ Shared memory;
    return memory;
  }

  // Which part a tile is of, and its first row there.
  __device__ void find(int tile) {
    const bool gated = p_.epilogue == RowEpilogue::swiglu;
    const int index = gated ? blockIdx.x : min(blockIdx.x * kTiles + tile, p_.tiles - 1);
    int part = gated ? tile : 0;
    while (!gated && part + 1 < p_.parts && index >= p_.part[part + 1].first_tile) {
      ++part;
    }
    part_[tile] = part;
    row_[tile] = (index - (gated ? 0 : p_.part[part].first_tile)) * kTileRows;
  }

  __device__ void load(RowChunk<Traits>& chunk, int step) const {
    const int k = step * Traits::kStep + member_ * Traits::kValues;
    if (step >= end_ || k >= p_.inner) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunk.packed[tile][half] = make_uint4(0, 0, 0, 0);
          chunk.scale[tile][half] = 0;
        }
      }
      return;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const RowPart& part = p_.part[part_[tile]];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const long long row = min(row_[tile] + group_ + 8 * half, part.columns - 1);
        chunk.packed[tile][half] = load_once(static_cast<const char*>(part.w) + (row * p_.inner + k) / 8 * Traits::kBits);
        if constexpr (Traits::kBits < 16) {
          const long long at = row * p_.groups + (k >> p_.group_shift);
          chunk.scale[tile][half] = __ldg(static_cast<const unsigned short*>(part.scales) + at) |
                                    static_cast<unsigned>(__ldg(static_cast<const unsigned short*>(part.biases) + at)) << 16;
        }
      }
    }
  }

  static __device__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }

  // 8 values of x as pairs in the order in which `weights` has them; zeros for rows that are not there.
  __device__ void values(int k, unsigned (&to)[4]) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (group_ < p_.rows && k < p_.inner) {
      v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p_.x) + static_cast<long long>(group_) * p_.inner + k));
      if (kScalesFirst && p_.norm) {
        const uint4 n = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p_.norm) + k));
        v = make_uint4(scaled(v.x, n.x), scaled(v.y, n.y), scaled(v.z, n.z), scaled(v.w, n.w));
      } else if (p_.norm) {
        const uint4 n = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p_.norm) + k));
        v.x = as_bits(__hmul2(as_pair<T>(v.x), as_pair<T>(n.x)));
        v.y = as_bits(__hmul2(as_pair<T>(v.y), as_pair<T>(n.y)));
        v.z = as_bits(__hmul2(as_pair<T>(v.z), as_pair<T>(n.z)));
        v.w = as_bits(__hmul2(as_pair<T>(v.w), as_pair<T>(n.w)));
      }
    }
    if constexpr (Traits::kBits == 4) {
      to[0] = __byte_perm(v.x, v.z, 0x5410);
      to[1] = __byte_perm(v.x, v.z, 0x7632);
      to[2] = __byte_perm(v.y, v.w, 0x5410);
      to[3] = __byte_perm(v.y, v.w, 0x7632);
    } else {
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    }
  }

  __device__ unsigned scaled(unsigned pair, unsigned norms) const {
    const float2 x = mlx_cuda::unpack(pair, T{});
    const float2 n = mlx_cuda::unpack(norms, T{});
    return pack(x.x * factor_ * n.x, x.y * factor_ * n.y, T{});
  }

  // Piece `i` of 8 values.
  static __device__ void weights(const uint4& packed, unsigned scale, int i, unsigned (&to)[4]) {
    if constexpr (Traits::kBits == 16) {
      to[0] = packed.x;
      to[1] = packed.y;
      to[2] = packed.z;
      to[3] = packed.w;
    } else {
      const uint2 piece = Traits::kBits == 4 ? make_uint2(word(packed, i), 0) : make_uint2(word(packed, 2 * i), word(packed, 2 * i + 1));
      unpack<Format, T>(piece, to);
      scale_pairs<T>(to, __byte_perm(scale, 0, 0x1010), __byte_perm(scale, 0, 0x3232));
    }
  }

  __device__ void multiply(const RowChunk<Traits>& chunk, int step) {
    const int k = step * Traits::kStep + member_ * Traits::kValues;
#pragma unroll
    for (int i = 0; i < Traits::kValues / 8; ++i) {
      unsigned x[4];
      values(k + 8 * i, x);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        unsigned low[4];
        unsigned high[4];
        weights(chunk.packed[tile][0], chunk.scale[tile][0], i, low);
        weights(chunk.packed[tile][1], chunk.scale[tile][1], i, high);
        mma(sums_[tile], make_uint4(low[0], high[0], low[1], high[1]), x[0], x[1], T{});
        mma(sums_[tile], make_uint4(low[2], high[2], low[3], high[3]), x[2], x[3], T{});
      }
    }
  }

  // Of each row of x, by all threads of the block.
  __device__ void sum_squares() const {
    for (int row = 0; row < p_.rows; ++row) {
      const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p_.x) + static_cast<long long>(row) * p_.inner);
      float sum = 0.0f;
      for (int i = threadIdx.x; i < p_.inner / 8; i += blockDim.x) {
        const uint4 v = __ldcg(x + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = mlx_cuda::unpack(word(v, j), T{});
          sum = fmaf(two.x, two.x, fmaf(two.y, two.y, sum));
        }
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
      }
      if (threadIdx.x % 32 == 0) {
        shared().squares[warp_][row] = sum;
      }
    }
  }

  __device__ void share() const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = member_ * 2 + i % 2;
        if (column < p_.rows) {
          shared().sums[warp_][tile][group_ + i / 2 * 8][column] = sums_[tile][i];
        }
      }
    }
    __syncthreads();
  }

  __device__ float sum(int tile, int tile_row, int row) const {
    float all = 0.0f;
    for (int warp = 0; warp < warps_; ++warp) {
      all += shared().sums[warp][tile][tile_row][row];
    }
    return p_.norm && !kScalesFirst ? all * factor_of(row) : all;
  }

  __device__ float factor_of(int row) const {
    float squares = 0.0f;
    for (int warp = 0; warp < warps_; ++warp) {
      squares += shared().squares[warp][row];
    }
    return rsqrtf(squares / static_cast<float>(p_.inner) + p_.eps);
  }

  __device__ void finish() const {
    const bool gated = p_.epilogue == RowEpilogue::swiglu;
    for (int index = threadIdx.x; index < (gated ? 1 : kTiles) * kTileRows * p_.rows; index += blockDim.x) {
      const int row = index % p_.rows;
      const int tile_row = index / p_.rows % kTileRows;
      const int tile = index / p_.rows / kTileRows;
      if (!gated && blockIdx.x * kTiles + tile >= p_.tiles) {
        continue;
      }
      const int which = kTiles > 1 && tile == 1 ? kTiles - 1 : 0;
      const RowPart& part = p_.part[part_[which]];
      const int column = row_[which] + tile_row;
      if (column >= part.columns) {
        continue;
      }
      const long long at = static_cast<long long>(row) * part.columns + column;
      float value = sum(tile, tile_row, row);
      if (gated) {
        value = value / (1.0f + __expf(-value)) * sum(kTiles - 1, tile_row, row);
      } else if (p_.epilogue == RowEpilogue::add) {
        value = to_float(from_float<T>(value)) + to_float(static_cast<const T*>(p_.added)[at]);
      }
      static_cast<T*>(part.out)[at] = from_float<T>(value);
    }
  }

  const RowProductParams& p_;
  const int warp_;
  const int warps_;
  const int group_;   // of four lanes: a row of w, and another 8 on; a row of x
  const int member_;  // of these
  int begin_;
  int end_;
  int part_[kTiles];
  int row_[kTiles];
  float sums_[kTiles][4] = {};
  float factor_ = 1.0f;  // of the norm of this thread's row of x
};

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_ROW_BODY(...) mlx_cuda::RowProduct<mlx_cuda::RowTraits<__VA_ARGS__>>(params).run();
#else
#define MLX_CUDA_ROW_BODY(...) __trap();  // never launched: tensor cores have bfloat16 from sm_80 on
#endif

#define MLX_CUDA_ROW(name, ...)                                                                           \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::RowProductParams::kMostWarps * 32)              \
      row_product_##name(const __grid_constant__ mlx_cuda::RowProductParams params) {                    \
    MLX_CUDA_ROW_BODY(__VA_ARGS__)                                                                        \
  }
#define MLX_CUDA_ROW_TILES(name, Format)                            \
  MLX_CUDA_ROW(name##_float16_1, Format, __half, 1)                 \
  MLX_CUDA_ROW(name##_float16_2, Format, __half, 2)                 \
  MLX_CUDA_ROW(name##_bfloat16_1, Format, __nv_bfloat16, 1)         \
  MLX_CUDA_ROW(name##_bfloat16_2, Format, __nv_bfloat16, 2)

MLX_CUDA_ROW_TILES(plain, mlx_cuda::Plain)
MLX_CUDA_ROW_TILES(affine4, mlx_cuda::Affine<4>)
MLX_CUDA_ROW_TILES(affine8, mlx_cuda::Affine<8>)
