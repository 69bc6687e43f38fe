#include "primitives/mask_tiles.h"

#include "kernels/mask_tiles.h"
#include "runtime/kernels.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <cstdint>
#include <string>

// Defined in the source that the build generates from kernels/mask_tiles.cu.
extern const std::uint64_t mlx_cuda_fatbin_mask_tiles[];

namespace mlx_cuda {

namespace {

int ceil_div(int value, int by) {
  return (value + by - 1) / by;
}

std::string kernel_name(mx::Dtype dtype) {
  if (dtype == mx::bool_) {
    return "mask_states_bool";
  }
  return dtype == mx::float16 ? "mask_states_float16" : dtype == mx::bfloat16 ? "mask_states_bfloat16" : "mask_states_float32";
}

}  // namespace

FlashMask summarize_mask(
    const mx::array& mask,
    int tile_rows,
    int tile_keys,
    std::vector<mx::array>& made,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  static KernelModule kernels(mlx_cuda_fatbin_mask_tiles);
  const bool is_bool = mask.dtype() == mx::bool_;
  // What is broadcast is looked at once.
  auto own = [&](int axis) { return mask.strides(axis) == 0 ? 1 : mask.shape(axis); };
  const int batch = own(0);

  MaskTilesParams params{};
  params.heads = own(1);
  params.rows = own(2);
  params.keys = mask.shape(3);
  params.tile_rows = tile_rows;
  params.tile_keys = tile_keys;
  params.row_tiles = ceil_div(params.rows, tile_rows);
  params.key_tiles = ceil_div(params.keys, tile_keys);
  params.words = ceil_div(params.key_tiles * tile_keys, 128) * 4;
  std::copy_n(mask.strides().begin(), 4, params.strides);

  auto make = [&](const mx::Shape& shape, mx::Dtype dtype) {
    mx::array out(shape, dtype, nullptr, {});
    allocate(out, stream);
    encoder.add_temporary(out);
    made.push_back(out);
    return out;
  };
  const mx::Shape grid{batch * params.heads, params.row_tiles, params.key_tiles};
  mx::array bits = make({batch * params.heads, is_bool ? params.rows : 1, is_bool ? params.words : 1}, mx::uint32);
  mx::array states = make(grid, mx::uint8);
  mx::array tiles = make(grid, mx::int32);
  mx::array counts = make({batch * params.heads, params.row_tiles}, mx::int32);

  encoder.set_input_array(mask);
  encoder.set_output_array(bits);
  encoder.set_output_array(states);
  params.mask = mx::gpu_ptr<void>(mask);
  params.bits = mx::gpu_ptr<unsigned>(bits);
  params.states = mx::gpu_ptr<unsigned char>(states);
  params.tiles = mx::gpu_ptr<int>(tiles);
  params.counts = mx::gpu_ptr<int>(counts);
  const auto sheets = static_cast<unsigned>(batch * params.heads);
  const auto row_tiles = static_cast<unsigned>(params.row_tiles);
  encoder.add_kernel_node_ex(
      kernels.function(kernel_name(mask.dtype())), dim3(static_cast<unsigned>(params.key_tiles), row_tiles, sheets), dim3(256),
      dim3(), 0, params);
  encoder.set_input_array(states);
  encoder.set_output_array(tiles);
  encoder.set_output_array(counts);
  encoder.add_kernel_node_ex(kernels.function("mask_list"), dim3(1, row_tiles, sheets), dim3(32), dim3(), 0, params);

  FlashMask result{};
  result.values = is_bool ? nullptr : params.mask;
  std::copy_n(mask.strides().begin(), 4, result.strides);
  result.bits = is_bool ? params.bits : nullptr;
  result.tiles = params.tiles;
  result.tile_counts = params.counts;
  auto strides = [&](long long (&to)[3], long long rows, long long row) {
    to[0] = batch == 1 ? 0 : params.heads * rows * row;
    to[1] = params.heads == 1 ? 0 : rows * row;
    to[2] = params.rows == 1 ? 0 : row;
  };
  strides(result.bit_strides, params.rows, params.words);
  strides(result.tile_strides, params.row_tiles, params.key_tiles);
  strides(result.count_strides, params.row_tiles, 1);
  return result;
}

}  // namespace mlx_cuda
