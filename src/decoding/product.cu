// Few rows of x times several matrices, x normalised on the way and the sums added, or gated, at the end: what a transformer's
// block does between its attentions. The time is that of reading w. So each warp copies its part of w through a ring of its own in
// shared memory, which it fills before x is waited for; and a block takes half of a multiprocessor, so that the next product's
// blocks are there too, and fill theirs, while this one's compute.
//
// A warp has tiles of 16 rows of w, the left operand of tensor core products. Which value of inner an element stands for does not
// matter as long as both operands agree: a thread's values of a row are adjacent in memory. The right operand's columns are the
// rows of x. A unit of packed values has one scale: products need integers only, and their sums get scales and biases.
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

template <typename FormatOf, typename TypeOf, int GroupOf>
struct RowTraits {
  using Format = FormatOf;
  using T = TypeOf;
  static constexpr int kBits = Format::kBits;
  static constexpr bool kPacked = kBits < 16;
  static constexpr int kGroup = GroupOf;  // values that share a scale
  static constexpr int kUnit = RowProductParams::unit_values(kBits);
  static constexpr int kSpan = RowProductParams::span_values(kBits);
  static constexpr int kScales = kUnit / kGroup;  // of a row of a unit
  static constexpr int kSpanScales = RowProductParams::scales_of_span(kBits, kGroup);
  static constexpr int kPieces = kSpan / 32;  // of 8 values, that a thread has of a row and span
};

extern __shared__ uint4 row_memory[];

// Bytes from global to shared memory while the thread goes on; zeros where they are not there.
template <int Bytes>
__device__ inline void copy_ahead(unsigned to, const void* from, bool there) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(there ? Bytes : 0)
                 : "memory");
  }
}

// Half a tile: up to 8 rows of one part.
struct alignas(16) RowHalf {
  const char* w;
  int rows;     // that there are
  int first;    // row of the part
  char* out;    // of the first row
  int columns;  // of the part
  int part;
};
static_assert(sizeof(RowHalf) == RowProductParams::kHalfBytes);

template <typename Traits>
class RowProduct {
  using T = typename Traits::T;
  using Params = RowProductParams;
  static constexpr int kTileRows = Params::kTileRows;
  static constexpr int kHalfRows = Params::kHalfRows;
  static constexpr int kStages = Params::kStages;
  // What integers are too large by as `integers` gives them: 128 or 1024, whose lowest bits they are.
  static constexpr float kBase = Traits::kBits == 8 && !kShortRange<T> ? 0.0f : kShortRange<T> ? 1024.0f : 128.0f;

 public:
  __device__ explicit RowProduct(const Params& p)
      : p_(p),
        warp_(threadIdx.x / 32),
        warps_(blockDim.x / 32),
        lane_(threadIdx.x % 32),
        group_(lane_ / 4),
        member_(lane_ % 4),
        units_(p.units(Traits::kBits)),
        row_bytes_(p.inner / 8 * Traits::kBits),
        scales_distance_(p.scales_distance(Traits::kBits, Traits::kGroup)),
        columns_(p.columns(Traits::kBits, Traits::kGroup)),
        gated_(p.epilogue == RowEpilogue::swiglu),
        ring_at_(
            static_cast<unsigned>(__cvta_generic_to_shared(ring())) + lane_ / 8 * Params::kUnitBytes +
            (lane_ % 8 ^ turned(lane_ / 8)) * 16) {}

