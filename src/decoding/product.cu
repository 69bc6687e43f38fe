// Few rows of x times several matrices, x normalised on the way and the sums added, or gated, at the end: what a transformer's
// block does between its attentions. The time is that of reading w, so all that a warp needs of it is asked for before x is waited
// for.
//
// A block has tiles of 16 rows of w, whose warps have different parts of inner. They are the left operand of tensor core products.
// Which value of inner an element stands for does not matter as long as both operands agree: a thread's values of a row of w are
// adjacent in memory, 16 bytes a step. The right operand's columns are rows of x; where a step of packed values has several
// scales, each has columns of its own, which are zero elsewhere. So the products need integers only: sums get scales and biases.
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

// Whether x times the norm's weights may be more than there are numbers for, before it is divided by its size. Elsewhere the sums
// are divided, so that nobody waits for the size.
template <typename T>
inline constexpr bool kShortRange = false;
template <>
inline constexpr bool kShortRange<__half> = true;

template <typename FormatOf, typename TypeOf, int UnitsOf>
struct RowTraits {
  using Format = FormatOf;
  using T = TypeOf;
  static constexpr int kUnits = UnitsOf;  // of a step: parts that have a scale of their own
  static constexpr int kBits = Format::kBits;
  static constexpr bool kPacked = kBits < 16;
  static constexpr int kValues = RowProductParams::values(kBits);
  static constexpr int kStep = RowProductParams::step(kBits);
  static constexpr int kAhead = RowProductParams::ahead(kBits);
};

// 16 bytes of two rows, and the scales and biases of two columns.
struct RowChunk {
  uint4 packed[2];
  unsigned scale[2];
  unsigned bias[2];
};

extern __shared__ uint4 row_memory[];

template <typename Traits>
class RowProduct {
  using T = typename Traits::T;
  using Format = typename Traits::Format;
  static constexpr int kTileRows = RowProductParams::kTileRows;
  static constexpr int kZeroBytes = RowProductParams::kZeroBytes;
  // What integers are too large by as `integers` gives them: 128 or 1024, whose lowest bits they are.
  static constexpr float kBase = Traits::kBits == 8 && !kShortRange<T> ? 0.0f : kShortRange<T> ? 1024.0f : 128.0f;

 public:
  __device__ explicit RowProduct(const RowProductParams& p)
      : p_(p),
        warp_(threadIdx.x / 32),
        warps_(blockDim.x / 32),
        tile_warps_(warps_ >> (p.block_tiles - 1)),
        group_(threadIdx.x % 32 / 4),
        member_(threadIdx.x % 4) {}

