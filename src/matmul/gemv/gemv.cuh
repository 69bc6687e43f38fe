// A GEMV of a few rows of x with several matrices, with RMS norm of x before and addition or gate after it: the part of a
// transformer block between its attentions. The time is that of reading w. So each warp loads its part of w into pipeline stages
// of its own in shared memory, which it fills before x is waited for; and a block takes half of an SM, so that the next GEMV's
// blocks are resident too, and fill theirs while this one computes.
#pragma once

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "matmul/gemv/operands.cuh"
#include "matmul/gemv/results.cuh"

namespace mlx_cuda {

extern __shared__ uint4 row_memory[];

// Experts: there may be some. Which matrices are read is known only when the kernels before this one have ended then.
template <typename Operands, bool Experts>
class GemvKernel {
  using T = typename Operands::T;
  using Params = GemvParams;
  static constexpr int kTileRows = Params::kTileRows;
  static constexpr int kHalfRows = Params::kHalfRows;
  static constexpr int kStages = Params::kStages;
  static constexpr int kBeforeX = Experts                    ? kStages
                                  : Operands::kForm.packed() ? 1
                                                             : kStages - 1;  // stages of w that are loaded before x
  static constexpr int kBits = Operands::kForm.bits;
  static constexpr bool kMany = Operands::kForm.many;
  // Copies of w: lanes for a row, which have 16 bytes each, and rows at once.
  static constexpr int kUnitBytes = Operands::kForm.unit_bytes();
  static constexpr int kLanes = kUnitBytes <= 64 ? 4 : kUnitBytes <= 128 ? 8 : 16;
  static constexpr int kAtOnce = 32 / kLanes;
  static constexpr int kStageBytes = kTileRows * Operands::kForm.ring_bytes();

 public:
  __device__ explicit GemvKernel(const Params& p)
      : p_(p),
        warp_(threadIdx.x / 32),
        warps_(blockDim.x / 32),
        lane_(threadIdx.x % 32),
        form_(Operands::form(p)),
        rank_(kMany ? static_cast<int>(blockIdx.x) % p.splits : 0),
        first_unit_(rank_ * p.split_units),
        units_(kMany ? min(p.units(form_), p.turn_units(form_) - first_unit_) : p.units(form_)),
        turn_units_(p.turn_units(form_)),
        row_bytes_(p.inner / 8 * kBits),
        row_scale_bytes_(form_.scale_bytes(p.inner)),
        scales_distance_(p.scales_distance(form_)),
        gated_(is_gated(p.epilogue)),
        ring_at_(static_cast<unsigned>(__cvta_generic_to_shared(ring())) + ring_place<kBits>(lane_ / kLanes, lane_ % kLanes)) {}

  __device__ void run() {
    launch_dependents();
    if (Experts && p_.experts) {
      wait_for_grids();
      expert_ = lane_ < p_.chosen ? static_cast<int>(__ldcg(p_.experts + lane_)) : 0;
    }
    find_halves();
    __syncthreads();
    copied_ = {0, warp_ - warps_};
    advance(copied_);
    Place place = copied_;
    copy(0);
    if constexpr (Operands::kForm.packed()) {
      if (row_scale_bytes_ % 8 == 0) {
        copy_scales<8>();
      } else {
        copy_scales<4>();
      }
    }
    commit_copies();
#pragma unroll 1
    for (int i = 1; i < kBeforeX; ++i) {
      copy(i);
      commit_copies();
    }
    clear_sums();
    wait_for_grids();
    Operands operands(p_, {x(), zeros(), groups()});
    if constexpr (kMany) {
      stage_many(operands);
    } else {
      stage(operands);
    }
    const GemvResults<Operands> results(p_, halves(), sums(), factors(), tiles_);
    const T added = results.first_added();
    const int group = lane_ / 4;
    operands.find_columns(group, lane_ % 4);
    const int to_biases = p_.tiles * kTileRows * scales_distance_;
    int stage = 0;
#pragma unroll 1
    while (place.tile < tiles_) {
      wait_copies<kStages - 1>();
      __syncwarp();  // what others copied is there
      const unsigned char* w = ring() + stage * kStageBytes;
      const unsigned char* unit_scales =
          scales() + (place.tile * kTileRows + group) * scales_distance_ + place.unit * form_.scale_bytes(form_.unit_values());
      if (halves()[place.tile * 2 + 1].rows > 0) {
        operands.template multiply<true>(w, unit_scales, to_biases, place.unit);
      } else {
        operands.template multiply<kMany>(
            w, unit_scales, to_biases, place.unit);  // if so, the same code: nearly all tiles are whole
      }
      __syncwarp();  // the stage is no longer read
      copy(stage);
      commit_copies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      const int tile = place.tile;
      advance(place);
      if (place.tile != tile) {
        float* to = sums() + (tile * p_.rows * kTileRows + group) * Params::kMostWarps + warp_;
        operands.give([&](int half, int row, float value) {
          if (row < p_.rows) {
            to[(row * kTileRows + half * kHalfRows) * Params::kMostWarps] = value;
          }
        });
      }
    }
    __syncthreads();
    sync_cluster();
    results.finish(added);
    sync_cluster();  // the other block no longer reads its sums
  }

