// What the decode kernels take by value; filled by attention/decode/primitive.cpp.
#pragma once

namespace mlx_cuda {

// Distances in elements; head_dim is adjacent.
struct DecodeStrides {
  long long batch;  // of pages: from one page to the next
  long long head;
  long long row;
};

struct DecodeParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // [B, H, Tq], or null
  float* partial;               // [2 * workers, or splits of all units; block_rows, value_dim]: numerators of incomplete results
  float* partial_scale;         // the same with 2 in place of the last: their maxima and sums
  unsigned long long* tickets;  // [units]: for which call, and how many of a unit's parts have been put aside
  const void* mask;             // bool or T, or null
  const int* ends;              // [B]: keys from here on are not there; null: kv_length
  const int* starts;            // [B]: keys before are not there; null: 0
  const void* sinks;            // T [H], or null
  const int* table;             // [B, pages of an entry]: which page holds which keys; null: no pages
  DecodeStrides q_strides;
  DecodeStrides k_strides;
  DecodeStrides v_strides;
  DecodeStrides out_strides;
  long long mask_strides[4];
  long long table_stride;
  unsigned long long call;  // of 48 bits: no other call of the process has this number
  int mask_is_bool;
  int batch;
  int kv_heads;
  int group;  // query heads of one kv head
  int q_length;
  int kv_length;
  int head_dim;
  int value_dim;
  int window_left;   // keys before the diagonal that a query sees; negative: all
  int window_right;  // keys after it; negative: all
  int page_size;
  int tile_keys;  // keys that are read at once: 1 << tile_shift
  int tile_shift;
  int block_rows;     // queries of one kv head that one block takes
  int row_blocks;     // of one kv head
  int row_warps;      // warps of a block that share the keys and have different rows; warpgroups in the kernel for Hopper
  int workers;        // blocks
  int fewest_tiles;   // of one worker
  int unit_tiles;     // of each unit, where neither starts nor ends make them differ
  unsigned quota;     // then: tiles of a worker
  unsigned extra;     // and how many workers have one more
  int parts;          // of each unit, one for each worker, where that is nearly as even; otherwise 0
  int chunk;          // keys of one part of a unit, and
  int splits;         // how many parts it has, in the direct kernel
  int merge_groups;   // parts of a merging block that take turns
  int stages;         // of the wide kernel's ring
  int shared_values;  // the wide kernel's values are the first columns of the keys
  int plain;          // neither mask nor softcap, and a scale above 0
  float scale;        // of the scores: in units of log2(e), or with a softcap of the softcap
  float softcap;      // 0: none
};

}  // namespace mlx_cuda
