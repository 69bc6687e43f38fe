// How the decode kernels divide rows, keys and shared memory, for the planner and the device code.
#pragma once

namespace mlx_cuda {

inline constexpr int kTileRows = 16;  // of a tile of mma.m16n8k16

// Results in shared memory: rows of float32 that begin in different banks, and a maximum and a sum for each.
constexpr int result_pitch(int width) {
  return width + 4;
}
constexpr int result_bytes(int rows, int width) {
  return rows * (result_pitch(width) + 2) * 4;
}

// The work of threads that merge parts of a unit: four columns, a maximum and a sum for each.
constexpr int merge_bytes(int threads) {
  return threads * 6 * 4;
}

// Split-K from global memory straight to fragments (decode_direct.cu).
struct DirectTraits {
  static constexpr int kWidest = 128;  // head_dim
  static constexpr int kTileKeys = 16;
  static constexpr int kTileShift = 4;
  static constexpr int kMostWarps = 8;

  int width;  // head_dim rounded up: 64 or 128

  constexpr int resident_blocks() const {  // of a multiprocessor
    return width == 64 ? 2 : 1;
  }
  constexpr int query_bytes() const {
    return kTileRows * width * 2;
  }
  static constexpr int mask_bytes(int keys) {  // a word for each tile
    return keys / kTileKeys * 4;
  }
};

// Split-K, from quantized rows directly to fragments (decode_quantized.cu).
struct QuantizedTraits {
  static constexpr int kTileKeys = DirectTraits::kTileKeys;
  static constexpr int kRows = 8;       // of a block
  static constexpr int kMostWarps = 8;  // whose registers allow no more

  int width;  // head_dim rounded up: 128 or 256
  int bits;   // 4 or 8

  constexpr int resident_blocks() const {  // of a multiprocessor
    return width == 128 ? 2 : 1;
  }
  static constexpr int query_bytes(int width) {
    return kRows * width * 2;
  }
  constexpr int key_bytes() const {  // of a row that one of four lanes takes at once
    return width * bits / 32 < 16 ? width * bits / 32 : 16;
  }
  constexpr int value_bytes() const {  // of a row that one of eight lanes takes at once
    return width * bits / 64 < 16 ? width * bits / 64 : 16;
  }
};

// Stream-K, with tiles in pipeline stages (decode.cu).
struct NarrowTraits {
  static constexpr int kWidest = 256;  // head_dim
  static constexpr int kTileKeys = 16;
  static constexpr int kTileShift = 4;
  static constexpr int kStages = 3;

  int width;  // head_dim rounded up: 64, 128 or 256

  constexpr int solo_warps() const {  // of a block whose rows one warp holds
    return 1024 / width;
  }
  constexpr int team_warps() const {  // of a block with more rows
    return width == 64 ? 16 : width == 128 ? 12 : 8;
  }
  constexpr int most_rows() const {  // of such a block
    return width == 256 ? 64 : 128;
  }
  constexpr bool queries_in_registers() const {
    return width <= 128;
  }
  constexpr int query_bytes(int rows) const {
    return queries_in_registers() ? 0 : rows * width * 2;
  }
  constexpr int stage_bytes() const {  // keys and values
    return 2 * kTileKeys * width * 2;
  }
  constexpr int ring_bytes() const {
    return kStages * stage_bytes();
  }
};

// Stream-K with the bulk tensor copy engine and wgmma (decode_sm90.cu).
struct Sm90Traits {
  static constexpr int kWidest = 128;  // head_dim
  static constexpr int kTileKeys = 64;
  static constexpr int kTileShift = 6;
  static constexpr int kGroups = 2;  // consumer warpgroups, besides one producer
  static constexpr int kGroupRows = 64;
  static constexpr int kConsumers = kGroups * 128;  // threads
  static constexpr int kThreads = kConsumers + 128;

  int width;  // head_dim rounded up: 64 or 128

  // A multiple of kGroups and at least twice as many, and so few that both shared_bytes fit.
  constexpr int stages() const {
    return width == 64 ? 8 : 4;
  }
  constexpr int tile_bytes() const {  // of keys or values
    return kTileKeys * width * 2;
  }
  constexpr int query_bytes() const {  // of a warpgroup's rows
    return kGroupRows * width * 2;
  }
  constexpr int barrier_bytes() const {  // two for each stage
    return stages() * 2 * 8;
  }
  constexpr int shared_bytes(int row_groups) const {  // groups that share their rows also merge their results
    const int results = row_groups < kGroups ? result_bytes(kGroupRows, width) : 0;
    return stages() * 2 * tile_bytes() + row_groups * query_bytes() + barrier_bytes() + results;
  }
  constexpr bool fits() const {  // what Hopper gives a block
    return shared_bytes(1) <= 227 * 1024 && shared_bytes(2) <= 227 * 1024;
  }
};
static_assert(Sm90Traits{64}.fits() && Sm90Traits{128}.fits(), "too many stages for the shared memory of a block");

// Stream-K for head_dims over 256 (decode_wide.cu).
struct WideTraits {
  static constexpr int kWidest = 576;        // head_dim of queries and keys
  static constexpr int kWidestValues = 512;  // and of values: 64 columns for each warp
  static constexpr int kWarps = 8;
  static constexpr int kMostStages = 3;
  static constexpr int kLoads = kWidest / 32;  // 16-byte loads of the widest row by a quad

  int row_tiles;       // of 16 rows, of a block: 1, 2 or 4
  bool shared_values;  // they are the first columns of the keys, and there is room for larger tiles

  constexpr int tile_shift() const {
    return shared_values ? 6 : 5;
  }
  constexpr int tile_keys() const {
    return 1 << tile_shift();
  }
  constexpr int score_parts() const {  // of 8 keys
    return tile_keys() / 8;
  }
  constexpr int held_loads() const {  // of which the part of the queries is in registers
    return row_tiles == 1 ? 14 : row_tiles == 2 ? 8 : 0;
  }
  constexpr int shared_loads() const {
    return kLoads - held_loads();
  }
  static constexpr int key_pieces(int head_dim) {  // of 16 bytes, in a row
    return head_dim <= kWidest - 64 ? kWidest / 8 - 8 : kWidest / 8;
  }
  constexpr int value_pieces(int value_dim) const {  // of a stage's own rows of values
    return shared_values ? 0 : (value_dim + 63) / 64 * 8;
  }
  constexpr int stage_bytes(int head_dim, int value_dim) const {
    return tile_keys() * (key_pieces(head_dim) + value_pieces(value_dim)) * 16;
  }
  constexpr int weight_bytes() const {
    return row_tiles * kTileRows * tile_keys() * 2;
  }
  constexpr int peak_bytes() const {  // of each row: one of each part, and their maximum
    return row_tiles * kTileRows * (score_parts() + 1) * 4;
  }
  constexpr int query_bytes() const {
    return row_tiles * shared_loads() * 1024;
  }
  constexpr int shared_bytes(int stages, int head_dim, int value_dim) const {
    return weight_bytes() + peak_bytes() + query_bytes() + stages * stage_bytes(head_dim, value_dim);
  }
};

}  // namespace mlx_cuda
