// The flash kernels and their compile-time parameters: device code instantiates these tables, and the host chooses from them.
#pragma once

namespace mlx_cuda {

// Compile-time parameters of a kernel of flash.cu, and its layout of shared memory.
struct FlashShape {
  int itemsize;
  int head_dim;    // of queries and keys, at most
  int v_head_dim;  // of values, at most
  int keys;        // of a tile
  int warps;
  int row_tiles = 1;           // of 16 rows, that a warp holds
  int parts = 1;               // warps that share their rows
  int stages = 1;              // tiles of keys, and of values, in shared memory
  bool holds_queries = false;  // in registers
  bool general = false;        // takes masks and a softcap
  int blocks = 2;              // that are to fit on one multiprocessor

  constexpr int rows() const {
    return warps / parts * row_tiles * 16;
  }
  constexpr int threads() const {
    return warps * 32;
  }

  // Whether bank conflicts between eight adjacent rows are avoided by swizzling 16-byte units within each 128 bytes; otherwise by
  // 16 bytes of padding per row.
  constexpr bool swizzled() const {
    return itemsize == 2;
  }
  // Bytes from one row to the next.
  constexpr int pitch() const {
    return head_dim * itemsize + (swizzled() ? 0 : 16);
  }
  constexpr int value_pitch() const {
    return v_head_dim * itemsize + (swizzled() ? 0 : 16);
  }
  constexpr int weight_pitch() const {
    return keys * 2 + 16;
  }

  // Shared memory: Q, K, V and, where warps share rows, their weights [row][key] and a number of each [part][row].
  constexpr int keys_at() const {
    return rows() * pitch();
  }
  constexpr int values_at() const {
    return keys_at() + stages * keys * pitch();
  }
  constexpr int weights_at() const {
    return values_at() + stages * keys * value_pitch();
  }
  constexpr int row_numbers_at() const {
    return weights_at() + (parts > 1 ? rows() * weight_pitch() : 0);
  }
  constexpr int shared_bytes() const {
    return row_numbers_at() + (parts > 1 ? parts * rows() * 4 : 0);
  }
};

// flash.cu. EACH(name, dtype, the shape's members...). Kernels with masks and a softcap need more registers, so there are kernels
// without them where it matters. For each element size: first those without, then those with; the narrowest first, and of one
// width the fastest. The plan uses the first kernel whose `blocks` blocks fit on an SM, otherwise the first that fits at all:
// with 100 KiB (Ada) that is 128_general, with 164 KiB (A100) 128. The last of each fits into the shared memory of every GPU.
// NOT_SM90's are not compiled for Hopper, which has flash_sm90.cu and more shared memory.
#define MLX_CUDA_FLASH_KERNELS(EACH, NOT_SM90)                                                                                     \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 64, .head_dim = 64, .v_head_dim = 64, .keys = 64, .warps = 4, .row_tiles = 2, .stages = 2, .holds_queries = true)  \
  MLX_CUDA_FLASH_16(NOT_SM90, 128, .head_dim = 128, .v_head_dim = 128, .keys = 64, .warps = 4, .row_tiles = 2)                     \
  MLX_CUDA_FLASH_16(NOT_SM90, 192_128, .head_dim = 192, .v_head_dim = 128, .keys = 64, .warps = 4, .row_tiles = 2)                 \
  MLX_CUDA_FLASH_16(NOT_SM90, 192, .head_dim = 192, .v_head_dim = 192, .keys = 128, .warps = 8, .blocks = 1)                       \
  MLX_CUDA_FLASH_16(NOT_SM90, 256, .head_dim = 256, .v_head_dim = 256, .keys = 128, .warps = 8, .blocks = 1)                       \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 64_general, .head_dim = 64, .v_head_dim = 64, .keys = 64, .warps = 4, .row_tiles = 2, .holds_queries = true,       \
      .general = true)                                                                                                             \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 128_general, .head_dim = 128, .v_head_dim = 128, .keys = 32, .warps = 4, .row_tiles = 2, .general = true)          \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 192_128_general, .head_dim = 192, .v_head_dim = 128, .keys = 32, .warps = 4, .row_tiles = 2, .stages = 2,          \
      .general = true)                                                                                                             \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 192_general, .head_dim = 192, .v_head_dim = 192, .keys = 64, .warps = 8, .general = true, .blocks = 1)             \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 256_general, .head_dim = 256, .v_head_dim = 256, .keys = 64, .warps = 8, .row_tiles = 2, .parts = 2,               \
      .general = true, .blocks = 1)                                                                                                \
  MLX_CUDA_FLASH_16(NOT_SM90, 256_small, .head_dim = 256, .v_head_dim = 256, .keys = 32, .warps = 8, .general = true, .blocks = 1) \
  MLX_CUDA_FLASH_16(                                                                                                               \
      EACH, 576, .head_dim = 576, .v_head_dim = 512, .keys = 64, .warps = 8, .row_tiles = 2, .parts = 4, .general = true,          \
      .blocks = 1)                                                                                                                 \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 576_medium, .head_dim = 576, .v_head_dim = 512, .keys = 32, .warps = 8, .parts = 2, .general = true, .blocks = 1)  \
  MLX_CUDA_FLASH_16(                                                                                                               \
      NOT_SM90, 576_small, .head_dim = 576, .v_head_dim = 512, .keys = 32, .warps = 2, .parts = 2, .general = true, .blocks = 1)   \
  MLX_CUDA_FLASH_32(EACH, 64, .head_dim = 64, .v_head_dim = 64, .keys = 64, .warps = 4, .row_tiles = 2)                            \
  MLX_CUDA_FLASH_32(EACH, 128, .head_dim = 128, .v_head_dim = 128, .keys = 32, .warps = 4, .row_tiles = 2, .blocks = 1)            \
  MLX_CUDA_FLASH_32(EACH, 256, .head_dim = 256, .v_head_dim = 256, .keys = 32, .warps = 8, .blocks = 1)                            \
  MLX_CUDA_FLASH_32(EACH, 64_general, .head_dim = 64, .v_head_dim = 64, .keys = 64, .warps = 4, .row_tiles = 2, .general = true)   \
  MLX_CUDA_FLASH_32(                                                                                                               \
      EACH, 128_general, .head_dim = 128, .v_head_dim = 128, .keys = 32, .warps = 4, .row_tiles = 2, .general = true, .blocks = 1) \
  MLX_CUDA_FLASH_32(EACH, 256_general, .head_dim = 256, .v_head_dim = 256, .keys = 32, .warps = 8, .general = true, .blocks = 1)   \
  MLX_CUDA_FLASH_32(NOT_SM90, 256_small, .head_dim = 256, .v_head_dim = 256, .keys = 32, .warps = 2, .general = true, .blocks = 1)
