// The nodes of the small-M kernels.
#include "matmul/quantized/choice.h"
#include "matmul/quantized/kernels.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

KernelModule sm90_kernels("quantized_sm90");
KernelModule moe_kernels("quantized_moe_sm90");
KernelModule small_m_kernels("quantized_small_m");
KernelModule plain_kernels("quantized_plain");

constexpr auto kMergeKernels = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_QUANTIZED_MERGE_KERNELS(MLX_CUDA_KERNEL_ROW)});
#define MLX_CUDA_ORDER_ROW(name, format) {#name, {#format}},
constexpr auto kOrderKernels =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_QUANTIZED_SM90_KERNELS(MLX_CUDA_ORDER_ROW, MLX_CUDA_NO_ROW)});

// Parameters of all kernels.
void describe(const SmallMCall& call, QuantizedGemmParams& params) {
  const auto& [kernel, x, in, lhs, rhs, out, transpose, rows, batches, encoder, stream] = call;
  set_weights(params, in);
  params.x = mx::gpu_ptr<void>(x);
  params.out = mx::gpu_ptr<void>(out);
  params.x_index = lhs ? mx::gpu_ptr<unsigned>(*lhs) : nullptr;
  params.w_index = rhs ? mx::gpu_ptr<unsigned>(*rhs) : nullptr;
  params.x_row = *row_distance(x);
  params.x_distance = params.x_row * rows;
  params.row_bytes = in.row_bytes;
  params.rows = rows;
  params.columns = out.shape(-1);
  params.inner = x.shape(-1);
  params.matrices = static_cast<int>(x.size() / rows / params.inner);
  params.experts = in.weights.matrices();
  params.groups = in.weights.scales.shape(-1);
  params.wide = scales_are_wide(in.weights);
}

// Names the operands and the result as those of the next node.
void name_arrays(const SmallMCall& call) {
  KernelNode node(call.encoder);
  node.reads(call.x);
  name_inputs(call.in.weights, call.encoder);
  node.reads(call.lhs);
  node.reads(call.rhs);
  node.writes(call.out);
}

// Memory for the sums of so many splits; null: there is only one.
float* partial_sums(const SmallMCall& call, int splits) {
  return splits > 1 ? static_cast<float*>(workspace(call.out.size() * splits * sizeof(float), call.encoder, call.stream)) : nullptr;
}

// The sum of the splits' results [splits, batches, rows, columns], where there are several.
void encode_split_sum(const SmallMCall& call, const SplitKParams& params) {
  if (params.splits == 1) {
    return;
  }
  KernelNode node(call.encoder);
  node.reads(call.out);
  node.writes(call.out);
  const auto size = static_cast<long long>(call.out.size());
  node.launch(
      plain_kernels.function(kernel_for(kMergeKernels, type_name(call.out.dtype()))), divide_up(size, PlainKernel::kThreads),
      PlainKernel::kThreads, 0, params.partial, params.out, size, params.splits);
}

// Times in those of one range of a block.
constexpr double kStart = 5;              // of each block
constexpr double kMerge = 3;              // of adding the splits' sums
constexpr double kMergedResults = 1.0e6;  // that take one more

// Ranges of inner for each block, so that the last of all blocks is done soonest.
int ranges_of_a_block(std::int64_t blocks, int ranges, std::int64_t results) {
  int best = ranges;
  double least = 0;
  for (int splits = 1; splits <= ranges; ++splits) {
    const int share = divide_up(ranges, splits);
    if (splits > 1 && share == divide_up(ranges, splits - 1)) {
      continue;
    }
    const double merge = splits == 1 ? 0 : kMerge + static_cast<double>(results * splits) / kMergedResults;
    const double time = divide_up(blocks * splits, multiprocessors()) * (share + kStart) + merge;
    if (splits == 1 || time < least) {
      least = time;
      best = share;
    }
  }
  return best;
}

constexpr int kMostShared = 32 << 10;  // bytes of a block: with more, the L1 cache is too small for the scales
constexpr int kBatchRows = 4;
constexpr int kFewestShared = 9;         // pairs: the experts of one token are different
constexpr double kMostDifferent = 0.92;  // experts, of the pairs: with more, grouping costs more than it saves

constexpr int kLargeShared = 160 << 10;  // bytes of shared memory, from which on 16 warps fit

struct SmallMPlan {
  SmallMParams params{};
  int x_rows;        // in shared memory
  int column_tiles;  // of kTileRows
  int shared;        // bytes
};

