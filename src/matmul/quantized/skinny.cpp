#include "matmul/quantized/kernels.h"
#include "matmul/quantized/skinny_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

constexpr int kLargeShared = 160 << 10;  // bytes of shared memory, from which on 16 warps have room

KernelModule& kernels() {
  static KernelModule module("quantized_skinny");
  return module;
}

struct SkinnyPlan {
  SkinnyParams params{};
  int x_rows;        // in shared memory
  int column_tiles;  // of kTileRows
  int shared;        // bytes
};

// How many warps share a tile of w, how many tiles a block has at once, and of how many slices it keeps x.
void divide_work(SkinnyPlan& plan, const SkinnyCall& call) {
  SkinnyParams& params = plan.params;
  const int slices = divide_up(params.inner, SkinnyTile::kSlice);
  const int processors = multiprocessors();
  const int limit = shared_memory_limit();
  const bool one_tile = params.block_rows == 8;
  const bool four_tiles = params.block_rows == 32;
  const int rows = std::min(call.rows, params.block_rows);

  // Two blocks of 8 warps share a multiprocessor while x is small, else there is one of 16.
  const int warps = one_tile || limit < kLargeShared ? 8 : 16;
  const int x_bytes = std::min(one_tile ? 64 << 10 : 128 << 10, limit - warps * SkinnyParams::warp_bytes(rows));
  const int most_slices = std::max(x_bytes / (2 * plan.x_rows * SkinnyTile::kSlice), 1);
  int splits = divide_up(slices, most_slices);

  const std::int64_t row_tiles = static_cast<std::int64_t>(params.row_blocks) * call.products;
  const bool many_tiles = plan.column_tiles * row_tiles * splits >= 2 * processors;
  // Fewer, longer blocks, which end later alone and sooner beside others.
  const bool longer = one_tile && call.in.weights.bits == 4 && call.products == 1;
  const int inner_warps = four_tiles ? 2 : many_tiles ? (longer ? 2 : 4) : warps;
  if (four_tiles) {  // x is shared by many rows of w, which few columns leave some multiprocessors without
    const std::int64_t blocks = divide_up(plan.column_tiles, warps / inner_warps) * row_tiles;
    splits = std::max(splits, std::min(static_cast<int>(processors / blocks), slices / inner_warps));
  }
  const int range = divide_up(slices, splits);
  const int turns = divide_up(range, std::min(inner_warps, range));
  params.inner_warps = divide_up(range, turns);
  params.row_warps = many_tiles || four_tiles ? std::clamp(warps / params.inner_warps, 1, SkinnyParams::kMostRowWarps) : 1;
  params.range = range * SkinnyTile::kSlice;
  params.splits = divide_up(slices, range);
  plan.shared = params.shared_bytes(rows, plan.x_rows);
}

// As many blocks as run at once: each keeps its x for all the tiles that it takes.
dim3 grid_of(const SkinnyPlan& plan, const SkinnyCall& call, int threads) {
  const int resident = std::max(std::min(shared_memory_limit() / plan.shared, SkinnyParams::kMostThreads / threads), 1);
  const int height = plan.params.splits * plan.params.row_blocks;
  const std::int64_t others = static_cast<std::int64_t>(height) * call.products;
  const auto most = std::max<std::int64_t>(multiprocessors() * resident / others, 1);
  const auto blocks = std::min<std::int64_t>(divide_up(plan.column_tiles, plan.params.row_warps), most);
  return dim3(static_cast<unsigned>(blocks), height, call.products);
}

}  // namespace

void encode_skinny(const SkinnyCall& call) {
  SkinnyPlan plan{};
  SkinnyParams& params = plan.params;
  call.describe(params);
  params.block_rows = call.kernel.tile;
  params.row_blocks = divide_up(call.rows, params.block_rows);
  const int rows = std::min(call.rows, params.block_rows);
  plan.x_rows = params.block_rows == 8 ? rows : divide_up(rows, 8) * 8;
  plan.column_tiles = divide_up(params.columns, SkinnyTile::kRows);
  divide_work(plan, call);
  const int threads = params.row_warps * params.inner_warps * 32;
  params.partial = call.partial(params.splits);
  call.name_arrays();
  take_lane(call.encoder);
  call.encoder.add_kernel_node_ex(
      kernels().function(call.kernel.name), grid_of(plan, call, threads), dim3(threads), dim3(), static_cast<unsigned>(plan.shared),
      params);
  encode_split_sum(call, params);
}

}  // namespace mlx_cuda
