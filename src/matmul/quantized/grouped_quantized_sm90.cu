// Grouped GEMM with quantized weights on Hopper: as grouped_sm90.cu, but the producers are a whole warpgroup, which dequantizes
// the weights of a part into the stages.
//
// Each producer has a pair of half rows of the packed weights, which it has loaded itself, a few steps before, from global to
// shared memory: no other thread reads them, so it waits for none.
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "matmul/grouped/tiles_sm90.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/params.h"
#include "matmul/quantized/values.cuh"

namespace mlx_cuda {

using Shape = GroupedQuantizedSm90;
[[maybe_unused]] constexpr int kColumns = Shape::kTile.columns;
[[maybe_unused]] constexpr int kStages = Shape::kTile.stages;
[[maybe_unused]] constexpr int kProducers = Shape::kProducers;
[[maybe_unused]] constexpr int kUnit = Shape::kUnit;

// Whether a producer's values have two scales.
template <typename Format>
constexpr bool kTwoScales = false;
template <>
inline constexpr bool kTwoScales<Nvfp4> = true;

// The packed weights of a few steps.
template <typename Format>
struct Packed {
  static constexpr int kUnits = kColumns * kDepth / kUnit / kProducers;  // of a producer in a step
  static constexpr int kUnitBytes = kUnit * Format::kBits / 8;
  static constexpr int kVector = chunk_alignment(Format::kBits);
  static constexpr int kVectors = kUnitBytes / kVector;
  static constexpr int kStepBytes = Shape::step_bytes(Format::kBits);
  static constexpr int kSteps = Shape::steps(Format::kBits);

  // Where a producer's bytes are: those of all of them side by side.
  static __device__ int place(int slot, int unit, int vector) {
    return slot * kStepBytes + ((unit * kVectors + vector) * kProducers + static_cast<int>(threadIdx.x)) * kVector;
  }
};

// The row of the weights that a producer has as its i-th, and which half of its values.
__device__ inline int row_of(const GroupedParams& p, const GroupTile& tile, int i) {
  return min(tile.column0 + i * (kProducers / 2) + static_cast<int>(threadIdx.x) / 2, p.columns - 1);
}
__device__ inline int half_of() {
  return static_cast<int>(threadIdx.x) % 2;
}

// Loads the packed weights of one step after the other, of all tiles.
template <typename Format>
class Ahead {
 public:
  using Memory = Packed<Format>;

  __device__ Ahead(const GroupedQuantizedParams& p, int steps, char* packed)
      : p_(p), walk_(p.rows), steps_(steps), packed_(shared_address(packed)), index_(static_cast<int>(blockIdx.x)) {
    begin_tile();
  }

  __device__ void copy() {
    if (there_) {
#pragma unroll
      for (int i = 0; i < Memory::kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < Memory::kVectors; ++j) {
          copy_async<Memory::kVector>(packed_ + Memory::place(slot_, i, j), from_[i] + j * Memory::kVector);
        }
        from_[i] += 2 * Memory::kUnitBytes;
      }
      slot_ = slot_ + 1 == Memory::kSteps ? 0 : slot_ + 1;
      if (++step_ == steps_) {
        index_ += static_cast<int>(gridDim.x);
        begin_tile();
      }
    }
    commit_copies();
  }

 private:
  // Tiles without weights are skipped.
  __device__ void begin_tile() {
    GroupTile tile;
    step_ = 0;
    there_ = walk_.find(index_, tile);
    while (there_ && tile.weights < 0) {
      index_ += static_cast<int>(gridDim.x);
      there_ = walk_.find(index_, tile);
    }
    if (there_) {
      const char* w = static_cast<const char*>(p_.w) + tile.weights * p_.w_distance + half_of() * Memory::kUnitBytes;
#pragma unroll
      for (int i = 0; i < Memory::kUnits; ++i) {
        from_[i] = w + row_of(p_.rows, tile, i) * p_.row_bytes;
      }
    }
  }

  const GroupedQuantizedParams& p_;
  GroupWalk<kRows, kColumns> walk_;
  const char* from_[Memory::kUnits];
  int steps_;
  unsigned packed_;
  int index_;
  int step_ = 0;
  int slot_ = 0;
  bool there_;
};

// The scales of a producer's values of a step.
template <typename Format, typename T>
struct StepScales {
  static constexpr int kOfUnit = kTwoScales<Format> ? 2 : 1;
  GroupScale<Format, T> groups[Packed<Format>::kUnits][kOfUnit];
};

// Where those of a tile are.
template <typename Format, typename T>
class TileScales {
 public:
  using Step = StepScales<Format, T>;

