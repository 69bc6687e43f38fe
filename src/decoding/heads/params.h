// How a token's queries, keys and values are made ready for attention.
#pragma once

#include "decoding/append/params.h"

namespace mlx_cuda {

// Queries and keys: RMS norm of each head if there are weights, RoPE, and keys and values written to their row of the cache.
struct HeadsParams {
  static constexpr int kWarps = 4;  // of a block, each with a head
  static constexpr int kMostDim = 256;
  static constexpr int kKeys = 1;  // of the prepared heads: 0 are queries
  static constexpr int kValues = 2;

  const void* rows[3];   // queries, keys, values [batch, heads, dim]
  const void* norms[2];  // [dim] of queries and keys, or null
  void* queries;         // [batch, heads, 1, dim]
  void* caches[2];       // [pages, heads, capacity, dim]
  const int* offset;     // of the token, or of each sequence's
  const int* where;      // [2, batch]: pages and rows of the append; none where the page is negative
  const float* freqs;    // [rotated / 2], or null
  float eps[2];
  float log2_base;
  float scale;  // of the offset
  long long capacity;
  int batch;
  int offset_distance;  // from one sequence's offset to the next, 0 where they share one
  int heads[2];         // of queries, and of keys
  int dim;
  int rotated;     // of a head's values, the first
  int neighbours;  // whether pairs are adjacent (traditional), or half of `rotated` apart
};

// The same, with a quantized KV cache.
struct QuantizedHeadsParams {
  HeadsParams heads;  // without caches
  QuantizedRows to;
};

}  // namespace mlx_cuda

// heads.cu. EACH(name, dtype) and QUANTIZED(name, dtype, bits), whose caches are.
#define MLX_CUDA_HEADS_KERNELS(EACH, QUANTIZED)  \
  EACH(heads_float32, float32)                   \
  EACH(heads_float16, float16)                   \
  EACH(heads_bfloat16, bfloat16)                 \
  QUANTIZED(heads_float16_affine4, float16, 4)   \
  QUANTIZED(heads_float16_affine8, float16, 8)   \
  QUANTIZED(heads_bfloat16_affine4, bfloat16, 4) \
  QUANTIZED(heads_bfloat16_affine8, bfloat16, 8)
