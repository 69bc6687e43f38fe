// How the decode kernels are called: what decode/primitive.cpp and the planner fill in, and kernels take by value.
//
// Rows are the queries of all heads that share a kv head. A unit is a batch entry, a kv head and, of many rows, a block of them.
#pragma once

namespace mlx_cuda {

// Distances in elements; head_dim is adjacent.
struct DecodeStrides {
  long long batch;  // of pages: from one page to the next
  long long head;
  long long row;
};

struct DecodeSizes {
  int batch;
  int kv_heads;
  int group;  // query heads of one kv head
  int q_length;
  int kv_length;
  int head_dim;
  int value_dim;
  int window_left;   // keys before the diagonal that a query sees; negative: all
  int window_right;  // keys after it; negative: all
};

struct DecodeTiling {
  int tile_keys;  // that are read at once: 1 << tile_shift
  int tile_shift;
  int block_rows;  // of one block
  int row_blocks;  // of one kv head
  int row_warps;   // warps of a block that share the keys and have different rows; warpgroups in the kernel for Hopper
};

// Stream-K: the tiles of keys of all units form one sequence, which the blocks share evenly.
struct StreamK {
  int blocks;
  int fewest_tiles;          // of one block
  unsigned unit_tiles;       // of each unit; 0: starts or ends make them differ, and the kernels share them out themselves
  unsigned tiles_per_block;  // where blocks go from unit to unit, and
  unsigned longer_blocks;    // how many have one tile more: the first
  unsigned blocks_per_unit;  // where each block has a part of one unit; otherwise 0
};

// Split-K: each unit is cut into equal parts, a block for each.
struct SplitK {
  int keys;  // of one part
  int splits;
};

struct DecodeParams : DecodeSizes, DecodeTiling {
  StreamK stream_k;  // of all kernels but the direct one
  SplitK split_k;    // of that
  int merge_groups;  // of a block of the merge kernel, that take turns at parts
  int stages;        // of the wide kernel's pipeline
  int page_size;
  int mask_is_bool;
  int plain;                // neither mask nor softcap, and a scale above 0
  float scale;              // of the scores: in units of log2(e), or with a softcap of the softcap
  float softcap;            // 0: none
  unsigned long long call;  // of 48 bits: no other call of the process has this number
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // [B, H, Tq], or null
  float* partial_values;        // [slots, block_rows, value_dim]: numerators of parts of units that wait for being merged
  float* partial_scales;        // [slots, block_rows, 2]: their maxima and sums
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
};

}  // namespace mlx_cuda
