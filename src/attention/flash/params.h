// Parameters of the flash kernels (flash.cu, flash_sm90.cu), passed by value; attention/flash/primitive.cpp fills them in.
#pragma once

namespace mlx_cuda {

// Distances in elements; head_dim is adjacent.
struct FlashStrides {
  long long batch;
  long long head;
  long long row;
};

// A bool or additive mask, read in place, and the results of a pass over it (attention/flash/mask_tiles.cu). "Own" sizes:
// broadcast dimensions of the mask have a stride of 0 here, and have one set of tiles and bits.
struct FlashMask {
  const void* values;    // additive: of the operands' type; null for a bool mask, whose bits say it all, and where there is no mask
  long long strides[4];  // of the values
  const unsigned* bits;  // bool: bit k % 32 of word k / 32 of a row says whether key k is seen; null for an additive mask
  long long bit_strides[3];    // in words: batch, head, row
  const int* tiles;            // ascending 2 * (tile of keys) + (1 where every key is seen by every row, without a bias)
  const int* tile_counts;      // how many of them each tile of rows has: the others are hidden
  long long tile_strides[3];   // in entries of `tiles`: batch, head, tile of rows
  long long count_strides[3];  // in entries of `tile_counts`: batch, head, tile of rows
  const float* shifts;         // additive: the offset of each row; or null
  long long shift_strides[3];  // batch, head, row
};

// A softcap for scores that are not scaled yet: outer * tanh(inner * score), which is score * fit(score^2) where |inner * score|
// <= 1.
struct FlashCap {
  float inner;
  float outer;  // in units of log2(e)
  float fit[5];
};

struct FlashParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;         // [B, H, Tq] (varlen: [H, total]), natural logarithm; or null
  const int* starts;  // [B]: keys before are not there; null: 0
  const int* ends;    // [B]: keys from here on are not there, and queries are the last before it; null: kv_length
  const int* cu_q;    // [B + 1]: rows of each sequence, if sequences are packed (varlen); otherwise null
  const int* cu_k;    // [B + 1]
  const void* sinks;  // T [H], or null
  FlashMask mask;
  FlashStrides q_strides;
  FlashStrides k_strides;
  FlashStrides v_strides;
  FlashStrides out_strides;
  long long lse_strides[2];  // batch, head
  int batch;
  int heads;
  int kv_heads;
  int q_length;  // the longest
  int kv_length;
  int head_dim;
  int v_head_dim;
  int window_left;   // keys before the diagonal that a query sees; negative: all
  int window_right;  // keys after it; negative: all
  int section;       // heads whose blocks run together
  float scale;       // of the scores, > 0; plain, not in units of log2(e)
  float softcap;     // 0: none
  FlashCap cap;
};

}  // namespace mlx_cuda
