#include "matmul/grouped/plan.h"

#include "matmul/grouped/params.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace mlx_cuda {

namespace {

constexpr int kTileRows = 128;
constexpr int kUnit = 8;    // elements of 16 bytes
constexpr int kChunk = 64;  // of 128, which the copy engine moves as one row

// Of the kernels for Hopper; the same numbers as at the end of matmul/grouped/grouped_sm90.cu.
struct HopperTile {
  int columns;
  int stages;

  unsigned shared() const {
    return static_cast<unsigned>(stages * (kTileRows + columns) * kChunk * 2 + 1024 + 2 * stages * 8);  // as Ring::kBytes
  }
};
constexpr std::array<HopperTile, 3> kHopperTiles{{{256, 4}, {128, 6}, {64, 8}}};
constexpr int kFewRows = 16;  // of a box for tiles of few rows

constexpr HopperTile kGradientTile{128, 6};                 // the same numbers as in matmul/grouped/grouped_weights_sm90.cu
constexpr unsigned kPortableShared = 3 * (128 + 128) * 64;  // kStages * kStageBytes of matmul/grouped/grouped.cu
constexpr unsigned kPortableThreads = 128;
constexpr unsigned kHopperThreads = 384;

KernelModule& portable_kernels() {
  static KernelModule module("grouped");
  return module;
}
KernelModule& row_kernels() {
  static KernelModule module("grouped_rows");
  return module;
}
KernelModule& hopper_kernels() {
  static KernelModule module("grouped_sm90");
  return module;
}
KernelModule& hopper_gradient_kernels() {
  static KernelModule module("grouped_weights_sm90");
  return module;
}

int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  mx::array out(shape, dtype, nullptr, {});
  allocate(out, stream);
  encoder.add_temporary(out);
  return out;
}

// The wide tiles read the least, but there have to be enough of them: all groups end with an incomplete one.
const HopperTile& hopper_tile(int rows, int groups, int columns) {
  const std::int64_t row_tiles = rows / kTileRows + std::min(rows, groups);
  const std::int64_t wanted = multiprocessors();
  return *std::find_if(kHopperTiles.begin(), kHopperTiles.end() - 1, [&](const HopperTile& tile) {
    return row_tiles * ceil_div(columns, tile.columns) >= wanted;
  });
}

