// FlashAttention on Hopper (arXiv:2205.14135, arXiv:2407.08608) with wgmma and TMA.
//
// A block has 64 rows of queries for each of its consumer warpgroups, which share the tiles of keys and values that one producer
// warp loads into two stages. While the scores of the next tile are computed, the tensor cores accumulate the last tile's
// weighted values. Tiles that a window, lengths or a mask hide from all rows are never loaded; only partly masked tiles need
// masking. The biased kernels have tiles of an additive mask in the stages as well.
#include "attention/flash/consumer_sm90.cuh"
#include "attention/flash/kernels.h"
#include "attention/flash/ring_sm90.cuh"
#include "attention/flash/tiles.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

struct Maps {
  const TensorMap* queries;
  const TensorMap* keys;
  const TensorMap* values;
  const TensorMap* bias;
};

// Rows of one head, in chunks of columns.
template <typename Traits>
__device__ inline void copy_rows(char* to, const TensorMap* map, Barrier* full, int row, int head, int batch, int rows) {
  barrier_expect(full, rows * Traits::kHeadDim * 2);
#pragma unroll
  for (int chunk = 0; chunk < Traits::kHeadDim / Traits::kChunk; ++chunk) {
    copy_box(to + chunk * rows * 128, map, full, chunk * Traits::kChunk, row, head, batch);
  }
}

// A mask that is the same for all rows has one in the box.
template <typename Traits>
__device__ inline void copy_bias(
    const FlashParams& p, const Place& place, const Shared<Traits>& shared, const TensorMap* map, int stage, int key) {
  const bool own_rows = p.mask.strides[2] != 0;
  Barrier* full = shared.bias_full + stage;
  barrier_expect(full, (own_rows ? Traits::kRows : 1) * Traits::kKeys * 2);
#pragma unroll
  for (int chunk = 0; chunk < Traits::kKeys / Traits::kChunk; ++chunk) {
    copy_box(
        shared.bias + stage * Traits::kBiasBytes + chunk * Traits::kRows * 128, map, full, key + chunk * Traits::kChunk,
        own_rows ? place.row0 : 0, p.mask.strides[1] != 0 ? place.head : 0, p.mask.strides[0] != 0 ? place.batch : 0);
  }
}

template <typename Traits>
__device__ inline void produce(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<Traits>& shared,
    const Maps& maps,
    Turn<Traits>& turn) {
  if (tiles.first >= tiles.last) {
    return;
  }
  const int kv_head = place.head / (p.heads / p.kv_heads);
  const int q_batch = p.cu_q ? 0 : place.batch;
  const int kv_batch = p.cu_k ? 0 : place.batch;
  barrier_wait(shared.queries_empty, turn.block % 2 ^ 1);
  copy_rows<Traits>(
      shared.queries, maps.queries, shared.queries_full, place.q_offset + place.row0, place.head, q_batch, Traits::kRows);
  ++turn.block;
  for (int i = tiles.first; i < tiles.last; ++i, ++turn.tile) {
    const int stage = turn.stage();
    const int key0 = place.first_key(tiles[i].index, Traits::kKeys);
    auto copy = [&](char* to, const TensorMap* map, Barrier* full, Barrier* empty) {
      barrier_wait(empty + stage, turn.parity() ^ 1);
      copy_rows<Traits>(
          to + stage * Traits::kTileBytes, map, full + stage, place.k_offset + key0, kv_head, kv_batch, Traits::kKeys);
    };
    copy(shared.keys, maps.keys, shared.keys_full, shared.keys_empty);
    if constexpr (Traits::kBiased) {
      barrier_wait(shared.bias_empty + stage, turn.parity() ^ 1);
      copy_bias(p, place, shared, maps.bias, stage, key0);
    }
    copy(shared.values, maps.values, shared.values_full, shared.values_empty);
  }
}

// Visits the pieces of this block: with a block for each piece that is one, otherwise the copies of the next begin while one is
// written.
template <typename Traits, typename Visit>
__device__ inline void for_each_piece(const FlashParams& p, Visit&& visit) {
  const int pieces = p.heads * p.batch * row_tiles_of(p, Traits::kRows);
  for (int piece = static_cast<int>(blockIdx.x); piece < pieces; piece += static_cast<int>(gridDim.x)) {
    const Place place(p, piece, Traits::kRows, Traits::kKeys);
    if (!place.empty()) {
      visit(place, Tiles(p, place, Traits::kGeneral || Traits::kBiased));
    }
  }
}

template <typename Traits>
__device__ inline void flash(const FlashParams& p, const Maps& maps) {
  extern __shared__ char memory[];
  const Shared<Traits> shared(memory);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  Turn<Traits> turn;
  if (group < 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      for_each_piece<Traits>(
          p, [&](const Place& place, const Tiles& tiles) { produce<Traits>(p, place, tiles, shared, maps, turn); });
    }
  } else {
    take_registers<Traits::kConsumerRegisters>();
    const Order<Traits::kGroups> order(group);
    for_each_piece<Traits>(
        p, [&](const Place& place, const Tiles& tiles) { consume<Traits>(p, place, tiles, shared, order, turn); });
  }
}

#define MLX_CUDA_FLASH_MAP const __grid_constant__ TensorMap
#define MLX_CUDA_FLASH_KERNEL(name, dtype, kind, ...)                                                  \
  using name##_traits = Traits<types::dtype, FlashSm90Shape{__VA_ARGS__}, FlashKind::kind>;            \
  extern "C" __global__ void __launch_bounds__(name##_traits::kThreads, 1) name(                       \
      const __grid_constant__ FlashParams params, MLX_CUDA_FLASH_MAP queries, MLX_CUDA_FLASH_MAP keys, \
      MLX_CUDA_FLASH_MAP values MLX_CUDA_FLASH_PARAMETERS_##kind) {                                    \
    flash<name##_traits>(params, {&queries, &keys, &values, MLX_CUDA_FLASH_BIAS_##kind});              \
  }
#define MLX_CUDA_FLASH_PARAMETERS_plain
#define MLX_CUDA_FLASH_PARAMETERS_capped
#define MLX_CUDA_FLASH_PARAMETERS_general
#define MLX_CUDA_FLASH_PARAMETERS_biased , MLX_CUDA_FLASH_MAP bias
#define MLX_CUDA_FLASH_BIAS_plain nullptr
#define MLX_CUDA_FLASH_BIAS_capped nullptr
#define MLX_CUDA_FLASH_BIAS_general nullptr
#define MLX_CUDA_FLASH_BIAS_biased &bias
MLX_CUDA_FLASH_SM90_KERNELS(MLX_CUDA_FLASH_KERNEL)

}  // namespace mlx_cuda