  __device__ void run() {
    launch_dependents();
    find_halves();
    __syncthreads();
    copied_ = {0, warp_ - warps_};
    advance(copied_);
    Place place = copied_;
    copy(0);
    if constexpr (Traits::kPacked) {
      if (p_.groups % 4 == 0) {
        copy_scales<8>();
      } else {
        copy_scales<4>();
      }
    }
    commit_copies();
#pragma unroll 1
    for (int i = 1; i < kStages; ++i) {
      copy(i);
      commit_copies();
    }
    clear_sums();
    wait_for_grids();
    stage();
    const T added = added_to(result_of(threadIdx.x / kTileRows));
    find_columns();
    float totals[4] = {};  // rows g and g + 8, of two columns each
    int stage = 0;
#pragma unroll 1
    while (place.tile < tiles_) {
      wait_copies<kStages - 1>();
      __syncwarp();  // what others copied is there
      if (halves()[place.tile * 2 + 1].rows > 0) {
        multiply<true>(totals, stage, place);
      } else {
        multiply<false>(totals, stage, place);
      }
      __syncwarp();  // nobody reads it any more
      copy(stage);
      commit_copies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      const int tile = place.tile;
      advance(place);
      if (place.tile != tile) {
        put(totals, tile);
      }
    }
    __syncthreads();
    finish(added);
  }

 private:
  struct Place {
    int tile;
    int unit;
  };
  __device__ void advance(Place& place) const {
    place.unit += warps_;
    while (place.unit >= units_) {
      place.unit -= units_;
      ++place.tile;
    }
  }

  // Which rows of w this block's halves of tiles are, and how many there are.
  __device__ void find_halves() {
    const int begin = blockIdx.x * p_.block_rows;
    const int end = min(begin + p_.block_rows, p_.row_limit);
    const int index = threadIdx.x;
    RowHalf half{static_cast<const char*>(p_.part[0].w)};
    int count = 0;
#pragma unroll
    for (int part = 0; part < Params::kMostParts; ++part) {
      const int base = gated_ ? 0 : p_.part[part].first;
      const int first = max(begin, base);
      const int last = min(end, base + p_.part[part].columns);
      if (part >= p_.parts || first >= last) {
        continue;
      }
      const int halves = (last - first + kHalfRows - 1) / kHalfRows;
      const int of_part = gated_ ? index / 2 : index - count;
      if (gated_ ? index % 2 == part && of_part < halves : index >= count && of_part < halves) {
        const int row = first + of_part * kHalfRows;
        half.rows = min(last - row, kHalfRows);
        half.part = part;
        half.first = row - base;
        half.columns = p_.part[part].columns;
        half.w = static_cast<const char*>(p_.part[part].w) + static_cast<long long>(half.first) * row_bytes_;
        half.out = static_cast<char*>(p_.part[gated_ ? 0 : part].out) + half.first * sizeof(T);
      }
      count += halves;
    }
    if (index < 2 * p_.tiles) {
      halves()[index] = half;
    }
    tiles_ = (count + 1) / 2;
  }

  // ------------------------------------------------------------------------------------------------------------------ shared
  __device__ unsigned char* ring() const {  // of this warp
    return reinterpret_cast<unsigned char*>(row_memory) + warp_ * (kStages * Params::kStageBytes);
  }
  __device__ RowHalf* halves() const {
    return reinterpret_cast<RowHalf*>(reinterpret_cast<unsigned char*>(row_memory) + warps_ * (kStages * Params::kStageBytes));
  }
  __device__ unsigned char* zeros() const {
    return reinterpret_cast<unsigned char*>(halves() + 2 * p_.tiles);
  }
  __device__ unsigned char* x() const {
    return zeros() + Params::kZeroBytes;
  }
  __device__ float* span_sums() const {  // [span][column]
    return reinterpret_cast<float*>(x() + p_.rows * p_.x_distance(Traits::kBits));
  }
  __device__ float* squares() const {  // [row][warp]
    return span_sums() + p_.span_sums_bytes(Traits::kBits, Traits::kGroup) / 4;
  }
  __device__ float* factors() const {  // [row]
    return squares() + p_.rows * Params::kMostWarps;
  }
  __device__ unsigned char* scales() const {  // [tile][tile row], and biases likewise
    return reinterpret_cast<unsigned char*>(factors() + p_.rows * 4);
  }
  __device__ float* sums() const {  // [tile][row][tile row][warp]
    return reinterpret_cast<float*>(scales() + p_.scales_bytes(Traits::kBits, Traits::kGroup));
  }

