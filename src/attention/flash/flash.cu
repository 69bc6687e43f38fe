// Attention of many queries with mma.sync, on any GPU from sm_80 on: the kernels, of which each is made for a range of head_dims.
#include "attention/flash/block.cuh"
#include "attention/flash/kernels.h"
#include "device/types.cuh"

namespace mlx_cuda {

template <typename T, FlashShape S>
__device__ inline void flash(const FlashParams& p) {
  extern __shared__ __align__(128) uint4 memory[];
  const Place place(p, blockIdx.x, S.rows(), S.keys);
  if (place.empty()) {
    return;
  }
  const Tiles tiles(p, place, S.general);
  const FlashBlock<T, S> block(p, place, memory);
  typename FlashBlock<T, S>::Sums sums;
  block.clear(sums);
  [[maybe_unused]] typename FlashBlock<T, S>::Queries held_queries;
  int i = tiles.first;
  Tile tile = tiles.next(i);
  if (i < tiles.last) {
    block.begin(tile.index, held_queries);
  }
  int stage = 0;
  while (i < tiles.last) {
    ++i;
    const Tile next = tiles.next(i);
    block.visit(tile, next, i >= tiles.last, stage, held_queries, sums);
    tile = next;
    stage = (stage + 1) % S.stages;
  }
  block.finish(sums);
}

}  // namespace mlx_cuda

#define MLX_CUDA_FLASH_KERNEL(name, dtype, ...)                                             \
  constexpr mlx_cuda::FlashShape name##_shape{__VA_ARGS__};                                 \
  extern "C" __global__ void __launch_bounds__(name##_shape.threads(), name##_shape.blocks) \
      name(const __grid_constant__ mlx_cuda::FlashParams params) {                          \
    mlx_cuda::flash<mlx_cuda::types::dtype, name##_shape>(params);                          \
  }
#define MLX_CUDA_FLASH_NONE(...)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
MLX_CUDA_FLASH_KERNELS(MLX_CUDA_FLASH_KERNEL, MLX_CUDA_FLASH_NONE)
#else
MLX_CUDA_FLASH_KERNELS(MLX_CUDA_FLASH_KERNEL, MLX_CUDA_FLASH_KERNEL)
#endif