 private:
  __device__ void sync_cluster() const {
    if constexpr (kMany) {
      if (p_.splits > 1) {
        cluster_arrive();
        cluster_wait();
      }
    }
  }

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
    const int begin = static_cast<int>(blockIdx.x) / (kMany ? p_.splits : 1) * p_.block_rows;
    const int end = min(begin + p_.block_rows, p_.row_limit);
    const int index = threadIdx.x;
    GemvHalf half{static_cast<const char*>(p_.part[0].w)};
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
        half.out = static_cast<char*>(p_.part[gated_ ? 0 : part].out) + half.first * sizeof(T);
        if (Experts && p_.experts && p_.turns == 1) {
          half.first =
              static_cast<int>(__ldcg(p_.experts + half.first / p_.expert_rows)) * p_.expert_rows + half.first % p_.expert_rows;
        }
        half.w = static_cast<const char*>(p_.part[part].w) + static_cast<long long>(half.first) * row_bytes_;
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
    return reinterpret_cast<unsigned char*>(row_memory) + warp_ * Params::warp_bytes(form_);
  }
  __device__ GemvHalf* halves() const {
    return reinterpret_cast<GemvHalf*>(reinterpret_cast<unsigned char*>(row_memory) + warps_ * Params::warp_bytes(form_));
  }
  __device__ unsigned char* zeros() const {
    return reinterpret_cast<unsigned char*>(halves() + 2 * p_.tiles);
  }
  __device__ unsigned char* x() const {
    return zeros() + Params::kZeroBytes;
  }
  __device__ float2* groups() const {  // [span][row][group]
    return reinterpret_cast<float2*>(x() + p_.rows * p_.x_distance(form_));
  }
  __device__ float* squares() const {  // [row][warp]
    return reinterpret_cast<float*>(groups()) + p_.groups_bytes(form_) / 4;
  }
  __device__ float* factors() const {  // [row]
    return squares() + p_.rows * Params::kMostWarps;
  }
  __device__ unsigned char* scales() const {  // [tile][tile row]; biases have the same layout
    return reinterpret_cast<unsigned char*>(factors() + p_.rows * 4);
  }
  __device__ float* sums() const {  // [tile][row][tile row][warp]
    return reinterpret_cast<float*>(scales() + p_.scales_bytes(form_));
  }