  __device__ void run() {
    launch_dependents();
    const bool gated = p_.epilogue == RowEpilogue::swiglu;
    const int in_block = warp_ >= tile_warps_;  // which of the block's tiles this warp has a part of
    const int of_tile = warp_ - in_block * tile_warps_;
    const int tile = gated ? blockIdx.x : min(blockIdx.x * p_.block_tiles + in_block, p_.tiles - 1);
    const RowPart& part = p_.part[gated ? in_block : part_of(tile)];
    const int begin = of_tile * p_.warp_steps + min(of_tile, p_.longer_warps);
    const int end = begin + p_.warp_steps + (of_tile < p_.longer_warps);

    // Where rows begin: a matrix is less than 4 GiB.
    unsigned row_at[2];
    unsigned scale_at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned row = min((tile - (gated ? 0 : part.first_tile)) * kTileRows + group_ + 8 * half, part.columns - 1);
      row_at[half] = row * (p_.inner / 8 * Traits::kBits) + member_ * 16;
      scale_at[half] = (row * p_.groups + member_ * 2 % Traits::kUnits) * 2;
    }
    const auto* w = static_cast<const char*>(part.w);
    const auto* scales = static_cast<const char*>(part.scales);
    const auto* biases = static_cast<const char*>(part.biases);
    const bool scaled = member_ * 2 < Traits::kUnits * p_.rows;  // whether this thread's columns of the sums are there
    auto load = [&](RowChunk& chunk, int step) {
      if (step >= end) {
        return;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        chunk.packed[half] = load_once(w + (row_at[half] + step * 64));
        if (Traits::kPacked && scaled) {
          const unsigned at = scale_at[half] + (step * Traits::kUnits >> p_.scale_shift) * 2;
          chunk.scale[half] = load_scales(scales + at);
          chunk.bias[half] = load_scales(biases + at);
        }
      }
    };
    RowChunk chunks[Traits::kAhead];
#pragma unroll
    for (int i = 0; i < Traits::kAhead; ++i) {
      load(chunks[i], begin + i);
    }
    wait_for_grids();
    stage();
    find_columns();
    float totals[2][4] = {};  // rows g and g + 8, of two columns each; twice, so that fewer products wait for others
#pragma unroll 1
    for (int step = begin; step < end; step += Traits::kAhead) {
#pragma unroll
      for (int i = 0; i < Traits::kAhead; ++i) {
        if (step + i < end) {
          multiply(totals, chunks[i], step + i);
          load(chunks[i], step + i + Traits::kAhead);
        }
      }
    }
    share(totals);
    finish(gated);
  }

 private:
  __device__ int part_of(int tile) const {
    int part = 0;
#pragma unroll 1
    while (part + 1 < p_.parts && tile >= p_.part[part + 1].first_tile) {
      ++part;
    }
    return part;
  }

  static __device__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }

  // Those of this thread's two columns, whose units are adjacent, or the same.
  static __device__ unsigned load_scales(const char* from) {
    return Traits::kUnits > 1 ? __ldg(reinterpret_cast<const unsigned*>(from))
                              : __ldg(reinterpret_cast<const unsigned short*>(from));
  }
  static __device__ float2 both(unsigned scales) {
    const float2 two = mlx_cuda::unpack(scales, T{});
    return Traits::kUnits > 1 ? two : make_float2(two.x, two.x);
  }

  // ------------------------------------------------------------------------------------------------------------------ shared
  __device__ unsigned char* x() const {
    return reinterpret_cast<unsigned char*>(row_memory);
  }
  __device__ unsigned char* zeros() const {
    return x() + p_.x_bytes();
  }
  __device__ float* unit_sums() const {
    return reinterpret_cast<float*>(zeros() + kZeroBytes);
  }
  __device__ float* squares() const {  // [warp][row]
    return unit_sums() + p_.units_bytes(Traits::kBits, Traits::kUnits) / 4;
  }
  __device__ float* sums() const {  // [warp][row][tile row]
    return squares() + warps_ * p_.rows;
  }

  // x as pairs in the order of the packed ones, the sums of its units, and zeros. Whole warps have adjacent pieces of 8 values, and
  // ask for several before they use one.
  __device__ void stage() const {
    constexpr int at_once = 4;
    if (threadIdx.x < kZeroBytes / 4) {
      reinterpret_cast<unsigned*>(zeros())[threadIdx.x] = 0;
    }
    const int pieces = p_.inner / 8;
#pragma unroll 1
    for (int row = 0; row < p_.rows; ++row) {
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(p_.x) + static_cast<long long>(row) * p_.inner);
      float factor = 1.0f;
      if (kShortRange<T> && p_.norm) {
        float sum = 0.0f;
        for (int piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
          add_squares(sum, __ldcg(from + piece));
        }
        put_squares(row, sum);
        __syncthreads();
        factor = factor_of(row);
      }
      float all = 0.0f;
#pragma unroll 1
      for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x % 32) < pieces; first += at_once * blockDim.x) {
        uint4 values[at_once];
        uint4 norms[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int piece = first + i * blockDim.x;
          values[i] = make_uint4(0, 0, 0, 0);
          if (piece < pieces) {
            values[i] = __ldcg(from + piece);
            if (p_.norm) {
              norms[i] = __ldg(static_cast<const uint4*>(p_.norm) + piece);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int piece = first + i * blockDim.x;
          uint4& v = values[i];
          if (p_.norm && piece < pieces) {
            add_squares(all, v);
            const uint4& n = norms[i];
            v = make_uint4(times(v.x, n.x, factor), times(v.y, n.y, factor), times(v.z, n.z, factor), times(v.w, n.w, factor));
          }
          if (piece < pieces) {
            reinterpret_cast<uint4*>(x())[row * pieces + piece] = Traits::kBits == 4 ? apart(v) : v;
          }
          if (Traits::kPacked && piece - static_cast<int>(threadIdx.x % 32) < pieces) {
            put_unit(row, piece, v);
          }
        }
      }
      if (!kShortRange<T> && p_.norm) {
        put_squares(row, all);
      }
    }
    __syncthreads();
  }

  static __device__ void add_squares(float& to, const uint4& v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = mlx_cuda::unpack(word(v, j), T{});
      to = fmaf(two.x, two.x, fmaf(two.y, two.y, to));
    }
  }

  // By whole warps.
  __device__ void put_squares(int row, float sum) const {
    sum = sum_of(sum, 32);
    if (threadIdx.x % 32 == 0) {
      squares()[warp_ * p_.rows + row] = sum;
    }
  }
  __device__ void put_unit(int row, int piece, const uint4& v) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = mlx_cuda::unpack(word(v, j), T{});
      sum += two.x + two.y;
    }
    constexpr int lanes = Traits::kStep / Traits::kUnits / 8;
    sum = sum_of(sum, lanes);
    if (piece * 8 < p_.inner && threadIdx.x % lanes == 0) {
      unit_sums()[row * (p_.inner / Traits::kStep * Traits::kUnits) + piece / lanes] = sum;
    }
  }

  static __device__ float sum_of(float value, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(~0u, value, offset);
    }
    return value;
  }

  static __device__ unsigned times(unsigned pair, unsigned norms, float factor) {
    const float2 a = mlx_cuda::unpack(pair, T{});
    const float2 b = mlx_cuda::unpack(norms, T{});
    return pack(a.x * factor * b.x, a.y * factor * b.y, T{});
  }

  // Pairs of values 4 apart.
  static __device__ uint4 apart(const uint4& v) {
    return make_uint4(
        __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
  }

  __device__ float factor_of(int row) const {
    float sum = 0.0f;
#pragma unroll 2
    for (int warp = 0; warp < warps_; ++warp) {
      sum += squares()[warp * p_.rows + row];
    }
    return rsqrtf(sum / static_cast<float>(p_.inner) + p_.eps);
  }

  // ---------------------------------------------------------------------------------------------------------------- products
  // Piece `i` of 8 values: numbers, or integers plus kBase.
  static __device__ void integers(const uint4& packed, int i, unsigned (&to)[4]) {
    if constexpr (!Traits::kPacked) {
      to[0] = packed.x;
      to[1] = packed.y;
      to[2] = packed.z;
      to[3] = packed.w;
    } else if constexpr (Traits::kBits == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[j] = raise<0x000f000fu, kIntegerBase<T>>(word(packed, i) >> (4 * j));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned bytes = word(packed, 2 * i + j);
        if constexpr (kShortRange<T>) {
          to[2 * j] = __byte_perm(bytes, 0x64646464u, 0x4140);
          to[2 * j + 1] = __byte_perm(bytes, 0x64646464u, 0x4342);
        } else {
          unpack_bytes(bytes, to[2 * j], to[2 * j + 1], T{});
        }
      }
    }
  }

  // Where this thread reads x in the first step, zeros for a column that is none, and the sums of its two columns' units.
  __device__ void find_columns() {
    const int row = group_ / Traits::kUnits;
    const bool mine = row < p_.rows && member_ * Traits::kUnits / 4 == group_ % Traits::kUnits;
    x_at_ = mine ? x() + (row * p_.inner + member_ * Traits::kValues) * 2 : zeros();
    x_step_ = mine ? Traits::kStep * 2 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // what is read for a column that is not there is not used
      const int column = member_ * 2 + i;
      const int of = min(column / Traits::kUnits, p_.rows - 1);
      unit_at_[i] = unit_sums() + of * (p_.inner / Traits::kStep * Traits::kUnits) + column % Traits::kUnits;
    }
  }

  __device__ void multiply(float (&totals)[2][4], const RowChunk& chunk, int step) const {
    float products[2][4] = {};
    auto& sums = Traits::kPacked ? products : totals;
#pragma unroll
    for (int i = 0; i < Traits::kValues / 8; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(x_at_ + step * x_step_ + 16 * i);
      unsigned low[4];
      unsigned high[4];
      integers(chunk.packed[0], i, low);
      integers(chunk.packed[1], i, high);
      mma(sums[0], make_uint4(low[0], high[0], low[1], high[1]), v.x, v.y, T{});
      mma(sums[1], make_uint4(low[2], high[2], low[3], high[3]), v.z, v.w, T{});
    }
    if constexpr (Traits::kPacked) {
      const float unit[2] = {unit_at_[0][step * Traits::kUnits], unit_at_[1][step * Traits::kUnits]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 scale = both(chunk.scale[half]);
        const float2 bias = both(chunk.bias[half]);
        add(totals[0][2 * half], products[0][2 * half] + products[1][2 * half], scale.x, bias.x, unit[0]);
        add(totals[0][2 * half + 1], products[0][2 * half + 1] + products[1][2 * half + 1], scale.y, bias.y, unit[1]);
      }
    }
  }

  static __device__ void add(float& to, float product, float scale, float bias, float unit) {
    to = fmaf(scale, fmaf(-kBase, unit, product), fmaf(bias, unit, to));
  }

  // ------------------------------------------------------------------------------------------------------------------- results
  __device__ void share(float (&totals)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = sums() + warp_ * p_.rows * kTileRows + group_ + 8 * half;
      float one = totals[0][2 * half] + totals[1][2 * half];
      const float other = totals[0][2 * half + 1] + totals[1][2 * half + 1];
      if constexpr (Traits::kUnits == 1) {
        put(to, member_ * 2, one);
        put(to, member_ * 2 + 1, other);
      } else {
        one += other;
        if constexpr (Traits::kUnits == 4) {
          one += __shfl_xor_sync(~0u, one, 1);
        }
        if (Traits::kUnits == 2 || member_ % 2 == 0) {
          put(to, member_ * 2 / Traits::kUnits, one);
        }
      }
    }
    __syncthreads();
  }

  __device__ void put(float* to, int row, float value) const {
    if (row < p_.rows) {
      to[row * kTileRows] = value;
    }
  }

  __device__ float sum(int in_block, int tile_row, int row) const {
    float all = 0.0f;
#pragma unroll 2
    for (int warp = in_block * tile_warps_; warp < (in_block + 1) * tile_warps_; ++warp) {
      all += sums()[(warp * p_.rows + row) * kTileRows + tile_row];
    }
    return p_.norm && !kShortRange<T> ? all * factor_of(row) : all;
  }

  // A thread for each result: 16 of a tile, then the block's other tile, then other rows of x.
  __device__ void finish(bool gated) const {
    const int tiles = gated ? 1 : p_.block_tiles;  // of the block's results
    const int tile_row = threadIdx.x % kTileRows;
#pragma unroll 1
    for (int index = threadIdx.x / kTileRows; index < tiles * p_.rows; index += blockDim.x / kTileRows) {
      const int in_block = index & (tiles - 1);
      const int row = index >> (tiles - 1);
      const int tile = gated ? blockIdx.x : blockIdx.x * tiles + in_block;
      const RowPart& part = p_.part[gated ? 0 : part_of(tile)];
      const int column = (tile - (gated ? 0 : part.first_tile)) * kTileRows + tile_row;
      if (tile >= p_.tiles || column >= part.columns) {
        continue;
      }
      const long long at = static_cast<long long>(row) * part.columns + column;
      float value = sum(in_block, tile_row, row);
      if (gated) {
        value = value / (1.0f + __expf(-value)) * sum(1, tile_row, row);
      } else if (p_.epilogue == RowEpilogue::add) {
        value = to_float(from_float<T>(value)) + to_float(static_cast<const T*>(p_.added)[at]);
      }
      static_cast<T*>(part.out)[at] = from_float<T>(value);
    }
  }

  const RowProductParams& p_;
  const int warp_;
  const int warps_;
  const int tile_warps_;
  const int group_;   // of four lanes: a row of w, and another 8 on; a column of x
  const int member_;  // of these
  const unsigned char* x_at_;
  int x_step_;  // bytes from step to step
  const float* unit_at_[2];
};

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_ROW_BODY(...) mlx_cuda::RowProduct<mlx_cuda::RowTraits<__VA_ARGS__>>(params).run();
#else
#define MLX_CUDA_ROW_BODY(...) __trap();  // never launched: tensor cores have bfloat16 from sm_80 on
#endif

#define MLX_CUDA_ROW(name, dtype, T, Format, Units)                                                                              \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::RowProductParams::kMostWarps * 32, mlx_cuda::RowProductParams::kBlocks) \
      row_product_##name##_##dtype##_##Units(const __grid_constant__ mlx_cuda::RowProductParams params) {                        \
    MLX_CUDA_ROW_BODY(mlx_cuda::Format, T, Units)                                                                                \
  }
#define MLX_CUDA_ROW_ALL(dtype, T)              \
  MLX_CUDA_ROW(plain, dtype, T, Plain, 1)       \
  MLX_CUDA_ROW(affine4, dtype, T, Affine<4>, 1) \
  MLX_CUDA_ROW(affine4, dtype, T, Affine<4>, 2) \
  MLX_CUDA_ROW(affine4, dtype, T, Affine<4>, 4) \
  MLX_CUDA_ROW(affine8, dtype, T, Affine<8>, 1) \
  MLX_CUDA_ROW(affine8, dtype, T, Affine<8>, 2)

MLX_CUDA_ROW_ALL(float16, __half)
MLX_CUDA_ROW_ALL(bfloat16, __nv_bfloat16)