// Boxes of 64 columns; dimensions from the innermost.
CUtensorMap tensor_map(const mx::array& in, int box_rows) {
  const auto size = static_cast<std::uint64_t>(in.itemsize());
  std::array<std::uint64_t, 4> sizes{1, 1, 1, 1};
  std::array<std::uint64_t, 3> strides{16, 16, 16};  // in bytes, of all but the innermost; any where there is one element
  for (int i = 0; i < static_cast<int>(in.ndim()); ++i) {
    sizes[i] = static_cast<std::uint64_t>(in.shape(-1 - i));
    if (i > 0 && sizes[i] > 1) {
      strides[i - 1] = static_cast<std::uint64_t>(in.strides(-1 - i)) * size;
    }
  }
  const std::array<std::uint32_t, 4> box{kChunk, static_cast<std::uint32_t>(box_rows), 1, 1};
  const std::array<std::uint32_t, 4> steps{1, 1, 1, 1};
  const auto type = in.dtype() == mx::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  MLX_CUDA_CHECK(cuTensorMapEncodeTiled(
      &map, type, 4, const_cast<void*>(mx::gpu_ptr<void>(in)), sizes.data(), strides.data(), box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

// As many blocks as fit on the GPU at once stay for all tiles.
template <typename Params>
void encode_portable(const std::string& name, Params& params, mx::cu::CommandEncoder& encoder) {
  const CUfunction kernel = portable_kernels().function(name);
  int blocks = 0;
  MLX_CUDA_CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kPortableThreads, kPortableShared));
  encoder.add_kernel_node_ex(
      kernel, dim3(static_cast<unsigned>(std::max(blocks, 1) * multiprocessors())), dim3(kPortableThreads), dim3(), kPortableShared,
      params);
}

mx::array transposed_view(const mx::array& w) {
  mx::array view({w.shape(0), w.shape(2), w.shape(1)}, w.dtype(), nullptr, {});
  view.copy_shared_buffer(w, {w.strides(0), w.strides(2), w.strides(1)}, {false, false, false}, w.data_size());
  return view;
}

// Whether rows can be copied by units of 16 bytes; the copy engine takes no distance of 0 between them and none below.
bool aligned(const mx::array& in) {
  for (int axis = 0; axis < static_cast<int>(in.ndim()) - 1; ++axis) {
    if (in.shape(axis) > 1 && in.strides(axis) <= 0) {
      return false;
    }
  }
  return rows_readable(in) && in.shape(-1) * in.itemsize() % 16 == 0;
}

int pairs_of(const mx::array& rhs) {
  return static_cast<int>(rhs.size());
}

// What GatherParams and GroupedFewParams have in common.
template <typename Params>
void describe_pairs(
    Params& params,
    const mx::array& x,
    const std::optional<mx::array>& lhs,
    const mx::array& rhs,
    mx::cu::CommandEncoder& encoder) {
  encoder.set_input_array(x);
  encoder.set_input_array(rhs);
  if (lhs) {
    encoder.set_input_array(*lhs);
    params.lhs = mx::gpu_ptr<unsigned>(*lhs);
  }
  params.rhs = mx::gpu_ptr<unsigned>(rhs);
  params.x = mx::gpu_ptr<void>(x);
  params.matrix_rows = x.shape(-2);
  params.matrices = static_cast<int>(x.size() / (std::size_t(x.shape(-1)) * x.shape(-2)));
  params.repeats = std::max(pairs_of(rhs) / params.matrices, 1);
}

// Where the rows of each group begin, of rising indices of matrices of `matrix_rows` rows.
void find_offsets(const mx::array& indices, int matrix_rows, int groups, mx::array& offsets, mx::cu::CommandEncoder& encoder) {
  GatherParams params{};
  encoder.set_input_array(indices);
  encoder.set_output_array(offsets);
  params.rhs = mx::gpu_ptr<unsigned>(indices);
  params.offsets = mx::gpu_ptr<int>(offsets);
  params.pairs = pairs_of(indices);
  params.groups = groups;
  params.matrix_rows = matrix_rows;
  encoder.add_kernel_node_ex(
      row_kernels().function("find_offsets"), dim3(static_cast<unsigned>(params.pairs / 256 + 1)), dim3(256), dim3(), 0, params);
}

}  // namespace

GroupedWeights as_weights(const mx::array& w, bool transpose, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  const mx::array exchanged = transposed_view(w);
  const mx::array& by_columns = transpose ? w : exchanged;  // [count, columns, depth]
  const mx::array& by_depth = transpose ? exchanged : w;
  if (aligned(by_columns)) {
    return {by_columns, false};
  }
  if (aligned(by_depth)) {
    return {by_depth, true};
  }
  return {contiguous_copy(by_columns, encoder, stream), false};
}

mx::array as_rows(const mx::array& x, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  return aligned(x) ? x : contiguous_copy(x, encoder, stream);
}

