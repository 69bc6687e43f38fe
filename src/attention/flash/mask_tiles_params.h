// Parameters of the kernels of mask_tiles.cu, passed by value; attention/flash/mask_tiles.cpp fills them in.
#pragma once

namespace mlx_cuda {

// A mask [batch, heads, rows, keys] without its broadcast dimensions, except that of the keys.
struct MaskTilesParams {
  const void* mask;
  long long strides[4];
  unsigned* bits;         // [batch, heads, rows, words], of a bool mask
  unsigned char* states;  // [batch, heads, tiles of rows, tiles of keys]: 0 hidden, 1 mixed, 2 whole
  int* tiles;             // the same shape: FlashMask::tiles
  int* counts;            // [batch, heads, tiles of rows]
  float* peaks;           // [batch, heads, tiles of keys, rows] of an additive mask: a row's largest number in a tile
  float* shifts;          // [batch, heads, rows]: FlashMask::shifts; or null
  int heads;
  int rows;
  int keys;
  int words;  // of one row
  int tile_rows;
  int tile_keys;  // a multiple of 32
  int row_tiles;
  int key_tiles;
};

}  // namespace mlx_cuda

// mask_tiles.cu. EACH(name, type of device code, dtype).
#define MLX_CUDA_MASK_STATES_KERNELS(EACH)            \
  EACH(mask_states_bool, unsigned char, bool)         \
  EACH(mask_states_float16, __half, float16)          \
  EACH(mask_states_bfloat16, __nv_bfloat16, bfloat16) \
  EACH(mask_states_float32, float, float32)
