// Parameters of the kernel of lost_nan.cu, passed by value; attention/cudnn/lost_nan.cpp fills them in.
#pragma once

namespace mlx_cuda {

inline constexpr int kLostNanThreads = 256;
inline constexpr int kLostNanRows = 64;  // of q or k, that a block looks at

// Rows of a multiple of 8 elements of 16 bits, aligned to 16 bytes. Strides are in elements.
struct LostNanRows {
  const void* data;
  long long batch, head, row;
  int first;  // row that matters
  int rows;   // from there on
};

struct LostNanParams {
  LostNanRows q, k;
  void* d_v;
  long long d_v_batch, d_v_head, d_v_row;
  int kv_heads;
  int shared;  // query heads of each
  int head_dim, v_head_dim;
  int kv_length;
  int parts;          // blocks of each key head
  unsigned exponent;  // the bits of a number of 16 bits that are all set in NaN and infinity
};

}  // namespace mlx_cuda