  // ------------------------------------------------------------------------------------------------------------------ copies
  // The next unit to a stage of the ring, if there is one. A thread copies the same 16 bytes of every fourth row, a warp 128 bytes
  // of four. Pieces of a row lie so that threads that read a span of all rows find them in different banks.
  __device__ void copy(int stage) {
    if (copied_.tile < tiles_) {
      const RowHalf* two = halves() + copied_.tile * 2;
      const char* const w[2] = {two[0].w, two[1].w};
      const int rows[2] = {two[0].rows, two[1].rows};
      const int at = copied_.unit * Params::kUnitBytes + lane_ % 8 * 16;
      const bool inside = at < row_bytes_;
      const int row = lane_ / 8;
      const unsigned to = ring_at_ + stage * Params::kStageBytes;
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) {
        const bool there = inside && row + i % 2 * 4 < rows[i / 2];
        copy_ahead<16>(to + i * 4 * Params::kUnitBytes, w[i / 2] + (there ? (row + i % 2 * 4) * row_bytes_ + at : 0), there);
      }
      advance(copied_);
    }
  }
  static __device__ int turned(int row) {
    return row % 2 * 4;
  }

  // A warp for each row.
  template <int Bytes>
  __device__ void copy_scales() const {
    const int all = tiles_ * kTileRows;
    const int pieces = units_ * Traits::kScales * 2 / Bytes;  // of a row, zeros among them
    const auto base = static_cast<unsigned>(__cvta_generic_to_shared(scales()));
#pragma unroll 1
    for (int row = warp_; row < all; row += warps_) {
      const RowHalf& half = halves()[row / kHalfRows];
      const RowPart& part = p_.part[half.part];
      const long long from = static_cast<long long>(half.first + row % kHalfRows) * p_.groups * 2;
      const bool any = row % kHalfRows < half.rows;
      const unsigned to = base + row * scales_distance_;
#pragma unroll 1
      for (int piece = lane_; piece < pieces; piece += 32) {
        const int at = piece * Bytes;
        const bool there = any && at < p_.groups * 2;
        copy_ahead<Bytes>(to + at, static_cast<const char*>(part.scales) + (there ? from + at : 0), there);
        copy_ahead<Bytes>(
            to + p_.tiles * kTileRows * scales_distance_ + at, static_cast<const char*>(part.biases) + (there ? from + at : 0),
            there);
      }
    }
  }

  __device__ void clear_sums() const {
    auto* const all = reinterpret_cast<float4*>(sums());
    for (int i = threadIdx.x; i < p_.sums_bytes() / 16; i += blockDim.x) {
      all[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  // x as pairs in the order of the packed ones, and the sums of its units. Whole warps have adjacent pieces of 8 values, and ask
  // for several before they use one.
  __device__ void stage() const {
    constexpr int at_once = 4;
    if (threadIdx.x < Params::kZeroBytes / 4) {
      reinterpret_cast<unsigned*>(zeros())[threadIdx.x] = 0;
    }
    const int there = p_.inner / 8;
    const int pieces = units_ * (Traits::kUnit / 8);  // zeros among them
#pragma unroll 1
    for (int row = 0; row < p_.rows; ++row) {
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(p_.x) + static_cast<long long>(row) * p_.inner);
      auto* to = reinterpret_cast<uint4*>(x() + row * p_.x_distance(Traits::kBits));
      float factor = 1.0f;
      if (kShortRange<T> && p_.norm) {
        float sum = 0.0f;
        for (int piece = threadIdx.x; piece < there; piece += blockDim.x) {
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
          if (piece < there) {
            values[i] = __ldcg(from + piece);
            if (p_.norm) {
              norms[i] = __ldg(static_cast<const uint4*>(p_.norm) + piece);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int piece = first + i * blockDim.x;
          if (piece - static_cast<int>(threadIdx.x % 32) >= pieces) {
            break;  // all of the warp
          }
          uint4& v = values[i];
          if (p_.norm && piece < there) {
            add_squares(all, v);
            const uint4& n = norms[i];
            v = make_uint4(times(v.x, n.x, factor), times(v.y, n.y, factor), times(v.z, n.z, factor), times(v.w, n.w, factor));
          }
          if (piece < pieces) {
            to[place_of(piece)] = Traits::kBits == 4 ? apart(v) : v;
          }
          if (Traits::kPacked) {
            put_span(row, piece, v);
          }
        }
      }
      if (!kShortRange<T> && p_.norm) {
        put_squares(row, all);
      }
    }
    wait_copies<kStages - 1>();  // for the scales
    __syncthreads();
    if (!kShortRange<T> && p_.norm && threadIdx.x < p_.rows) {
      factors()[threadIdx.x] = factor_of(threadIdx.x);
    }
  }

  // Where a piece of x lies: those that four threads read at once are adjacent.
  static __device__ int place_of(int piece) {
    constexpr int pieces = 4 * Traits::kPieces;
    const int in_span = piece % pieces;
    return piece - in_span + in_span % Traits::kPieces * 4 + in_span / Traits::kPieces;
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
      squares()[row * Params::kMostWarps + warp_] = sum;
    }
    if (threadIdx.x < Params::kMostWarps - warps_) {
      squares()[row * Params::kMostWarps + warps_ + threadIdx.x] = 0.0f;
    }
  }
  __device__ void put_span(int row, int piece, const uint4& v) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = mlx_cuda::unpack(word(v, j), T{});
      sum += two.x + two.y;
    }
    constexpr int lanes = Traits::kSpan / Traits::kSpanScales / 8;
    sum = sum_of(sum, lanes);
    if (piece < units_ * (Traits::kUnit / 8) && threadIdx.x % lanes == 0) {
      const int part = piece / lanes;
      span_sums()[part / Traits::kSpanScales * columns_ + row * Traits::kSpanScales + part % Traits::kSpanScales] = sum;
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
    return rsqrtf(sum_of_warps(squares() + row * Params::kMostWarps) / static_cast<float>(p_.inner) + p_.eps);
  }

  // Those of warps that a block does not have are zero.
  static __device__ float sum_of_warps(const float* of) {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < Params::kMostWarps / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(of)[i];
      all += (four.x + four.y) + (four.z + four.w);
    }
    return all;
  }

  // ---------------------------------------------------------------------------------------------------------------- products
  // Piece `i` of 8 values of a thread's 16 bytes: numbers, or integers plus kBase.
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

  // Where this thread reads x, zeros for a column that is none, and the sums of its two columns.
  __device__ void find_columns() {
    const int row = group_ / Traits::kSpanScales;
    const bool mine = row < p_.rows && member_ * Traits::kSpanScales / 4 == group_ % Traits::kSpanScales;
    x_at_ = mine ? x() + row * p_.x_distance(Traits::kBits) + member_ * 16 : zeros();
    x_step_ = mine ? Traits::kUnit * 2 : 0;
    sums_at_ = span_sums() + min(2 * member_, columns_ - 2);
  }

  static __device__ float2 both_scales(unsigned two) {
    return mlx_cuda::unpack(two, T{});
  }

  // The scales of a row's spans for this thread's two columns, or its biases, as pairs.
  __device__ void read_scales(const unsigned char* from, unsigned (&to)[2]) const {
    if constexpr (Traits::kSpanScales == 4) {
      to[0] = *reinterpret_cast<const unsigned*>(from + member_ % 2 * 4);
      to[1] = *reinterpret_cast<const unsigned*>(from + member_ % 2 * 4 + 8);
    } else if constexpr (Traits::kSpanScales == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      to[0] = v.x;
      to[1] = v.y;
    } else if constexpr (Traits::kScales == 2) {
      const unsigned v = *reinterpret_cast<const unsigned*>(from);
      to[0] = __byte_perm(v, v, 0x1010);
      to[1] = __byte_perm(v, v, 0x3232);
    } else {
      const unsigned v = *reinterpret_cast<const unsigned short*>(from);
      to[0] = to[1] = __byte_perm(v, v, 0x1010);
    }
  }

  // Both: the tile has rows in its second half.
  template <bool Both>
  __device__ void multiply(float (&totals)[4], int stage, const Place& place) const {
    constexpr int halves = Both ? 2 : 1;
    const unsigned char* w = ring() + stage * Params::kStageBytes + group_ * Params::kUnitBytes;
    const unsigned char* x = x_at_ + place.unit * x_step_;
    const float* sums_at = sums_at_ + place.unit * 2 * columns_;
    unsigned packed_scales[halves][2];
    unsigned packed_biases[halves][2];
    if constexpr (Traits::kPacked) {
      const unsigned char* from =
          scales() + (place.tile * kTileRows + group_) * scales_distance_ + place.unit * (Traits::kScales * 2);
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        read_scales(from + half * kHalfRows * scales_distance_, packed_scales[half]);
        read_scales(from + (p_.tiles * kTileRows + half * kHalfRows) * scales_distance_, packed_biases[half]);
      }
    }
#pragma unroll
    for (int span = 0; span < 2; ++span) {
      const int at = (span * 64 + member_ * 16) ^ (turned(group_) * 16);
      const uint4 low_words = *reinterpret_cast<const uint4*>(w + at);
      const uint4 high_words =
          Both ? *reinterpret_cast<const uint4*>(w + kHalfRows * Params::kUnitBytes + at) : make_uint4(0, 0, 0, 0);
      float products[4] = {};
      auto& sums = Traits::kPacked ? products : totals;
#pragma unroll
      for (int i = 0; i < Traits::kPieces; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + (span * Traits::kSpan * 2 + 64 * i));
        unsigned low[4];
        unsigned high[4] = {};
        integers(low_words, i, low);
        if constexpr (Both) {
          integers(high_words, i, high);
        }
        mma(sums, make_uint4(low[0], high[0], low[1], high[1]), v.x, v.y, T{});
        mma(sums, make_uint4(low[2], high[2], low[3], high[3]), v.z, v.w, T{});
      }
      if constexpr (Traits::kPacked) {
        const float2 of_x = *reinterpret_cast<const float2*>(sums_at + span * columns_);
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const float2 scale = both_scales(packed_scales[half][span]);
          float2 bias = both_scales(packed_biases[half][span]);
          bias.x = fmaf(-kBase, scale.x, bias.x);
          bias.y = fmaf(-kBase, scale.y, bias.y);
          totals[2 * half] = fmaf(scale.x, products[2 * half], fmaf(bias.x, of_x.x, totals[2 * half]));
          totals[2 * half + 1] = fmaf(scale.y, products[2 * half + 1], fmaf(bias.y, of_x.y, totals[2 * half + 1]));
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------- results
  // What this warp has of a tile.
  __device__ void put(float (&totals)[4], int tile) const {
    float* to = sums() + (tile * p_.rows * kTileRows + group_) * Params::kMostWarps + warp_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& one = totals[2 * half];
      float& other = totals[2 * half + 1];
      if constexpr (Traits::kSpanScales == 1) {
        put(to + half * kHalfRows * Params::kMostWarps, member_ * 2, one);
        put(to + half * kHalfRows * Params::kMostWarps, member_ * 2 + 1, other);
      } else {
        one += other;
        if constexpr (Traits::kSpanScales == 4) {
          one += __shfl_xor_sync(~0u, one, 1);
        }
        if (Traits::kSpanScales == 2 || member_ % 2 == 0) {
          put(to + half * kHalfRows * Params::kMostWarps, member_ * 2 / Traits::kSpanScales, one);
        }
      }
      one = other = 0.0f;
    }
  }
  __device__ void put(float* to, int row, float value) const {
    if (row < p_.rows) {
      to[row * kTileRows * Params::kMostWarps] = value;
    }
  }

  __device__ float sum(int tile, int tile_row, int row) const {
    const float all = sum_of_warps(sums() + ((tile * p_.rows + row) * kTileRows + tile_row) * Params::kMostWarps);
    return p_.norm && !kShortRange<T> ? all * factors()[row] : all;
  }

  // A thread for each result: those of a tile, then another, then other rows of x.
  struct Result {
    int tile;
    int row;
    long long at;
    T* out;  // null: none
  };
  __device__ Result result_of(int index) const {
    Result result{index, 0, 0, nullptr};
    while (result.tile >= tiles_) {
      result.tile -= tiles_;
      ++result.row;
    }
    const int tile_row = threadIdx.x % kTileRows;
    const RowHalf& half = halves()[result.tile * 2 + tile_row / kHalfRows];
    if (result.row < p_.rows && tile_row % kHalfRows < half.rows && !(gated_ && half.part == 1)) {
      result.at = static_cast<long long>(result.row) * half.columns + tile_row % kHalfRows;
      result.out = reinterpret_cast<T*>(half.out) + result.at;
      result.at += half.first;
    }
    return result;
  }
  __device__ T added_to(const Result& result) const {
    return p_.epilogue == RowEpilogue::add && result.out ? static_cast<const T*>(p_.added)[result.at] : T{};
  }

  // `added`: to the first of this thread's results, which has been asked for long ago.
  __device__ void finish(T added) const {
    const int tile_row = threadIdx.x % kTileRows;
#pragma unroll 1
    for (int index = threadIdx.x / kTileRows; index < tiles_ * p_.rows;) {
      const Result result = result_of(index);
      if (result.out) {
        float value = sum(result.tile, tile_row, result.row);
        if (gated_) {
          value = __fdividef(value, 1.0f + __expf(-value)) * sum(result.tile, tile_row + kHalfRows, result.row);
        } else if (p_.epilogue == RowEpilogue::add) {
          value = to_float(from_float<T>(value)) + to_float(added);
        }
        *result.out = from_float<T>(value);
      }
      index += blockDim.x / kTileRows;
      if (index < tiles_ * p_.rows) {
        added = added_to(result_of(index));
      }
    }
  }

  const Params& p_;
  const int warp_;
  const int warps_;
  const int lane_;
  const int group_;   // of four lanes: a row of a tile, and another 8 on; a column of x
  const int member_;  // of these
  const int units_;   // of a tile
  const int row_bytes_;
  const int scales_distance_;
  const int columns_;  // of x, and of sums
  const bool gated_;
  int tiles_;
  const unsigned ring_at_;  // where a thread copies to
  Place copied_;            // the next unit that is copied
  const unsigned char* x_at_;
  int x_step_;  // bytes from unit to unit
  const float* sums_at_;
};

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_ROW_BODY(...) mlx_cuda::RowProduct<mlx_cuda::RowTraits<__VA_ARGS__>>(params).run();
#else
#define MLX_CUDA_ROW_BODY(...) __trap();  // never launched: tensor cores have bfloat16 from sm_80 on
#endif

#define MLX_CUDA_ROW(name, dtype, T, Format, Group)                                             \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::RowProductParams::kMostWarps * 32, 2)  \
      row_product_##name##_##dtype(const __grid_constant__ mlx_cuda::RowProductParams params) { \
    MLX_CUDA_ROW_BODY(mlx_cuda::Format, T, Group)                                               \
  }
#define MLX_CUDA_ROW_ALL(dtype, T)                    \
  MLX_CUDA_ROW(plain, dtype, T, Plain, 32)            \
  MLX_CUDA_ROW(affine4_32, dtype, T, Affine<4>, 32)   \
  MLX_CUDA_ROW(affine4_64, dtype, T, Affine<4>, 64)   \
  MLX_CUDA_ROW(affine4_128, dtype, T, Affine<4>, 128) \
  MLX_CUDA_ROW(affine8_32, dtype, T, Affine<8>, 32)   \
  MLX_CUDA_ROW(affine8_64, dtype, T, Affine<8>, 64)   \
  MLX_CUDA_ROW(affine8_128, dtype, T, Affine<8>, 128)

MLX_CUDA_ROW_ALL(float16, __half)
MLX_CUDA_ROW_ALL(bfloat16, __nv_bfloat16)
