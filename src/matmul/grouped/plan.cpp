#include "matmul/grouped/plan.h"

#include "matmul/grouped/kernels.h"
#include "matmul/grouped/params.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/status.h"
#include "runtime/tensor_map.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

namespace mlx_cuda {

namespace {

KernelModule portable_kernels("grouped");
KernelModule gather_kernels("gather");
KernelModule sm90_kernels("grouped_sm90");
KernelModule sm90_gradient_kernels("grouped_gradient_sm90");

constexpr auto kPortable =
    std::to_array<KernelRow<std::string_view, bool>>({MLX_CUDA_GROUPED_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kSm90 =
    std::to_array<KernelRow<std::string_view, int, int, bool>>({MLX_CUDA_GROUPED_SM90_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kPortableGradient =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_GROUPED_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});
constexpr auto kSm90Gradient = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_GROUPED_GRADIENT_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kGatherMv = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_GATHER_MV_KERNELS(MLX_CUDA_KERNEL_ROW)});

#define MLX_CUDA_TILE(columns, stages, ...) GroupedSm90Tile{columns, stages},
constexpr GroupedSm90Tile kSm90Tiles[] = {MLX_CUDA_GROUPED_SM90_TILES(MLX_CUDA_TILE, )};
#undef MLX_CUDA_TILE

// The wide tiles read the least, but there have to be enough of them: all groups end with an incomplete one.
const GroupedSm90Tile& sm90_tile(int rows, int groups, int columns) {
  const int row_tiles = rows / GroupedSm90Tile::kRows + std::min(rows, groups);
  return *std::find_if(std::begin(kSm90Tiles), std::end(kSm90Tiles) - 1, [&](const GroupedSm90Tile& tile) {
    return static_cast<std::int64_t>(row_tiles) * ceil_div(columns, tile.columns) >= multiprocessors();
  });
}

// Whether 16 bytes at a time can be read along an axis; the copy engine takes no distance of 0 between rows and none below.
bool readable_along(const mx::array& in, int axis) {
  const auto size = static_cast<std::int64_t>(in.itemsize());
  for (int other = 0; other < static_cast<int>(in.ndim()); ++other) {
    if (other != axis && in.shape(other) > 1 && (in.strides(other) <= 0 || in.strides(other) * size % 16 != 0)) {
      return false;
    }
  }
  return (in.strides(axis) == 1 || in.shape(axis) == 1) && in.shape(axis) * size % 16 == 0 && on_16_bytes(in);
}

mx::array exchanged(const mx::array& w) {
  return view(w, {w.shape(0), w.shape(2), w.shape(1)}, {w.strides(0), w.strides(2), w.strides(1)}, false);
}

int depth_axis(bool transpose) {
  return transpose ? 2 : 1;
}

// As many blocks as fit on the GPU at once stay for all tiles.
template <typename Params>
void launch_portable(KernelNode& node, const std::string& name, const Params& params) {
  constexpr unsigned shared = GroupedTile::kSharedBytes;
  const CUfunction kernel = portable_kernels.function(name);
  int blocks = 0;
  MLX_CUDA_CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, GroupedTile::kThreads, shared));
  node.launch(kernel, std::max(blocks, 1) * multiprocessors(), GroupedTile::kThreads, shared, params);
}

// Common parts of GatherParams and GatherMvParams.
template <typename Params>
void describe(Params& params, const GatherPairs& pairs, KernelNode& node) {
  const mx::array& x = pairs.x;
  params.x = node.reads(x);
  params.rhs = node.reads<unsigned>(pairs.rhs);
  params.lhs = node.reads<unsigned>(pairs.lhs);
  params.matrix_rows = x.shape(-2);
  params.matrices = static_cast<int>(x.size() / (std::size_t(x.shape(-1)) * x.shape(-2)));
  params.repeats = std::max(pairs.count() / params.matrices, 1);
}