GroupedRows group_rows(
    const mx::array& x,
    const std::optional<mx::array>& lhs,
    const mx::array& rhs,
    int groups,
    bool sorted,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  const int pairs = pairs_of(rhs);
  const int depth = x.shape(-1);
  const int rows = pairs * x.shape(-2);
  GatherParams params{};
  params.pairs = pairs;
  params.groups = groups;
  params.row_units = depth / kUnit;
  mx::array offsets = temporary({groups + 1}, mx::int32, encoder, stream);
  params.offsets = mx::gpu_ptr<int>(offsets);

  std::optional<mx::array> order;
  if (sorted) {
    find_offsets(rhs, x.shape(-2), groups, offsets, encoder);
    if (!lhs && static_cast<std::size_t>(rows) * depth == x.size()) {
      mx::array as_they_are({rows, depth}, x.dtype(), nullptr, {});
      as_they_are.copy_shared_buffer(x, {depth, 1}, {true, true, false}, x.size());
      return {std::move(as_they_are), std::move(offsets), std::nullopt, true};
    }
  } else {
    order = temporary({pairs}, mx::int32, encoder, stream);
    params.order = mx::gpu_ptr<int>(*order);
    constexpr int held = 48 * 1024 - 128;  // bytes of shared memory that every block may have
    const int bytes = (groups + 1) * static_cast<int>(sizeof(int));
    std::optional<mx::array> counts;
    if (bytes > held) {
      counts = temporary({groups + 1}, mx::int32, encoder, stream);
      params.counts = mx::gpu_ptr<int>(*counts);
    }
    describe_pairs(params, x, lhs, rhs, encoder);
    encoder.set_output_array(offsets);
    encoder.set_output_array(*order);
    if (counts) {
      encoder.set_output_array(*counts);
    }
    encoder.add_kernel_node_ex(
        row_kernels().function("group_pairs"), dim3(1), dim3(1024), dim3(), static_cast<std::uint32_t>(counts ? 0 : bytes), params);
  }

  mx::array grouped = temporary({rows, depth}, x.dtype(), encoder, stream);
  params.grouped_x = mx::gpu_ptr<void>(grouped);
  std::optional<mx::array> out_rows;
  if (order) {
    out_rows = temporary({rows}, mx::int32, encoder, stream);
    params.out_rows = mx::gpu_ptr<int>(*out_rows);
    encoder.set_input_array(*order);
    encoder.set_output_array(*out_rows);
  }
  describe_pairs(params, x, lhs, rhs, encoder);
  encoder.set_output_array(grouped);
  encoder.add_kernel_node_ex(
      row_kernels().function("gather_rows"), dim3(static_cast<unsigned>(ceil_div(rows, 8))), dim3(256), dim3(), 0, params);
  return {std::move(grouped), std::move(offsets), std::move(out_rows), true};
}

void encode_offsets(const mx::array& indices, int groups, mx::array& offsets, mx::cu::CommandEncoder& encoder) {
  find_offsets(indices, 1, groups, offsets, encoder);
}

void encode_grouped(
    const GroupedRows& rows,
    const GroupedWeights& weights,
    int first,
    int groups,
    mx::array& out,
    mx::cu::CommandEncoder& encoder) {
  const mx::array& w = weights.array;
  GroupedParams params{};
  encoder.set_input_array(rows.x);
  encoder.set_input_array(rows.offsets);
  encoder.set_input_array(w);
  if (rows.out_rows) {
    encoder.set_input_array(*rows.out_rows);
    params.out_rows = mx::gpu_ptr<int>(*rows.out_rows);
  }
  encoder.set_output_array(out);
  params.offsets = mx::gpu_ptr<int>(rows.offsets);
  params.x = mx::gpu_ptr<void>(rows.x);
  params.weights = mx::gpu_ptr<void>(w);
  params.out = mx::gpu_ptr<void>(out);
  params.x_stride = rows.x.strides(0);
  params.weight_row = w.strides(1);
  params.weight_matrix = w.strides(0);
  params.has_begin = rows.has_begin;
  params.groups = groups;
  params.first = first;
  params.count = w.shape(0);
  params.rows = rows.x.shape(0);
  params.columns = weights.columns();
  params.depth = rows.x.shape(1);

  const std::string prefix = std::string("grouped_") + type_name(w.dtype());
  const std::string suffix = weights.turned ? "_turned" : "";
  if (!is_hopper()) {
    encode_portable(prefix + suffix, params, encoder);
    return;
  }
  const HopperTile& tile = hopper_tile(params.rows, groups, params.columns);
  CUtensorMap x_map = tensor_map(rows.x, kTileRows);
  CUtensorMap few_x_map = tensor_map(rows.x, kFewRows);
  CUtensorMap w_map = tensor_map(w, weights.turned ? kChunk : tile.columns);
  encoder.add_kernel_node_ex(
      hopper_kernels().function(prefix + "_" + std::to_string(tile.columns) + suffix),
      dim3(static_cast<unsigned>(multiprocessors())), dim3(kHopperThreads), dim3(), tile.shared(), params, x_map, few_x_map, w_map);
}

