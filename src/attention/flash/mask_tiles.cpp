#include "attention/flash/mask_tiles.h"

#include "attention/flash/mask_tiles_params.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

constexpr std::size_t kUnit = 256;  // bytes

}  // namespace

std::pair<FlashMask, mx::array> summarize_mask(
    const mx::array& mask, int tile_rows, int tile_keys, bool shifting, CommandEncoder& encoder, const mx::Stream& stream) {
  static KernelModule kernels("mask_tiles");
#define MLX_CUDA_MASK_ROW(name, type, dtype) {#name, {#dtype}},
  static constexpr auto table = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_MASK_STATES_KERNELS(MLX_CUDA_MASK_ROW)});
  const bool is_bool = mask.dtype() == mx::bool_;
  // Broadcast dimensions are read once.
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

  // One buffer for all of it: allocations cost more than their contents.
  std::size_t bytes = 0;
  auto reserve = [&](std::size_t count, std::size_t size) {
    const std::size_t at = bytes;
    bytes += ceil_div(count * size, kUnit) * kUnit;
    return at;
  };
  const std::size_t all_rows = static_cast<std::size_t>(batch) * params.heads * params.rows;
  const std::size_t all_row_tiles = static_cast<std::size_t>(batch) * params.heads * params.row_tiles;
  const bool shifts_rows = shifting && !is_bool;
  const std::size_t bits = reserve(is_bool ? all_rows * params.words : 0, sizeof(unsigned));
  const std::size_t states = reserve(all_row_tiles * params.key_tiles, 1);
  const std::size_t tiles = reserve(all_row_tiles * params.key_tiles, sizeof(int));
  const std::size_t counts = reserve(all_row_tiles, sizeof(int));
  const std::size_t peaks = reserve(shifts_rows ? all_rows * params.key_tiles : 0, sizeof(float));
  const std::size_t shifts = reserve(shifts_rows ? all_rows : 0, sizeof(float));
  mx::array room = temporary({static_cast<int>(bytes / kUnit), static_cast<int>(kUnit)}, mx::uint8, encoder, stream);

  KernelNode node(encoder);
  params.mask = node.reads(mask);
  auto* base = node.writes<unsigned char>(room);
  params.bits = reinterpret_cast<unsigned*>(base + bits);
  params.states = base + states;
  params.tiles = reinterpret_cast<int*>(base + tiles);
  params.counts = reinterpret_cast<int*>(base + counts);
  params.peaks = reinterpret_cast<float*>(base + peaks);
  params.shifts = shifts_rows ? reinterpret_cast<float*>(base + shifts) : nullptr;
  const auto sheets = static_cast<unsigned>(batch * params.heads);
  const auto row_tiles = static_cast<unsigned>(params.row_tiles);
  node.launch(
      kernels.function(kernel_for(table, is_bool ? "bool" : type_name(mask.dtype()))),
      dim3(static_cast<unsigned>(params.key_tiles), row_tiles, sheets), 256, 0, params);
  node.reads(room);
  node.writes(room);
  node.launch(kernels.function("mask_list"), dim3(1, row_tiles, sheets), 128, 0, params);

  FlashMask result{};
  result.values = is_bool ? nullptr : params.mask;
  std::copy_n(mask.strides().begin(), 4, result.strides);
  result.bits = is_bool ? params.bits : nullptr;
  result.tiles = params.tiles;
  result.tile_counts = params.counts;
  result.shifts = params.shifts;
  auto strides = [&](long long (&to)[3], long long rows, long long row) {
    to[0] = batch == 1 ? 0 : params.heads * rows * row;
    to[1] = params.heads == 1 ? 0 : rows * row;
    to[2] = params.rows == 1 ? 0 : row;
  };
  strides(result.bit_strides, params.rows, params.words);
  strides(result.tile_strides, params.row_tiles, params.key_tiles);
  strides(result.count_strides, params.row_tiles, 1);
  strides(result.shift_strides, params.rows, 1);
  return {result, room};
}

}  // namespace mlx_cuda