// The order of pairs by group, which is written together with the offsets.
mx::array encode_order(
    const GatherPairs& pairs, int groups, mx::array& offsets, CommandEncoder& encoder, const mx::Stream& stream) {
  constexpr int held = 48 * 1024 - 128;  // bytes of shared memory that every block may have
  const int bytes = (groups + 1) * static_cast<int>(sizeof(int));
  mx::array order = temporary({pairs.count()}, mx::int32, encoder, stream);
  MaybeArray counts;
  if (bytes > held) {
    counts = temporary({groups + 1}, mx::int32, encoder, stream);
  }
  KernelNode node(encoder);
  GatherParams params{};
  params.rhs = node.reads<unsigned>(pairs.rhs);
  params.offsets = node.writes<int>(offsets);
  params.order = node.writes<int>(order);
  params.counts = counts ? node.writes<int>(*counts) : nullptr;
  params.pairs = pairs.count();
  params.groups = groups;
  params.matrix_rows = pairs.x.shape(-2);
  node.launch(gather_kernels.function("group_pairs"), 1, GroupPairs::kThreads, counts ? 0 : bytes, params);
  return order;
}

}  // namespace

bool is_read_not_transposed(const mx::array& w, bool transpose) {
  return !readable_along(w, depth_axis(transpose)) && readable_along(w, depth_axis(!transpose));
}

bool is_gather_mv(int rows, int groups, bool not_transposed) {
  // So few that most have weights of their own, or that grouping takes longer than reading weights again from the L2 cache.
  return !not_transposed && (rows <= 16 || (rows <= 64 && rows * 2 <= groups));
}

KernelName gather_mv_kernel(mx::Dtype dtype) {
  return {"gather", kernel_for(kGatherMv, type_name(dtype))};
}

KernelName grouped_kernel(int rows, int groups, int columns, bool not_transposed, mx::Dtype dtype) {
  if (!is_hopper()) {
    return {"grouped", kernel_for(kPortable, type_name(dtype), !not_transposed)};
  }
  const GroupedSm90Tile& tile = sm90_tile(rows, groups, columns);
  return {"grouped_sm90", kernel_for(kSm90, type_name(dtype), tile.columns, tile.stages, !not_transposed)};
}

GroupedWeights as_weights(const mx::array& w, bool transpose, CommandEncoder& encoder, const mx::Stream& stream) {
  if (is_read_not_transposed(w, transpose)) {
    return {transpose ? exchanged(w) : w, true};
  }
  const mx::array by_columns = transpose ? w : exchanged(w);
  return {readable_along(by_columns, 2) ? by_columns : contiguous_copy(by_columns, encoder, stream), false};
}

mx::array as_rows(const mx::array& x, CommandEncoder& encoder, const mx::Stream& stream) {
  return readable_along(x, 1) ? x : contiguous_copy(x, encoder, stream);
}

void encode_offsets(const mx::array& indices, int matrix_rows, int groups, mx::array& offsets, CommandEncoder& encoder) {
  KernelNode node(encoder);
  GatherParams params{};
  params.rhs = node.reads<unsigned>(indices);
  params.offsets = node.writes<int>(offsets);
  params.pairs = static_cast<int>(indices.size());
  params.groups = groups;
  params.matrix_rows = matrix_rows;
  node.launch(gather_kernels.function("find_offsets"), params.pairs / 256 + 1, 256, 0, params);
}

GroupedRows group_rows(const GatherPairs& pairs, int groups, bool sorted, CommandEncoder& encoder, const mx::Stream& stream) {
  const mx::array& x = pairs.x;
  const int depth = x.shape(-1);
  const int rows = pairs.rows();
  mx::array offsets = temporary({groups + 1}, mx::int32, encoder, stream);
  MaybeArray order;
  if (sorted) {
    encode_offsets(pairs.rhs, x.shape(-2), groups, offsets, encoder);
    if (!pairs.lhs && static_cast<std::size_t>(rows) * depth == x.size()) {
      return {view(x, {rows, depth}), std::move(offsets), std::nullopt, true};
    }
  } else {
    order = encode_order(pairs, groups, offsets, encoder, stream);
  }
  mx::array grouped = temporary({rows, depth}, x.dtype(), encoder, stream);
  MaybeArray out_rows;
  if (order) {
    out_rows = temporary({rows}, mx::int32, encoder, stream);
  }
  KernelNode node(encoder);
  GatherParams params{};
  params.order = order ? const_cast<int*>(node.reads<int>(*order)) : nullptr;
  params.out_rows = out_rows ? node.writes<int>(*out_rows) : nullptr;
  describe(params, pairs, node);
  params.grouped_x = node.writes(grouped);
  params.pairs = pairs.count();
  params.groups = groups;
  params.row_units = depth * static_cast<int>(x.itemsize()) / 16;
  node.launch(gather_kernels.function("gather_rows"), ceil_div(rows, 8), 256, 0, params);
  return {std::move(grouped), std::move(offsets), std::move(out_rows), true};
}