// How many warps share a tile of w, how many tiles a block has at once, and of how many slices it keeps x.
void divide_work(SmallMPlan& plan, const SmallMCall& call) {
  SmallMParams& params = plan.params;
  const int slices = divide_up(params.inner, SmallMTile::kSlice);
  const int processors = multiprocessors();
  const int limit = shared_memory_limit();
  const bool one_tile = params.block_rows == 8;
  const bool four_tiles = params.block_rows == 32;
  const int rows = std::min(call.rows, params.block_rows);

  // Two blocks of 8 warps share a multiprocessor while x is small, else there is one of 16.
  const int warps = one_tile || limit < kLargeShared ? 8 : 16;
  const int x_bytes = std::min(one_tile ? 64 << 10 : 128 << 10, limit - warps * SmallMParams::warp_bytes(rows));
  const int most_slices = std::max(x_bytes / (2 * plan.x_rows * SmallMTile::kSlice), 1);
  int splits = divide_up(slices, most_slices);

  const std::int64_t row_tiles = static_cast<std::int64_t>(params.row_blocks) * call.batches;
  const bool many_tiles = plan.column_tiles * row_tiles * splits >= 2 * processors;
  // Fewer, longer blocks: slower alone, faster next to other kernels.
  const bool longer = one_tile && call.in.weights.bits == 4 && call.batches == 1;
  const int inner_warps = four_tiles ? 2 : many_tiles ? (longer ? 2 : 4) : warps;
  if (four_tiles) {  // x is shared by many rows of w, which few columns leave some multiprocessors without
    const std::int64_t blocks = divide_up(plan.column_tiles, warps / inner_warps) * row_tiles;
    splits = std::max(splits, std::min(static_cast<int>(processors / blocks), slices / inner_warps));
  }
  const int range = divide_up(slices, splits);
  const int turns = divide_up(range, std::min(inner_warps, range));
  params.inner_warps = divide_up(range, turns);
  params.row_warps = many_tiles || four_tiles ? std::clamp(warps / params.inner_warps, 1, SmallMParams::kMostRowWarps) : 1;
  params.range = range * SmallMTile::kSlice;
  params.splits = divide_up(slices, range);
  plan.shared = params.shared_bytes(rows, plan.x_rows);
}

// As many blocks as run at once: each keeps its x for all the tiles that it takes.
dim3 grid_of(const SmallMPlan& plan, const SmallMCall& call, int threads) {
  const int resident = std::max(std::min(shared_memory_limit() / plan.shared, SmallMParams::kMostThreads / threads), 1);
  const int height = plan.params.splits * plan.params.row_blocks;
  const std::int64_t others = static_cast<std::int64_t>(height) * call.batches;
  const auto most = std::max<std::int64_t>(multiprocessors() * resident / others, 1);
  const auto blocks = std::min<std::int64_t>(divide_up(plan.column_tiles, plan.params.row_warps), most);
  return dim3(static_cast<unsigned>(blocks), height, call.batches);
}

constexpr int kFewestInner = 64;  // of a split
constexpr int kMostSplits = 32;

void encode_sm90(const SmallMCall& call) {
  const auto& [kernel, x, in, lhs, rhs, out, transpose, rows, batches, encoder, stream] = call;
  const QuantizedSm90 shape{kernel.tile};
  QuantizedSm90Params params{};
  describe(call, params);
  params.block_rows = shape.block_rows;
  params.row_blocks = divide_up(rows, shape.block_rows);
  const int tiles = divide_up(params.columns, QuantizedSm90::kTileRows);
  const std::int64_t blocks = static_cast<std::int64_t>(tiles) * params.row_blocks * batches;
  const int ranges = divide_up(params.inner, QuantizedSm90::kRange);
  params.range = ranges_of_a_block(blocks, ranges, static_cast<std::int64_t>(out.size())) * QuantizedSm90::kRange;
  params.splits = divide_up(params.inner, params.range);

  const int eights = divide_up(rows, 8);
  const int parts = divide_up(params.inner, QuantizedSm90::kPart);
  params.ordered =
      workspace(static_cast<std::size_t>(batches) * eights * 8 * parts * QuantizedSm90::kPart * x.itemsize(), encoder, stream);
  if (params.splits > 1) {
    params.results = static_cast<int>(blocks);
    const std::size_t size = static_cast<std::size_t>(blocks) * params.splits * shape.block_rows * QuantizedSm90::kTileRows;
    params.partial = static_cast<float*>(workspace(size * sizeof(float), encoder, stream));
    params.arrived = static_cast<unsigned*>(workspace(params.results * sizeof(unsigned), encoder, stream));
  }

  KernelNode node(encoder);
  node.reads(x);
  node.reads(lhs);
  node.writes(out);  // stands for the workspaces, which are no arrays
  const dim3 order(divide_up(static_cast<std::int64_t>(parts) * eights, QuantizedSm90::kOrderWarps), batches);
  node.launch(
      sm90_kernels.function(kernel_for(kOrderKernels, format_name(in.weights))), order, QuantizedSm90::kOrderWarps * 32, 0, params);

  node.reads(out);
  name_inputs(in.weights, encoder);
  node.reads(rhs);
  node.writes(out);
  take_lane(encoder);
  node.launch(
      sm90_kernels.function(kernel.name), dim3(tiles, params.splits * params.row_blocks, batches), QuantizedSm90::kThreads,
      shape.shared_bytes(in.weights.bits), params);
}

