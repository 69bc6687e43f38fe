#include "attention/decode/plans.h"

#include "attention/decode/kernels.h"
#include "attention/decode/traits.h"
#include "runtime/kernel_table.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace mlx_cuda {

namespace {

constexpr int kFewestBlockKeys = 128;     // with fewer, merging costs more than the block gains
constexpr int kFewestRingKeys = 256;      // of a multiprocessor
constexpr int kFewestSplitKeys = 256;     // of one part in the direct kernel, or
constexpr int kFewSplitKeys = 128;        // where two waves of blocks have as many for all units: a tile for each warp
constexpr int kUnsplitKeys = 512;         // up to which one part is as fast, and needs no merge
constexpr int kMostMaskedKeys = 32768;    // of one part with a mask, whose bits are in shared memory
constexpr int kShortSpan = 2048 + 15;     // up to which many units are given blocks of half the size in the direct kernel
constexpr int kMostShortKeys = 2048;      // of units that two blocks of a multiprocessor share, and
constexpr int kMostHalfRows = 8;          // of these, unless each takes a whole unit
constexpr int kMostPartKeys = 8192;       // with more in a part, an idle multiprocessor costs more than a second part
constexpr int kQuantizedBlockKeys = 256;  // as many as beginning, ending and merging cost
constexpr int kBlockShared = 1024;        // bytes of shared memory that every block takes besides

int rounded_up(int value, int unit) {
  return ceil_div(value, unit) * unit;
}

constexpr auto kNarrowKernels =
    std::to_array<KernelRow<std::string_view, int, bool, Keys>>({MLX_CUDA_DECODE_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kMergeKernels =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_DECODE_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});
constexpr auto kDirectKernels =
    std::to_array<KernelRow<std::string_view, int, bool>>({MLX_CUDA_DIRECT_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kSm90Kernels = std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_DECODE_SM90_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kWideKernels = std::to_array<KernelRow<std::string_view, int, bool>>({MLX_CUDA_WIDE_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kQuantizedKernels =
    std::to_array<KernelRow<std::string_view, int, bool, int>>({MLX_CUDA_DECODE_QUANTIZED_KERNELS(MLX_CUDA_KERNEL_ROW)});

int rows_of(const DecodeProblem& problem) {
  return problem.sizes.group * problem.sizes.q_length;
}

std::int64_t units_of(const DecodeProblem& problem) {  // before rows are split
  return std::int64_t{problem.sizes.batch} * problem.sizes.kv_heads;
}

// The keys that a query may see, and how far the first tile may begin before them.
int longest_span(const DecodeProblem& problem) {
  const int length = problem.sizes.kv_length;
  const int keys = problem.sizes.window_left >= 0 ? std::min(length, problem.sizes.window_left + problem.sizes.q_length) : length;
  return keys + DirectTraits::kTileKeys - 1;
}

int widest(const DecodeProblem& problem) {
  return std::max(problem.sizes.head_dim, problem.sizes.value_dim);
}

DecodeTiling tiling_of(int tile_shift, int block_rows, int row_blocks) {
  return {
      .tile_keys = 1 << tile_shift, .tile_shift = tile_shift, .block_rows = block_rows, .row_blocks = row_blocks, .row_warps = 1};
}

// How many parts a unit is cut into. One wave of blocks; several where lengths differ, so that short rows do not leave
// multiprocessors idle for long.
SplitK split(const DecodeProblem& problem, std::int64_t wave) {
  const int span = longest_span(problem);
  const bool few = units_of(problem) * ceil_div(span, kFewSplitKeys) <= 2 * wave;
  const std::int64_t most = span <= kUnsplitKeys ? 1 : ceil_div<std::int64_t>(span, few ? kFewSplitKeys : kFewestSplitKeys);
  const std::int64_t least = problem.key_mask ? ceil_div<std::int64_t>(span, kMostMaskedKeys) : 1;
  const std::int64_t blocks = wave * (problem.ragged || problem.mask ? 4 : 1);
  const auto wanted = static_cast<int>(std::max(std::clamp<std::int64_t>(blocks / units_of(problem), 1, most), least));
  const int keys = rounded_up(ceil_div(span, wanted), 64);
  return {.keys = keys, .splits = ceil_div(span, keys)};
}

DecodePlan plan_direct(const DecodeProblem& problem) {
  const DirectTraits traits{problem.sizes.head_dim <= 64 ? 64 : 128};
  const int rows = rows_of(problem);
  const std::int64_t units = units_of(problem);
  const std::int64_t wave = std::int64_t{multiprocessors()} * traits.resident_blocks();
  const SplitK split_k = split(problem, wave);
  const int mask_bytes = problem.key_mask ? DirectTraits::mask_bytes(split_k.keys) : 0;
  // Of many short blocks, two of half the size hide one another's beginning and end.
  const bool halved = split_k.splits == 1 && units >= 2 * wave && longest_span(problem) <= kShortSpan;
  int warps = halved ? DirectTraits::kMostWarps / 2 : DirectTraits::kMostWarps;
  while (warps > 1 && result_bytes(warps * rows, traits.width) > shared_memory_limit() - mask_bytes) {
    warps /= 2;
  }
  DecodePlan plan{
      .engine = DecodeEngine::direct,
      .kernel = kernel_for(kDirectKernels, type_name(problem.dtype), traits.width, problem.key_mask),
      .grid = dim3(split_k.splits, problem.sizes.kv_heads, problem.sizes.batch),
      .warps = warps,
      .tiling = tiling_of(DirectTraits::kTileShift, rows, 1),
      .split_k = split_k,
  };
  plan.shared_bytes =
      std::max({result_bytes(warps * rows, traits.width), traits.query_bytes(), merge_bytes(warps * 32)}) + mask_bytes;
  if (split_k.splits > 1) {
    plan.merge = Merge::tickets;
    plan.partial_rows = split_k.splits * units * rows;
    plan.tickets = units;
  }
  return plan;
}

// The rows of one kv head, in as many equal blocks as needed.
DecodeTiling split_rows(int tile_shift, int rows, int most) {
  const int blocks = ceil_div(rows, most);
  return tiling_of(tile_shift, rounded_up(ceil_div(rows, blocks), kTileRows), blocks);
}

// How many blocks share the work.
struct Residency {
  int blocks = 1;      // of a multiprocessor
  bool whole = false;  // each block takes a whole unit instead
};

// Units that are all equal, many and short: two blocks of half the warps on an SM, of which one reads while the other starts or
// ends. In nearly full waves each takes a whole unit, without a merge.
Residency share_many(const DecodeProblem& problem) {
  if (problem.sizes.kv_length > kMostShortKeys) {
    return {};
  }
  const std::int64_t units = units_of(problem);
  const std::int64_t wave = std::int64_t{2} * multiprocessors();
  const bool whole = units * 10 >= ceil_div<std::int64_t>(units, wave) * wave * 9;
  const bool enough = rows_of(problem) <= kMostHalfRows && units * 4 >= wave * 7;
  return {.blocks = whole || enough ? 2 : 1, .whole = whole};
}

// The tiles of a unit, or the most that it may have where starts or ends make them differ.
std::int64_t most_tiles(const DecodeProblem& problem, int shift) {
  int first = 0;
  if (problem.sizes.window_left >= 0) {
    first = std::max(problem.sizes.kv_length - problem.sizes.q_length - problem.sizes.window_left, 0);
  }
  const int last = (problem.sizes.kv_length + (1 << shift) - 1) >> shift;
  return last - (first >> shift);
}

// Shares the tiles of all units out, and says how parts of units are merged: by `merge`, where there are any.
void share_tiles(DecodePlan& plan, const DecodeProblem& problem, Merge merge, const Residency& residency = {}) {
  const int shift = plan.tiling.tile_shift;
  const std::int64_t units = units_of(problem) * plan.tiling.row_blocks;
  const std::int64_t tiles = most_tiles(problem, shift);
  StreamK& work = plan.stream_k;
  work.fewest_tiles = static_cast<int>(std::min<std::int64_t>(kFewestBlockKeys >> shift, tiles));
  const std::int64_t resident = std::int64_t{multiprocessors()} * residency.blocks;
  const std::int64_t most = residency.whole ? units : std::min(resident, units * tiles / work.fewest_tiles);
  work.blocks = static_cast<int>(most);
  if (!problem.ragged) {
    work.unit_tiles = static_cast<unsigned>(tiles);
    // A block that has parts of two units loads queries and writes results twice: rather a few multiprocessors without any, unless
    // there is much to read.
    const std::int64_t parts = most / units;
    const bool much = merge == Merge::tickets && tiles << shift > parts * kMostPartKeys;
    if (parts * units * 8 >= most * 7 && !much) {
      work.blocks_per_unit = static_cast<unsigned>(parts);
      work.blocks = static_cast<int>(parts * units);
    }
    work.tiles_per_block = static_cast<unsigned>(units * tiles / work.blocks);
    work.longer_blocks = static_cast<unsigned>(units * tiles % work.blocks);
  }
  plan.grid = dim3(work.blocks);
  if (problem.ragged || units % work.blocks != 0) {
    const auto parts = static_cast<int>(work.blocks / units + 1);
    plan.merge = merge;
    plan.merge_groups = parts <= 6 ? 1 : std::min(parts / 4, 8);
    plan.partial_rows = 2 * static_cast<std::size_t>(work.blocks) * plan.tiling.block_rows;
    plan.tickets = merge == Merge::tickets ? units : 0;
  }
}

// Fewer warps than there might be where their results do not fit.
void fit_narrow(DecodePlan& plan, const NarrowTraits& traits, int rows, int most_warps) {
  const int row_warps = plan.tiling.row_warps;
  const int held = std::min(rows, plan.tiling.block_rows);
  for (int slices = std::max(most_warps / row_warps, 1); slices >= 1; --slices) {
    plan.warps = slices * row_warps;
    plan.shared_bytes =
        traits.query_bytes(plan.tiling.block_rows) +
        std::max({slices * traits.ring_bytes(), result_bytes(slices * held, traits.width), merge_bytes(plan.warps * 32)});
    if (plan.shared_bytes <= shared_memory_limit()) {
      return;
    }
  }
  throw Unavailable("[attention] The results of one block do not fit into shared memory.");
}

DecodePlan plan_narrow(const DecodeProblem& problem) {
  const NarrowTraits traits{widest(problem) <= 64 ? 64 : widest(problem) <= 128 ? 128 : 256};
  const int rows = rows_of(problem);
  const bool solo = rows <= kTileRows;
  const bool even = solo && !problem.paged && !problem.mask && !problem.ragged && problem.sizes.window_left < 0;
  const bool masked = problem.key_mask && traits.width == NarrowTraits::kWidest;  // narrower ones are the direct kernel's
  const Keys keys = problem.paged ? Keys::paged : masked ? Keys::masked : even ? Keys::even : Keys::plain;
  DecodePlan plan{
      .engine = DecodeEngine::narrow,
      .kernel = kernel_for(kNarrowKernels, type_name(problem.dtype), traits.width, !solo, keys),
      .tiling = split_rows(NarrowTraits::kTileShift, rows, solo ? kTileRows : traits.most_rows()),
  };
  plan.tiling.row_warps = plan.tiling.block_rows / kTileRows;
  Residency residency;
  if (even && traits.width <= 128 && traits.solo_warps() * traits.ring_bytes() + kBlockShared <= shared_memory_limit()) {
    residency = share_many(problem);
  }
  fit_narrow(plan, traits, rows, solo ? traits.solo_warps() / residency.blocks : traits.team_warps());
  share_tiles(plan, problem, solo ? Merge::tickets : Merge::kernel, residency);
  return plan;
}

DecodePlan plan_sm90(const DecodeProblem& problem) {
  const Sm90Traits traits{widest(problem) <= 64 ? 64 : 128};
  DecodePlan plan{
      .engine = DecodeEngine::sm90,
      .kernel = kernel_for(kSm90Kernels, type_name(problem.dtype), traits.width),
      .warps = Sm90Traits::kThreads / 32,
      .tiling = split_rows(Sm90Traits::kTileShift, rows_of(problem), Sm90Traits::kGroups * Sm90Traits::kGroupRows),
  };
  plan.tiling.row_warps = plan.tiling.block_rows <= Sm90Traits::kGroupRows ? 1 : Sm90Traits::kGroups;
  plan.shared_bytes = traits.shared_bytes(plan.tiling.row_warps);
  share_tiles(plan, problem, Merge::kernel);
  return plan;
}

DecodePlan plan_wide(const DecodeProblem& problem) {
  const int rows = rows_of(problem);
  for (int row_tiles = rows <= 16 ? 1 : rows <= 32 ? 2 : 4; row_tiles >= 1; row_tiles /= 2) {
    const WideTraits traits{row_tiles, problem.shared_values};
    for (int stages = WideTraits::kMostStages; stages >= 2; --stages) {
      const int bytes = traits.shared_bytes(stages, problem.sizes.head_dim, problem.sizes.value_dim);
      if (bytes > shared_memory_limit()) {
        continue;
      }
      const int block_rows = row_tiles * kTileRows;
      DecodePlan plan{
          .engine = DecodeEngine::wide,
          .kernel = kernel_for(kWideKernels, type_name(problem.dtype), block_rows, problem.shared_values),
          .warps = WideTraits::kWarps,
          .shared_bytes = bytes,
          .tiling = tiling_of(traits.tile_shift(), block_rows, ceil_div(rows, block_rows)),
          .stages = stages,
      };
      share_tiles(plan, problem, Merge::kernel);
      return plan;
    }
  }
  throw Unavailable("[attention] Heads this wide need more shared memory than this GPU has.");
}

}  // namespace

// Wide heads, and: units that are better cut into parts of their own, because of a mask, or because there is so little to read
// that an early start is worth more than a pipeline; then on Hopper rows of more than one tile.
DecodePlan plan_decode(const DecodeProblem& problem) {
  const bool one_tile = rows_of(problem) <= kTileRows;
  if (widest(problem) > NarrowTraits::kWidest) {
    return plan_wide(problem);
  }
  if (!problem.paged && one_tile && problem.sizes.head_dim == problem.sizes.value_dim &&
      problem.sizes.head_dim <= DirectTraits::kWidest) {
    const std::int64_t ring = std::int64_t{kFewestRingKeys} * multiprocessors();
    if (problem.mask || units_of(problem) * longest_span(problem) <= ring) {
      return plan_direct(problem);
    }
  }
  if (problem.copyable && !problem.paged && !one_tile && widest(problem) <= Sm90Traits::kWidest) {
    return plan_sm90(problem);
  }
  return plan_narrow(problem);
}

// The number of parts that fills the device best: whole waves of blocks, each with a fixed cost of so many keys.
DecodePlan plan_quantized(const DecodeProblem& problem, bool floats, int bits) {
  const QuantizedTraits traits{.width = widest(problem) <= 128 ? 128 : 256, .bits = bits};
  const int rows = rows_of(problem);
  const DecodeTiling tiling =
      tiling_of(DirectTraits::kTileShift, std::min(rows, QuantizedTraits::kRows), ceil_div(rows, QuantizedTraits::kRows));
  const std::int64_t units = units_of(problem) * tiling.row_blocks;
  const std::int64_t wave = std::int64_t{multiprocessors()} * traits.resident_blocks();
  const int span = longest_span(problem);
  const std::int64_t most = problem.ragged ? ceil_div(4 * wave, units) : ceil_div(2 * wave, units);
  int warps = QuantizedTraits::kMostWarps;
  const int at_once = warps * QuantizedTraits::kTileKeys;
  SplitK split_k{.keys = rounded_up(span, at_once), .splits = 1};
  std::int64_t least = 0;
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    const int keys = rounded_up(ceil_div(span, static_cast<int>(splits)), at_once);
    const std::int64_t waves = problem.ragged ? 1 : ceil_div(units * splits, wave);
    const std::int64_t cost = waves * (keys + kQuantizedBlockKeys);
    if (splits == 1 || cost < least) {
      least = cost;
      split_k = {.keys = keys, .splits = ceil_div(span, keys)};
    }
  }
  while (warps > 1 && QuantizedTraits::query_bytes(traits.width) + result_bytes(warps * tiling.block_rows, traits.width) >
                          shared_memory_limit()) {
    warps /= 2;
  }
  DecodePlan plan{
      .engine = DecodeEngine::quantized,
      .kernel = kernel_for(kQuantizedKernels, type_name(problem.dtype), traits.width, floats, bits),
      .grid = dim3(split_k.splits, problem.sizes.kv_heads * tiling.row_blocks, problem.sizes.batch),
      .warps = warps,
      .shared_bytes = QuantizedTraits::query_bytes(traits.width) +
                      std::max(result_bytes(warps * tiling.block_rows, traits.width), merge_bytes(warps * 32)),
      .tiling = tiling,
      .split_k = split_k,
  };
  if (split_k.splits > 1) {
    plan.merge = Merge::tickets;
    plan.partial_rows = split_k.splits * units * tiling.block_rows;
    plan.tickets = units;
  }
  return plan;
}

const char* source_of(DecodeEngine engine) {
  constexpr std::array sources{"decode_direct", "decode", "decode_sm90", "decode_wide", "decode_quantized"};
  return sources[static_cast<std::size_t>(engine)];
}

KernelModule& module_of(DecodeEngine engine) {
  static std::array<KernelModule, 5> modules{
      KernelModule(source_of(DecodeEngine::direct)), KernelModule(source_of(DecodeEngine::narrow)),
      KernelModule(source_of(DecodeEngine::sm90)), KernelModule(source_of(DecodeEngine::wide)),
      KernelModule(source_of(DecodeEngine::quantized))};
  return modules[static_cast<std::size_t>(engine)];
}

CUfunction merge_kernel(mlx::core::Dtype dtype) {
  return module_of(DecodeEngine::narrow).function(kernel_for(kMergeKernels, type_name(dtype)));
}

int merge_threads(const DecodePlan& plan, int value_dim) {
  // Four columns in a lane; groups take turns where there is much to merge.
  return rounded_up(value_dim, 128) / 4 * plan.merge_groups;
}

}  // namespace mlx_cuda