  // ------------------------------------------------------------------------------------------------------------------ copies
  // Loads the next unit to a stage, if there is one. A thread copies the same 16 bytes of every so many rows.
  __device__ void copy(int stage) {
    if (copied_.tile < tiles_) {
      const GemvHalf* two = halves() + copied_.tile * 2;
      const char* w[2] = {two[0].w, two[1].w};
      const int rows[2] = {two[0].rows, two[1].rows};
      int unit = copied_.unit;
      if (Experts && p_.turns > 1) {
        const long long matrix =
            static_cast<long long>(__shfl_sync(~0u, expert_, unit / turn_units_)) * p_.expert_rows * row_bytes_;
        unit %= turn_units_;
        w[0] += matrix;
        w[1] += matrix;
      }
      const int at = ((kMany ? first_unit_ : 0) + unit) * kUnitBytes + lane_ % kLanes * 16;
      const bool inside = at < row_bytes_;
      const int row = lane_ / kLanes;
      const unsigned to = ring_at_ + stage * kStageBytes;
      if (kUnitBytes == kLanes * 16 || lane_ % kLanes < kUnitBytes / 16) {
#pragma unroll
        for (int first = 0; first < kTileRows; first += kAtOnce) {
          const int in_half = row + first % kHalfRows;
          const bool there = inside && in_half < rows[first / kHalfRows];
          copy_async<16>(
              to + first * Operands::kForm.ring_bytes(), w[first / kHalfRows] + (there ? in_half * row_bytes_ + at : 0), there);
        }
      }
      advance(copied_);
    }
  }
  // A warp for each row.
  template <int Bytes>
  __device__ void copy_scales() const {
    const int all = tiles_ * kTileRows;
    const int turn_bytes = form_.scale_bytes((kMany ? units_ : turn_units_) * form_.unit_values());
    const int first = kMany ? form_.scale_bytes(first_unit_ * form_.unit_values()) : 0;
    const int pieces = p_.turns * turn_bytes / Bytes;  // of a row, zeros among them
    const auto base = static_cast<unsigned>(__cvta_generic_to_shared(scales()));
#pragma unroll 1
    for (int row = warp_; row < all; row += warps_) {
      const GemvHalf& half = halves()[row / kHalfRows];
      const GemvPart& part = p_.part[half.part];
      const long long from = static_cast<long long>(half.first + row % kHalfRows) * row_scale_bytes_;
      const bool any = row % kHalfRows < half.rows;
      const unsigned to = base + row * scales_distance_;
#pragma unroll 1
      for (int piece = lane_; piece < pieces; piece += 32) {
        const int put = piece * Bytes;
        int at = first + put;
        long long matrix = 0;
        if (Experts && p_.turns > 1) {
          matrix = static_cast<long long>(__ldcg(p_.experts + at / turn_bytes)) * p_.expert_rows * row_scale_bytes_;
          at %= turn_bytes;
        }
        const bool there = any && at < row_scale_bytes_;
        const long long offset = there ? matrix + from + at : 0;
        copy_async<Bytes>(to + put, static_cast<const char*>(part.scales) + offset, there);
        if constexpr (!Operands::kForm.floats) {
          copy_async<Bytes>(
              to + p_.tiles * kTileRows * scales_distance_ + put, static_cast<const char*>(part.biases) + offset, there);
        }
      }
    }
  }