  __device__ TileScales(const GroupedQuantizedParams& p, const GroupTile& tile) : shift_(p.group_shift) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const long long place =
          tile.weights * p.scale_distance + static_cast<long long>(row_of(p.rows, tile, i)) * p.row_groups * kBytes;
      scales_[i] = static_cast<const char*>(p.scales) + place;
      biases_[i] = static_cast<const char*>(p.biases) + place;
    }
  }

  __device__ void load(int step, Step& to) const {
    const int group = (step * kDepth + half_of() * kUnit) >> shift_;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < Step::kOfUnit; ++j) {
        to.groups[i][j].load(scales_[i], biases_[i], group + j);
      }
    }
  }

 private:
  static constexpr int kUnits = Packed<Format>::kUnits;
  static constexpr int kBytes = Format::kBiased ? 2 : 1;
  const char* scales_[kUnits];
  const char* biases_[kUnits];
  int shift_;
};

// A producer's packed values of a step.
template <typename Format>
struct StepWords {
  using Memory = Packed<Format>;
  unsigned words[Memory::kUnits][Format::kBits];

  __device__ StepWords(const char* packed, int slot) {
#pragma unroll
    for (int i = 0; i < Memory::kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < Memory::kVectors; ++j) {
        load_words<Memory::kVector>(words[i] + j * Memory::kVector / 4, packed + Memory::place(slot, i, j));
      }
    }
  }
};

// To a stage: rows of 128 bytes, with TMA's swizzle.
template <typename Format, typename T>
__device__ inline void unpack_step(const StepWords<Format>& step, StepScales<Format, T>& scales, char* part) {
  constexpr int scales_of_unit = StepScales<Format, T>::kOfUnit;
#pragma unroll
  for (int i = 0; i < Packed<Format>::kUnits; ++i) {
#pragma unroll
    for (int j = 0; j < scales_of_unit; ++j) {
      scales.groups[i][j].expand();
    }
    const int row = i * (kProducers / 2) + static_cast<int>(threadIdx.x) / 2;
#pragma unroll
    for (int j = 0; j < kUnit / 8; ++j) {
      const uint2 piece = piece_in<Format::kBits>(step.words[i], j);
      const int chunk = (half_of() * 4 + j) ^ (row % 8);
      *reinterpret_cast<uint4*>(part + row * 128 + chunk * 16) =
          values_in_order<Format, T>(piece, scales.groups[i][j * scales_of_unit / 4]);
    }
  }
}

template <typename Format, typename T>
__device__ inline void produce(
    const GroupedQuantizedParams& p,
    int steps,
    const TensorMap* x,
    const TensorMap* few_x,
    char* packed,
    Ring<kColumns, kStages>& ring) {
  using Memory = Packed<Format>;
  Ahead<Format> ahead(p, steps, packed);
  for (int i = 0; i < Memory::kSteps - 1; ++i) {
    ahead.copy();
  }
  int slot = 0;
  GroupWalk<kRows, kColumns> walk(p.rows);
  GroupTile tile;
  for (int index = static_cast<int>(blockIdx.x); walk.find(index, tile); index += static_cast<int>(gridDim.x)) {
    if (tile.weights < 0) {
      continue;
    }
    const TileScales<Format, T> tile_scales(p, tile);
    StepScales<Format, T> next;
    tile_scales.load(0, next);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      StepScales<Format, T> scales = next;
      if (step + 1 < steps) {
        tile_scales.load(step + 1, next);
      }
      ahead.copy();
      wait_copies<Memory::kSteps - 1>();
      const StepWords<Format> words(packed, slot);
      slot = slot + 1 == Memory::kSteps ? 0 : slot + 1;
      ring.wait_empty();
      if (threadIdx.x == 0) {
        copy_rows(tile, step * kDepth, 0, x, few_x, ring);
      }
      unpack_step(words, scales, ring.weight_part());
      shared_writes_fence();
      __syncwarp();
      release(ring.full + ring.stage);
    }
  }
}

template <typename Format, typename T>
__device__ inline void grouped_quantized(const GroupedQuantizedParams& p, const TensorMap* x, const TensorMap* few_x) {
  extern __shared__ char memory[];
  Ring<kColumns, kStages> ring(memory);
  if (threadIdx.x == 0) {
    ring.init(1 + kProducers / 32, kConsumers * 4);
  }
  __syncthreads();
  const int steps = p.rows.depth / kDepth;
  // All warpgroups together may have the registers that they start with.
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  if (group < 0) {
    give_registers<120>();
    produce<Format, T>(p, steps, x, few_x, memory + Shape::kPackedAt, ring);
  } else {
    take_registers<192>();
    consume<T, kColumns, kStages, true>(p.rows, group, steps, ring);
  }
}

#define MLX_CUDA_GROUPED_QUANTIZED(name, dtype, format)                                           \
  extern "C" __global__ void __launch_bounds__(GroupedSm90Tile::kThreads, 1) name(                \
      const __grid_constant__ GroupedQuantizedParams params, const __grid_constant__ TensorMap x, \
      const __grid_constant__ TensorMap few_x) {                                                  \
    grouped_quantized<formats::format, types::dtype>(params, &x, &few_x);                         \
  }
MLX_CUDA_GROUPED_QUANTIZED_KERNELS(MLX_CUDA_GROUPED_QUANTIZED)

}  // namespace mlx_cuda