void encode_grouped(
    const GroupedRows& rows, const GroupedWeights& weights, int first, int groups, mx::array& out, CommandEncoder& encoder) {
  const mx::array& w = weights.array;
  KernelNode node(encoder);
  GroupedParams params{
      .offsets = node.reads<int>(rows.offsets),
      .out_rows = node.reads<int>(rows.out_rows),
      .out = node.writes(out),
      .x = node.reads(rows.x),
      .weights = node.reads(w),
      .x_stride = rows.x.strides(0),
      .weight_row = w.strides(1),
      .weight_matrix = w.strides(0),
      .has_begin = rows.has_begin,
      .groups = groups,
      .first = first,
      .count = w.shape(0),
      .rows = rows.x.shape(0),
      .columns = weights.columns(),
      .depth = rows.x.shape(1),
  };
  const KernelName kernel = grouped_kernel(params.rows, groups, params.columns, weights.not_transposed, w.dtype());
  if (!is_hopper()) {
    launch_portable(node, kernel.name, params);
    return;
  }
  const GroupedSm90Tile& tile = sm90_tile(params.rows, groups, params.columns);
  node.launch(
      sm90_kernels.function(kernel.name), multiprocessors(), tile.kThreads, tile.shared_bytes(), params,
      matrix_tensor_map(rows.x, tile.kRows), matrix_tensor_map(rows.x, tile.kFewRows),
      matrix_tensor_map(w, weights.not_transposed ? tile.kDepth : tile.columns));
}

void encode_grouped_gradient(const GroupedRows& rows, const mx::array& y, int groups, mx::array& out, CommandEncoder& encoder) {
  KernelNode node(encoder);
  const GroupedGradientParams params{
      .offsets = node.reads<int>(rows.offsets),
      .x = node.reads(rows.x),
      .y = node.reads(y),
      .out = node.writes(out),
      .x_stride = rows.x.strides(0),
      .y_stride = y.strides(0),
      .has_begin = rows.has_begin,
      .groups = groups,
      .rows = y.shape(0),
      .rows_out = y.shape(1),
      .columns = rows.x.shape(1),
  };
  if (!is_hopper()) {
    launch_portable(node, kernel_for(kPortableGradient, type_name(y.dtype())), params);
    return;
  }
  constexpr GroupedSm90Tile tile = kGroupedGradientSm90;
  node.launch(
      sm90_gradient_kernels.function(kernel_for(kSm90Gradient, type_name(y.dtype()))), multiprocessors(), tile.kThreads,
      tile.shared_bytes(), params, matrix_tensor_map(rows.x, tile.kDepth), matrix_tensor_map(y, tile.kDepth));
}

void encode_gather_mv(const GatherPairs& pairs, const GroupedWeights& weights, mx::array& out, CommandEncoder& encoder) {
  const mx::array& w = weights.array;
  KernelNode node(encoder);
  GatherMvParams params{};
  describe(params, pairs, node);
  params.weights = node.reads(w);
  params.out = node.writes(out);
  params.weight_row = w.strides(1);
  params.weight_matrix = w.strides(0);
  params.groups = w.shape(0);
  params.columns = weights.columns();
  params.depth = pairs.x.shape(-1);
  const dim3 grid(pairs.rows(), ceil_div(params.columns, GatherMv::kBlockColumns));
  node.launch(gather_kernels.function(gather_mv_kernel(w.dtype()).name), grid, GatherMv::kThreads, 0, params);
}

}  // namespace mlx_cuda