void encode_grouped_gradient(
    const GroupedRows& rows, const mx::array& y, int groups, mx::array& out, mx::cu::CommandEncoder& encoder) {
  encoder.set_input_array(rows.x);
  encoder.set_input_array(rows.offsets);
  encoder.set_input_array(y);
  encoder.set_output_array(out);
  GroupedWeightsParams params{};
  params.offsets = mx::gpu_ptr<int>(rows.offsets);
  params.x = mx::gpu_ptr<void>(rows.x);
  params.y = mx::gpu_ptr<void>(y);
  params.out = mx::gpu_ptr<void>(out);
  params.x_stride = rows.x.strides(0);
  params.y_stride = y.strides(0);
  params.has_begin = rows.has_begin;
  params.groups = groups;
  params.rows = y.shape(0);
  params.rows_out = y.shape(1);
  params.columns = rows.x.shape(1);
  const std::string name = std::string("grouped_weights_") + type_name(y.dtype());
  if (!is_hopper()) {
    encode_portable(name, params, encoder);
    return;
  }
  CUtensorMap x_map = tensor_map(rows.x, kChunk);
  CUtensorMap y_map = tensor_map(y, kChunk);
  encoder.add_kernel_node_ex(
      hopper_gradient_kernels().function(name), dim3(static_cast<unsigned>(multiprocessors())), dim3(kHopperThreads), dim3(),
      kGradientTile.shared(), params, x_map, y_map);
}

bool few_takes(const mx::array& x, const mx::array& rhs, const GroupedWeights& weights) {
  const std::size_t rows = rhs.size() * x.shape(-2);
  const auto groups = static_cast<std::size_t>(weights.array.shape(0));
  // So few that each mostly has weights of its own, or that grouping them takes longer than reading weights again from the L2
  // cache. H200: 64 rows of 128 groups of 2048 x 2048 take 112 us, in groups 139.
  const bool few = rows <= 16 || (rows <= 64 && rows * 2 <= groups);
  return few && !weights.turned && aligned(weights.array);
}

void encode_grouped_few(
    const mx::array& x,
    const std::optional<mx::array>& lhs,
    const mx::array& rhs,
    const GroupedWeights& weights,
    mx::array& out,
    mx::cu::CommandEncoder& encoder) {
  GroupedFewParams params{};
  describe_pairs(params, x, lhs, rhs, encoder);
  encoder.set_input_array(weights.array);
  encoder.set_output_array(out);
  params.weights = mx::gpu_ptr<void>(weights.array);
  params.out = mx::gpu_ptr<void>(out);
  params.weight_row = weights.array.strides(1);
  params.weight_matrix = weights.array.strides(0);
  params.groups = weights.array.shape(0);
  params.columns = weights.columns();
  params.depth = x.shape(-1);
  const auto rows = static_cast<unsigned>(pairs_of(rhs) * params.matrix_rows);
  constexpr int block_columns = 8 * 4;  // kColumns of each warp
  encoder.add_kernel_node_ex(
      row_kernels().function(std::string("grouped_few_") + type_name(x.dtype())),
      dim3(rows, static_cast<unsigned>(ceil_div(params.columns, block_columns))), dim3(256), dim3(), 0, params);
}

}  // namespace mlx_cuda
