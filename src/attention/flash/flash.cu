// Attention of many queries with mma.sync, on any GPU from sm_80 on: the kernels, of which each is made for a range of head_dims.
#include "attention/flash/block.cuh"

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_FLASH_BODY(...) mlx_cuda::flash<__VA_ARGS__>(params);
#else
#define MLX_CUDA_FLASH_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

#define MLX_CUDA_FLASH_KERNEL(name, WARPS, BLOCKS, ...)                                                                         \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) name(const __grid_constant__ mlx_cuda::FlashParams params) { \
    MLX_CUDA_FLASH_BODY(__VA_ARGS__)                                                                                            \
  }

// `BLOCKS` blocks are to fit on one multiprocessor; the other numbers stand in attention/flash/primitive.cpp too. Kernels that take
// masks and a softcap need more registers, so that the others are there as well where it is felt.
#define MLX_CUDA_FLASH(name, BLOCKS, T, D, DV, KEYS, WARPS, ...) \
  MLX_CUDA_FLASH_KERNEL(flash_##name, WARPS, BLOCKS, T, D, DV, KEYS, WARPS, __VA_ARGS__)

// In place of these Hopper has flash_sm90.cu, and more shared memory.
#define MLX_CUDA_FLASH_ELSEWHERE(dtype, T)                                             \
  MLX_CUDA_FLASH(dtype##_64, 2, T, 64, 64, 64, 4, 2, 1, 2, true, false)                \
  MLX_CUDA_FLASH(dtype##_128, 2, T, 128, 128, 64, 4, 2, 1, 1, false, false)            \
  MLX_CUDA_FLASH(dtype##_192_128, 2, T, 192, 128, 64, 4, 2, 1, 1, false, false)        \
  MLX_CUDA_FLASH(dtype##_192, 1, T, 192, 192, 128, 8, 1, 1, 1, false, false)           \
  MLX_CUDA_FLASH(dtype##_256, 1, T, 256, 256, 128, 8, 1, 1, 1, false, false)           \
  MLX_CUDA_FLASH(dtype##_64_general, 2, T, 64, 64, 64, 4, 2, 1, 1, true, true)         \
  MLX_CUDA_FLASH(dtype##_128_general, 2, T, 128, 128, 32, 4, 2, 1, 1, false, true)     \
  MLX_CUDA_FLASH(dtype##_192_128_general, 2, T, 192, 128, 32, 4, 2, 1, 2, false, true) \
  MLX_CUDA_FLASH(dtype##_192_general, 1, T, 192, 192, 64, 8, 1, 1, 1, false, true)     \
  MLX_CUDA_FLASH(dtype##_256_general, 1, T, 256, 256, 64, 8, 2, 2, 1, false, true)     \
  MLX_CUDA_FLASH(dtype##_256_small, 2, T, 256, 256, 32, 4, 1, 1, 1, false, true)       \
  MLX_CUDA_FLASH(dtype##_576_medium, 1, T, 576, 512, 32, 8, 1, 2, 1, false, true)      \
  MLX_CUDA_FLASH(dtype##_576_small, 1, T, 576, 512, 32, 2, 1, 2, 1, false, true)

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
MLX_CUDA_FLASH_ELSEWHERE(float16, __half)
MLX_CUDA_FLASH_ELSEWHERE(bfloat16, __nv_bfloat16)
MLX_CUDA_FLASH(float32_256_small, 1, float, 256, 256, 32, 2, 1, 1, 1, false, true)
#endif

#define MLX_CUDA_FLASH_WIDE(dtype, T) MLX_CUDA_FLASH(dtype##_576, 1, T, 576, 512, 64, 8, 2, 4, 1, false, true)

MLX_CUDA_FLASH_WIDE(float16, __half)
MLX_CUDA_FLASH_WIDE(bfloat16, __nv_bfloat16)
MLX_CUDA_FLASH(float32_64, 2, float, 64, 64, 64, 4, 2, 1, 1, false, false)
MLX_CUDA_FLASH(float32_128, 1, float, 128, 128, 32, 4, 2, 1, 1, false, false)
MLX_CUDA_FLASH(float32_256, 1, float, 256, 256, 32, 8, 1, 1, 1, false, false)
MLX_CUDA_FLASH(float32_64_general, 2, float, 64, 64, 64, 4, 2, 1, 1, false, true)
MLX_CUDA_FLASH(float32_128_general, 1, float, 128, 128, 32, 4, 2, 1, 1, false, true)
MLX_CUDA_FLASH(float32_256_general, 1, float, 256, 256, 32, 8, 1, 1, 1, false, true)
