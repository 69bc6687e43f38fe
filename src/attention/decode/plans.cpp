#include "attention/decode/plans.h"

#include <algorithm>
#include <stdexcept>

namespace mlx_cuda {

namespace {

constexpr int kTileRows = 16;
constexpr int kFewestKeys = 128;  // of one worker: fewer do not pay for merging
constexpr int kWidestNarrow = 256;
constexpr int kWidestDirect = 128;
constexpr int kWidestSm90 = 128;
constexpr int kFewestRingKeys = 256;    // of a multiprocessor
constexpr int kFewestSplitKeys = 256;   // of one part in the direct kernel
constexpr int kUnsplitKeys = 512;       // up to which one part is as fast, and nothing has to be merged
constexpr int kMostMaskedKeys = 32768;  // of one part with a mask, whose bits lie in shared memory
constexpr int kShortSpan = 2048 + 15;
constexpr int kMostShortKeys = 2048;  // of units that two blocks of a multiprocessor share, and
constexpr int kMostHalfRows = 8;      // of these, unless each takes a whole unit
constexpr int kMostPartKeys =
    8192;  // of a worker's part of one unit: with more, an idle multiprocessor costs more than a second part
constexpr int kBlockShared = 1024;  // bytes of shared memory that every block takes besides
constexpr int kMergeShared = 24;    // bytes that merging parts takes for each thread

KernelModule& kernels() {
  static KernelModule module("decode");
  return module;
}

KernelModule& sm90_kernels() {
  static KernelModule module("decode_sm90");
  return module;
}

KernelModule& direct_kernels() {
  static KernelModule module("decode_direct");
  return module;
}

KernelModule& wide_kernels() {
  static KernelModule module("decode_wide");
  return module;
}

int rounded_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// The keys that a query may see, and how far the first tile may begin before them.
int longest_span(const DecodeParams& params) {
  const int keys = params.window_left >= 0 ? std::min(params.kv_length, params.window_left + params.q_length) : params.kv_length;
  return keys + kTileRows - 1;
}

// Whether each unit is better cut into parts of its own: a mask says where the keys are, or there is so little to read that
// beginning sooner is worth more than the ring.
bool is_direct(const DecodeParams& params, const DecodeTraits& traits) {
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
  const bool takes = !params.table && params.head_dim == params.value_dim && params.head_dim <= kWidestDirect &&
                     params.group * params.q_length <= kTileRows;
  return takes && (traits.mask || units * longest_span(params) <= std::int64_t{kFewestRingKeys} * multiprocessors());
}

// One wave of blocks; several where lengths differ, so that short rows do not leave multiprocessors idle for long.
DecodePlan plan_direct(DecodeParams& params, const DecodeTraits& traits) {
  const int width = params.head_dim <= 64 ? 64 : 128;
  params.tile_shift = 4;
  params.block_rows = params.group * params.q_length;
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
  const std::int64_t blocks = std::int64_t{multiprocessors()} * (width == 64 ? 2 : 1);
  const int span = longest_span(params);
  const std::int64_t most = span <= kUnsplitKeys ? 1 : (span + kFewestSplitKeys - 1) / kFewestSplitKeys;
  const std::int64_t least = traits.one_mask ? (span + kMostMaskedKeys - 1) / kMostMaskedKeys : 1;
  const bool uneven = traits.ragged || traits.mask;
  const auto wanted = static_cast<int>(std::max(std::clamp<std::int64_t>(blocks * (uneven ? 4 : 1) / units, 1, most), least));
  params.chunk = rounded_up((span + wanted - 1) / wanted, 64);
  params.splits = (span + params.chunk - 1) / params.chunk;

  const int bits = traits.one_mask ? params.chunk / kTileRows * static_cast<int>(sizeof(unsigned)) : 0;
  const int limit = shared_memory_limit() - bits;
  DecodePlan plan{
      .module = &direct_kernels(), .family = "direct_", .kernel = std::to_string(width) + (traits.one_mask ? "_masked" : "")};
  plan.grid = dim3(params.splits, params.kv_heads, params.batch);
  // Of many short blocks, two of half the size hide one another's beginning and end.
  plan.warps = params.splits == 1 && units >= 2 * blocks && span <= kShortSpan ? 4 : 8;
  auto results = [&] { return plan.warps * params.block_rows * (width + 6) * static_cast<int>(sizeof(float)); };
  while (plan.warps > 1 && results() > limit) {
    plan.warps /= 2;
  }
  plan.shared = std::max({results(), kTileRows * width * 2, plan.warps * 32 * kMergeShared}) + bits;
  if (params.splits > 1) {
    plan.slots = params.splits * units * params.block_rows;
    plan.tickets = units;
  }
  return plan;
}

// The rows of one kv head, in as many equal blocks as needed.
void split_rows(DecodeParams& params, int rows, int most) {
  params.row_blocks = (rows + most - 1) / most;
  params.block_rows = rounded_up((rows + params.row_blocks - 1) / params.row_blocks, kTileRows);
}

// How the kernels for units that are all alike share them where these are many and short: two blocks of half the warps on a
// multiprocessor, of which one reads while the other begins or ends. In nearly full waves each takes a whole unit, so that nothing
// has to be merged.
void share_many(const DecodeParams& params, DecodePlan& plan) {
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
  const std::int64_t wave = std::int64_t{2} * multiprocessors();
  const bool few_rows = params.group * params.q_length <= kMostHalfRows;
  if (params.kv_length <= kMostShortKeys) {
    plan.whole = units * 10 >= (units + wave - 1) / wave * wave * 9;
    plan.resident = plan.whole || (few_rows && units * 4 >= wave * 7) ? 2 : 1;
  }
}

// The same numbers as in attention/decode/decode.cu.
DecodePlan plan_narrow(DecodeParams& params, const DecodeTraits& traits) {
  constexpr int stages = 3;
  const int widest = std::max(params.head_dim, params.value_dim);
  const int width = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  const int rows = params.group * params.q_length;
  const bool solo = rows <= kTileRows;
  const int team_warps = width == 64 ? 16 : width == 128 ? 12 : 8;
  split_rows(params, rows, solo ? kTileRows : width == 256 ? 64 : 128);
  params.row_warps = params.block_rows / kTileRows;
  params.tile_shift = 4;

  const int queries = width <= 128 ? 0 : params.block_rows * width * 2;  // otherwise in registers
  const int held = std::min(rows, params.block_rows);
  const int limit = shared_memory_limit();
  DecodePlan plan{.module = &kernels(), .family = "decode_"};
  const bool even = solo && !params.table && !traits.mask && !traits.ragged && params.window_left < 0;
  const int solo_warps = 1024 / width;
  if (even && width <= 128 && solo_warps * stages * width * 64 + kBlockShared <= limit) {
    share_many(params, plan);
  }
  plan.kernel = std::to_string(width) + (solo ? "" : "_rows");
  plan.kernel += params.table ? "_paged" : traits.one_mask ? "_masked" : even ? "_even" : "";
  const int most_warps = solo ? solo_warps / plan.resident : team_warps;
  for (int slices = std::max(most_warps / params.row_warps, 1); slices >= 1; --slices) {
    const int ring = slices * stages * width * 64;
    const int results = slices * held * (width + 6) * static_cast<int>(sizeof(float));
    plan.warps = slices * params.row_warps;
    plan.shared = queries + std::max({ring, results, plan.warps * 32 * kMergeShared});
    if (plan.shared <= limit) {
      plan.tickets = solo;
      return plan;
    }
  }
  throw std::runtime_error("[attention] The results of one block do not fit into shared memory.");
}

// Whether the kernel for Hopper takes a call: rows of more than one tile of 16.
bool is_sm90(const DecodeParams& params, const DecodeTraits& traits) {
  return traits.copyable && !params.table && params.group * params.q_length > kTileRows &&
         std::max(params.head_dim, params.value_dim) <= kWidestSm90;
}

// The same numbers as in attention/decode/decode_sm90.cu.
DecodePlan plan_sm90(DecodeParams& params) {
  constexpr int keys = 64;
  constexpr int group_rows = 64;
  constexpr int groups = 2;
  const int width = std::max(params.head_dim, params.value_dim) <= 64 ? 64 : 128;
  const int stages = 512 / width;
  split_rows(params, params.group * params.q_length, groups * group_rows);
  params.row_warps = params.block_rows <= group_rows ? 1 : groups;
  params.tile_shift = 6;
  DecodePlan plan{.module = &sm90_kernels(), .family = "decode_", .kernel = std::to_string(width) + "_rows"};
  plan.warps = (groups + 1) * 4;
  plan.maps = keys;
  const int results = params.row_warps == 1 ? group_rows * (width + 6) * 4 : 0;
  plan.shared = stages * 2 * keys * width * 2 + params.row_warps * group_rows * width * 2 + stages * 16 + results;
  return plan;
}

// The same numbers as in attention/decode/decode_wide.cu.
DecodePlan plan_wide(DecodeParams& params) {
  constexpr int warps = 8;
  constexpr int most_stages = 3;
  constexpr int loads = 18;  // of 32 elements, in the widest row
  const int rows = params.group * params.q_length;
  const int limit = shared_memory_limit();
  params.tile_shift = params.shared_values ? 6 : 5;
  params.row_warps = 1;
  const int tile = 1 << params.tile_shift;
  const int key_bytes = (params.head_dim <= 512 ? 512 : 576) * 2;
  const int stage = tile * (key_bytes + (params.shared_values ? 0 : rounded_up(params.value_dim, 64) * 2));
  for (int row_tiles = rows <= 16 ? 1 : rows <= 32 ? 2 : 4; row_tiles >= 1; row_tiles /= 2) {
    const int held_loads = row_tiles == 1 ? 14 : row_tiles == 2 ? 8 : 0;  // in registers
    const int weights = tile / 16 * 512;
    const int peaks = (tile / 8 + 1) * 64;
    const int fixed = row_tiles * (weights + peaks + (loads - held_loads) * 1024);
    for (params.stages = most_stages; params.stages >= 2; --params.stages) {
      if (const int shared = fixed + params.stages * stage; shared <= limit) {
        params.block_rows = row_tiles * kTileRows;
        params.row_blocks = (rows + params.block_rows - 1) / params.block_rows;
        DecodePlan plan{.module = &wide_kernels(), .family = "wide_", .kernel = std::to_string(params.block_rows)};
        plan.kernel += params.shared_values ? "_shared" : "";
        plan.warps = warps;
        plan.shared = shared;
        return plan;
      }
    }
  }
  throw std::runtime_error("[attention] Heads this wide need more shared memory than this GPU has.");
}

// The tiles of a unit, or the most that it may have where starts or ends make them differ.
std::int64_t most_tiles(const DecodeParams& params) {
  int first = 0;
  if (params.window_left >= 0) {
    first = std::max(params.kv_length - params.q_length - params.window_left, 0);
  }
  const int last = (params.kv_length + params.tile_keys - 1) >> params.tile_shift;
  return last - (first >> params.tile_shift);
}

// Shares the tiles of all units out: to the blocks that are resident at once, unless each takes a whole unit.
void share(DecodeParams& params, DecodePlan& plan, bool ragged) {
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads * params.row_blocks;
  const std::int64_t tiles = most_tiles(params);
  params.fewest_tiles = static_cast<int>(std::min<std::int64_t>(kFewestKeys >> params.tile_shift, tiles));
  const std::int64_t blocks = std::int64_t{multiprocessors()} * plan.resident;
  const std::int64_t most = plan.whole ? units : std::min(blocks, units * tiles / params.fewest_tiles);
  params.workers = static_cast<int>(most);
  if (!ragged) {
    params.unit_tiles = static_cast<int>(tiles);
    // A worker that has parts of two units loads queries and writes results twice: rather a few multiprocessors without any, unless
    // there is much to read.
    const std::int64_t parts = most / units;
    const bool much = plan.tickets > 0 && tiles << params.tile_shift > parts * kMostPartKeys;
    if (parts * units * 8 >= most * 7 && !much) {
      params.parts = static_cast<int>(parts);
      params.workers = static_cast<int>(parts * units);
    }
    params.quota = static_cast<unsigned>(units * tiles / params.workers);
    params.extra = static_cast<unsigned>(units * tiles % params.workers);
  }
  const auto parts = static_cast<int>(params.workers / units + 1);
  params.merge_groups = parts <= 6 ? 1 : std::min(parts / 4, 8);
  plan.grid = dim3(params.workers);
  if (ragged || units % params.workers != 0) {
    plan.slots = 2 * static_cast<std::size_t>(params.workers) * params.block_rows;
    plan.tickets = plan.tickets > 0 ? units : 0;
  } else {
    plan.tickets = 0;
  }
}

}  // namespace

DecodePlan plan_decode(DecodeParams& params, const DecodeTraits& traits) {
  DecodePlan plan;
  if (is_direct(params, traits)) {
    plan = plan_direct(params, traits);
    params.tile_keys = 1 << params.tile_shift;
    return plan;
  }
  const bool wide = std::max(params.head_dim, params.value_dim) > kWidestNarrow;
  plan = wide ? plan_wide(params) : is_sm90(params, traits) ? plan_sm90(params) : plan_narrow(params, traits);
  params.tile_keys = 1 << params.tile_shift;
  share(params, plan, traits.ragged);
  return plan;
}

CUfunction decode_merge(const std::string& dtype) {
  return kernels().function("decode_" + dtype + "merge");
}

int decode_merge_threads(const DecodeParams& params) {
  // Four columns in a lane; they take turns where there is much to merge.
  return rounded_up(params.value_dim, 128) / 4 * params.merge_groups;
}

}  // namespace mlx_cuda