#define MLX_CUDA_FLASH_16(EACH, width, ...)                        \
  EACH(flash_float16_##width, float16, .itemsize = 2, __VA_ARGS__) \
  EACH(flash_bfloat16_##width, bfloat16, .itemsize = 2, __VA_ARGS__)
#define MLX_CUDA_FLASH_32(EACH, width, ...) EACH(flash_float32_##width, float32, .itemsize = 4, __VA_ARGS__)

// Variants of a kernel of flash_sm90.cu: no mask and no softcap; softcap; mask with or without softcap; or an additive mask that
// TMA loads, without softcap, sinks and log-sum-exp.
enum class FlashKind { plain, capped, general, biased };

// Compile-time parameters of a kernel of flash_sm90.cu: operands of 16 bits, in pipeline stages.
struct FlashSm90Shape {
  int head_dim;   // of queries, keys and values, at most
  int keys;       // of a tile
  int consumers;  // warpgroups of 64 rows each

  static constexpr int kStages = 2;

  constexpr int rows() const {
    return consumers * 64;
  }
  constexpr int threads() const {
    return (1 + consumers) * 128;
  }
  constexpr int query_bytes() const {
    return rows() * head_dim * 2;
  }
  constexpr int tile_bytes() const {
    return keys * head_dim * 2;
  }
  constexpr int bias_bytes(FlashKind kind) const {
    return kind == FlashKind::biased ? rows() * keys * 2 : 0;
  }
  constexpr int shared_bytes(FlashKind kind) const {
    constexpr int alignment = 1024;
    constexpr int barriers = 128;
    return query_bytes() + kStages * (2 * tile_bytes() + bias_bytes(kind)) + alignment + barriers;
  }
};

// flash_sm90.cu. EACH(name, dtype, kind, the shape's members...), the narrowest first.
#define MLX_CUDA_FLASH_SM90_KERNELS(EACH)                                  \
  MLX_CUDA_FLASH_SM90_UNBIASED(EACH, 64, .keys = 128, .consumers = 3)      \
  MLX_CUDA_FLASH_SM90_KIND(EACH, 64, biased, .keys = 128, .consumers = 3)  \
  MLX_CUDA_FLASH_SM90_UNBIASED(EACH, 128, .keys = 128, .consumers = 2)     \
  MLX_CUDA_FLASH_SM90_KIND(EACH, 128, biased, .keys = 128, .consumers = 2) \
  MLX_CUDA_FLASH_SM90_UNBIASED(EACH, 192, .keys = 96, .consumers = 2)      \
  MLX_CUDA_FLASH_SM90_UNBIASED(EACH, 256, .keys = 64, .consumers = 2)
#define MLX_CUDA_FLASH_SM90_UNBIASED(EACH, width, ...)       \
  MLX_CUDA_FLASH_SM90_KIND(EACH, width, plain, __VA_ARGS__)  \
  MLX_CUDA_FLASH_SM90_KIND(EACH, width, capped, __VA_ARGS__) \
  MLX_CUDA_FLASH_SM90_KIND(EACH, width, general, __VA_ARGS__)
#define MLX_CUDA_FLASH_SM90_KIND(EACH, width, kind, ...)                              \
  EACH(flash_float16_##width##_##kind, float16, kind, .head_dim = width, __VA_ARGS__) \
  EACH(flash_bfloat16_##width##_##kind, bfloat16, kind, .head_dim = width, __VA_ARGS__)

}  // namespace mlx_cuda
