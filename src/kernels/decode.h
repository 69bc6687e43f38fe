// What the decode kernels take by value; filled by primitives/decode.cpp.
#pragma once

namespace mlx_cuda {

// Distances in elements; head_dim is adjacent.
struct DecodeStrides {
  long long batch;
  long long head;
  long long row;
};

struct DecodeParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* partial;        // [splits, B, H, Tq, D]: numerators, where there is more than one split
  float* partial_scale;  // [splits, B, H, Tq, 2]: their maxima and sums
  const void* mask;      // bool or T, or null
  const int* ends;       // [B]: keys from here on are not there; null: kv_length
  const int* starts;     // [B]: keys before are not there; null: 0
  const void* sinks;     // T [H], or null
  DecodeStrides q_strides;
  DecodeStrides k_strides;
  DecodeStrides v_strides;
  DecodeStrides out_strides;
  long long mask_strides[4];
  int mask_is_bool;
  int batch;
  int kv_heads;
  int group;  // query heads of one kv head
  int q_length;
  int kv_length;
  int head_dim;
  int window_left;   // keys before the diagonal that a query sees; negative: all
  int window_right;  // keys after it; negative: all
  int chunk;         // keys of one split
  int splits;
  int plain;      // neither mask nor softcap
  float scale;    // of the scores: in units of log2(e), or with a softcap of the softcap
  float softcap;  // 0: none
};

}  // namespace mlx_cuda