  __device__ void clear_sums() const {
    auto* const all = reinterpret_cast<float4*>(sums());
    for (int i = threadIdx.x; i < p_.sums_bytes() / 16; i += blockDim.x) {
      all[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ void clear_zeros() const {
    if (threadIdx.x < Params::kZeroBytes / 4) {
      reinterpret_cast<unsigned*>(zeros())[threadIdx.x] = 0;
    }
  }

  __device__ void copy_from(int& stage) {
#pragma unroll 1
    for (; stage < kStages; ++stage) {
      copy(stage);
      commit_copies();
    }
  }

  // Writes x to shared memory. Adjacent lanes read adjacent pieces of 8 values, and issue several loads before they use one. The
  // last stages of w are loaded after them, so that x does not wait behind all of w.
  __device__ void stage(const Operands& operands) {
    constexpr int at_once = 4;
    int copies = kBeforeX;
    clear_zeros();
    const int there = p_.inner / 8;
    const unsigned one = pack(1.0f, 1.0f, T{});
    const uint4 ones = make_uint4(one, one, one, one);
    const int pieces = units_ * (form_.unit_values() / 8);  // zeros among them
#pragma unroll 1
    for (int row = 0; row < p_.rows; ++row) {
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(p_.x) + static_cast<long long>(row) * p_.inner);
      float factor = 1.0f;
      if (Operands::kSizeFirst && p_.norm) {
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
      for (int first = threadIdx.x; first - lane_ < pieces; first += at_once * blockDim.x) {
        uint4 values[at_once];
        uint4 norms[at_once];
        float factors[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          int piece = first + i * blockDim.x;
          values[i] = make_uint4(0, 0, 0, 0);
          norms[i] = Experts && !p_.norm ? ones : values[i];
          factors[i] = factor;
          if (Experts && p_.turns > 1) {
            const int turn_pieces = turn_units_ * (form_.unit_values() / 8);
            const int turn = piece / turn_pieces;
            piece %= turn_pieces;
            if (turn < p_.turns && piece < there) {
              values[i] = __ldcg(from + turn * there + piece);
              factors[i] = to_float(static_cast<const T*>(p_.factors)[turn]);
            }
          } else if (piece < there) {
            values[i] = __ldcg(from + piece);
            if (p_.norm) {
              norms[i] = __ldg(static_cast<const uint4*>(p_.norm) + piece);
            }
          }
        }
        copy_from(copies);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          const int piece = first + i * blockDim.x;
          if (piece - lane_ >= pieces) {
            break;  // all of the warp
          }
          add_squares(all, values[i]);
          operands.put(row, piece, piece < pieces, values[i], p_.norm || (Experts && p_.factors), norms[i], factors[i]);
        }
      }
      if (!Operands::kSizeFirst && p_.norm) {
        put_squares(row, all);
      }
    }
    copy_from(copies);
    wait_copies<kStages - 1>();  // for the scales
    __syncthreads();
    if (!Operands::kSizeFirst && p_.norm && threadIdx.x < p_.rows) {
      factors()[threadIdx.x] = factor_of(threadIdx.x);
    }
  }

  // The same of more rows, four at once, for which a thread reads the norm's weights once.
  __device__ void stage_many(const Operands& operands) {
    constexpr int at_once = 4;
    int copies = kBeforeX;
    clear_zeros();
    const int distance = p_.inner / 8;
    const int first_piece = first_unit_ * (form_.unit_values() / 8);
    const int pieces = units_ * (form_.unit_values() / 8);  // zeros among them
    const bool size_first = p_.norm && (Operands::kSizeFirst || p_.splits > 1);
    if (size_first) {
#pragma unroll 1
      for (int row = 0; row < p_.rows; ++row) {
        float sum = 0.0f;
        for (int piece = threadIdx.x; piece < distance; piece += blockDim.x) {
          add_squares(sum, __ldcg(static_cast<const uint4*>(p_.x) + row * distance + piece));
        }
        put_squares(row, sum);
      }
      make_factors();
    }
#pragma unroll 1
    for (int row = 0; row < p_.rows; row += at_once) {
      const int rows = min(p_.rows - row, at_once);
      const auto* from = static_cast<const uint4*>(p_.x) + row * distance;
      float squares[at_once] = {};
#pragma unroll 1
      for (int piece = threadIdx.x; piece - lane_ < pieces; piece += blockDim.x) {
        const int at = first_piece + piece;
        uint4 values[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          values[i] = i < rows && at < distance ? __ldcg(from + i * distance + at) : make_uint4(0, 0, 0, 0);
        }
        const uint4 norms = p_.norm && at < distance ? __ldg(static_cast<const uint4*>(p_.norm) + at) : make_uint4(0, 0, 0, 0);
        copy_from(copies);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          add_squares(squares[i], values[i]);
          if (i < rows) {
            const float factor = Operands::kSizeFirst && p_.norm ? factors()[row + i] : 1.0f;
            operands.put(row + i, piece, piece < pieces, values[i], p_.norm, norms, factor);
          }
        }
      }
      if (p_.norm && !size_first) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          if (i < rows) {
            put_squares(row + i, squares[i]);
          }
        }
      }
    }
    copy_from(copies);
    wait_copies<kStages - 1>();  // for the scales
    if (p_.norm && !size_first) {
      make_factors();
    } else {
      __syncthreads();
    }
  }

  __device__ void make_factors() const {
    __syncthreads();
    if (threadIdx.x < p_.rows) {
      factors()[threadIdx.x] = factor_of(threadIdx.x);
    }
    __syncthreads();
  }

  static __device__ void add_squares(float& to, const uint4& v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpack(word(v, j), T{});
      to = fmaf(two.x, two.x, fmaf(two.y, two.y, to));
    }
  }

  // By whole warps.
  __device__ void put_squares(int row, float sum) const {
    sum = warp_sum(sum);
    if (lane_ == 0) {
      squares()[row * Params::kMostWarps + warp_] = sum;
    }
    if (threadIdx.x < Params::kMostWarps - warps_) {
      squares()[row * Params::kMostWarps + warps_ + threadIdx.x] = 0.0f;
    }
  }

  __device__ float factor_of(int row) const {
    return rsqrtf(sum_of_warps(squares() + row * Params::kMostWarps) / static_cast<float>(p_.inner) + p_.eps);
  }

  const Params& p_;
  const int warp_;
  const int warps_;
  const int lane_;
  const GemvForm form_;
  const int rank_;        // in the cluster
  const int first_unit_;  // of the block
  const int units_;       // of a tile, and
  const int turn_units_;  // of one expert's part of it
  const int row_bytes_;
  const int row_scale_bytes_;
  const int scales_distance_;
  const bool gated_;
  int tiles_;
  int expert_;              // the lane's
  const unsigned ring_at_;  // where a thread copies to
  Place copied_;            // the next unit that is copied
};

}  // namespace mlx_cuda

#define MLX_CUDA_GEMV(name, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::GemvParams::kMostWarps * 32, 2) \
      name(const __grid_constant__ mlx_cuda::GemvParams params) {                        \
    mlx_cuda::GemvKernel<__VA_ARGS__>(params).run();                                     \
  }