void encode_moe(const SmallMCall& call) {
  const mx::array& scales = call.in.weights.scales;
  MoeParams params{};
  describe(call, params);
  params.row_scales = params.groups * static_cast<int>(scales.itemsize());
  params.pairs = call.batches;

  const int slices = params.inner / SmallMTile::kSlice;
  const int warps = divide_up(slices, divide_up(slices, MoeParams::kMostWarps));
  params.batch_rows = 1;
  if (params.pairs >= kFewestShared && different_experts(params.pairs, params.experts) < kMostDifferent) {
    params.batch_rows = kBatchRows;
    while (params.shared_bytes(warps) > kMostShared) {
      --params.batch_rows;
    }
  }
  const std::int64_t items = static_cast<std::int64_t>(params.pairs) * (params.columns / SmallMTile::kRows);
  const int blocks = multiprocessors() * std::min(divide_up(items, multiprocessors()), MoeParams::kBlocks);
  name_arrays(call);
  take_lane(call.encoder);
  KernelNode(call.encoder).launch(moe_kernels.function(call.kernel.name), blocks, warps * 32, params.shared_bytes(warps), params);
}

void encode_tensor_cores(const SmallMCall& call) {
  SmallMPlan plan{};
  SmallMParams& params = plan.params;
  describe(call, params);
  params.block_rows = call.kernel.tile;
  params.row_blocks = divide_up(call.rows, params.block_rows);
  const int rows = std::min(call.rows, params.block_rows);
  plan.x_rows = params.block_rows == 8 ? rows : divide_up(rows, 8) * 8;
  plan.column_tiles = divide_up(params.columns, SmallMTile::kRows);
  divide_work(plan, call);
  const int threads = params.row_warps * params.inner_warps * 32;
  params.partial = partial_sums(call, params.splits);
  name_arrays(call);
  take_lane(call.encoder);
  KernelNode(call.encoder)
      .launch(small_m_kernels.function(call.kernel.name), grid_of(plan, call, threads), threads, plan.shared, params);
  encode_split_sum(call, params);
}

void encode_plain(const SmallMCall& call) {
  const bool transpose = call.transpose;
  SplitKParams params{};
  describe(call, params);
  params.block_rows = call.kernel.tile;
  params.row_blocks = divide_up(call.rows, params.block_rows);
  const int column_blocks = divide_up(params.columns, transpose ? PlainKernel::kTransposedColumns : PlainKernel::kColumns);
  params.splits = 1;
  if (!transpose) {  // a block has many columns, so there may be few blocks
    const std::int64_t blocks = static_cast<std::int64_t>(column_blocks) * params.row_blocks * call.batches;
    const auto wanted = divide_up(8 * multiprocessors(), blocks);
    params.splits = std::clamp(wanted, 1, std::clamp(params.inner / kFewestInner, 1, kMostSplits));
  }
  params.range = divide_up(params.inner, params.splits);
  params.splits = divide_up(params.inner, params.range);
  params.partial = partial_sums(call, params.splits);
  name_arrays(call);
  take_lane(call.encoder);
  const dim3 grid(column_blocks, params.splits * params.row_blocks, call.batches);
  KernelNode(call.encoder).launch(plain_kernels.function(call.kernel.name), grid, PlainKernel::kThreads, 0, params);
  encode_split_sum(call, params);
}

}  // namespace

void encode_small_m(const SmallMCall& call) {
  switch (call.kernel.engine) {
    case SmallMEngine::sm90:
      return encode_sm90(call);
    case SmallMEngine::moe:
      return encode_moe(call);
    case SmallMEngine::small_m:
      return encode_tensor_cores(call);
    default:
      return encode_plain(call);
  }
}

}  // namespace mlx_cuda
