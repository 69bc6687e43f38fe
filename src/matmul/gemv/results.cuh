// The end of the GEMVs: the sums of a block's warps become results, with the epilogue.
#pragma once

#include "device/ptx.cuh"
#include "matmul/gemv/gate.cuh"
#include "matmul/gemv/operands.cuh"

namespace mlx_cuda {

// Half a tile: up to 8 rows of one part.
struct alignas(16) GemvHalf {
  const char* w;
  int rows;     // that there are
  int first;    // row of the part
  char* out;    // of the first row
  int columns;  // of the part
  int part;
};
static_assert(sizeof(GemvHalf) == GemvParams::kHalfBytes);

// Those of warps that a block does not have are zero.
__device__ inline float sum_of_warps(const float* of) {
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < GemvParams::kMostWarps / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(of)[i];
    all += (four.x + four.y) + (four.z + four.w);
  }
  return all;
}

// A thread for each result: those of a tile, then another, then other rows of x. Blocks of a cluster take turns at rows of tiles.
template <typename Operands>
class GemvResults {
  using T = typename Operands::T;
  static constexpr int kTileRows = GemvParams::kTileRows;
  static constexpr int kHalfRows = GemvParams::kHalfRows;
  static constexpr bool kMany = Operands::kForm.many;

 public:
  // `sums`: [tile][row][tile row][warp]; `factors`: [row], of x.
  __device__ GemvResults(const GemvParams& p, const GemvHalf* halves, const float* sums, const float* factors, int tiles)
      : p_(p),
        halves_(halves),
        sums_(sums),
        factors_(factors),
        tiles_(tiles),
        gated_(is_gated(p.epilogue)),
        tile_row_(threadIdx.x % kTileRows),
        first_(threadIdx.x / kTileRows * (kMany ? p.splits : 1) + (kMany ? blockIdx.x % p.splits : 0)) {}

  // The addend of the thread's first result, loaded early.
  __device__ T first_added() const {
    return added_to(result_of(first_));
  }

  __device__ void finish(T added) const {
#pragma unroll 1
    for (int index = first_; index < tiles_ * p_.rows; index += blockDim.x / kTileRows * (kMany ? p_.splits : 1)) {
      const Result result = result_of(index);
      if (index != first_) {
        added = added_to(result);
      }
      if (result.out) {
        float value = sum(result.tile, tile_row_, result.row);
        if (gated_) {
          value = activated(p_.epilogue, value) * sum(result.tile, tile_row_ + kHalfRows, result.row);
        } else if (p_.epilogue == GemvEpilogue::add) {
          value = to_float(from_float<T>(value)) + to_float(added);
        }
        *result.out = from_float<T>(value);
      }
    }
  }

 private:
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
    const GemvHalf& half = halves_[result.tile * 2 + tile_row_ / kHalfRows];
    if (result.row < p_.rows && tile_row_ % kHalfRows < half.rows && !(gated_ && half.part == 1)) {
      result.at = static_cast<long long>(result.row) * half.columns + tile_row_ % kHalfRows;
      result.out = reinterpret_cast<T*>(half.out) + result.at;
      result.at += half.first;
    }
    return result;
  }
  __device__ T added_to(const Result& result) const {
    return p_.epilogue == GemvEpilogue::add && result.out ? static_cast<const T*>(p_.added)[result.at] : T{};
  }

  __device__ float sum(int tile, int tile_row, int row) const {
    const float* const of = sums_ + ((tile * p_.rows + row) * kTileRows + tile_row) * GemvParams::kMostWarps;
    float all;
    if (kMany && p_.splits > 1) {
      all = sum_of_warps(in_cluster(0, of)) + sum_of_warps(in_cluster(1, of));
    } else {
      all = sum_of_warps(of);
    }
    return p_.norm && !Operands::kSizeFirst ? all * factors_[row] : all;
  }

  const GemvParams& p_;
  const GemvHalf* const halves_;
  const float* const sums_;
  const float* const factors_;
  const int tiles_;
  const bool gated_;
  const int tile_row_;
  const int first_;
};

}  // namespace mlx_cuda
