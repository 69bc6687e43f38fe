// Which rows of attention a block has, and which tiles of keys it visits for them.
#pragma once

#include "attention/flash/params.h"

namespace mlx_cuda {

// The part of the problem that one block has: its rows and the keys that they may see, as rows within one sequence.
struct Place {
  int batch;
  int head;
  int row0;      // of the block's first query
  int rows;      // queries of the sequence
  int q_offset;  // of the sequence's rows in q and out
  int k_offset;
  int begin;  // keys that are there
  int end;
  int first;  // tiles of keys that some row sees, without regard to a mask
  int last;

  __device__ Place(const FlashParams& p, int row0, int head, int batch, int block_rows, int tile_keys)
      : batch(batch), head(head), row0(row0) {
    q_offset = p.cu_q ? p.cu_q[batch] : 0;
    k_offset = p.cu_k ? p.cu_k[batch] : 0;
    rows = p.cu_q ? p.cu_q[batch + 1] - q_offset : p.q_length;
    const int keys = p.cu_k ? p.cu_k[batch + 1] - k_offset : p.kv_length;
    begin = p.starts ? max(p.starts[batch], 0) : 0;
    end = p.ends ? min(p.ends[batch], keys) : keys;
    const int from = lowest(p, row0);
    const int to = highest(p, min(row0 + block_rows, rows) - 1);
    first = from / tile_keys;
    last = to > from ? (to + tile_keys - 1) / tile_keys : first;
  }

  // The keys [lowest, highest) that a row may see.
  __device__ int lowest(const FlashParams& p, int row) const {
    return p.window_left >= 0 ? max(begin, row + end - rows - p.window_left) : begin;
  }
  __device__ int highest(const FlashParams& p, int row) const {
    return p.window_right >= 0 ? min(end, row + end - rows + p.window_right + 1) : end;
  }
};

// The tiles of keys that a block visits, in order.
struct Tiles {
  const int* list = nullptr;
  int at;
  int stop;

  __device__ Tiles(const FlashParams& p, const Place& place, int tile_of_rows, bool masked) : at(place.first), stop(place.last) {
    if (masked && p.mask.tiles) {
      const long long* strides = p.mask.tile_strides;
      const long long* counts = p.mask.count_strides;
      list = p.mask.tiles + place.batch * strides[0] + place.head * strides[1] + tile_of_rows * strides[2];
      const int count = p.mask.tile_counts[place.batch * counts[0] + place.head * counts[1] + tile_of_rows * counts[2]];
      int low = 0;
      while (low < count && list[low] / 2 < place.first) {
        ++low;
      }
      int high = low;
      while (high < count && list[high] / 2 < place.last) {
        ++high;
      }
      at = low;
      stop = high;
    }
  }
  __device__ int count() const {
    return max(stop - at, 0);
  }
  __device__ int tile(int i) const {
    return list ? list[at + i] / 2 : at + i;
  }
  __device__ bool masked(int i) const {
    return list && (list[at + i] & 1) == 0;
  }
};

// Visits the pieces of this block: with a block for each piece that is one, otherwise the copies of the next begin while one is
// written.
//
// Pieces that run at the same time share as many keys as fit into the L2 cache (`section` heads of all batch entries); among those,
// the last rows begin, which see most under a causal mask.
template <typename Visit>
__device__ inline void for_each_piece(const FlashParams& p, int tile_rows, int tile_keys, bool masked, Visit&& visit) {
  const int row_tiles = (p.q_length + tile_rows - 1) / (tile_rows);
  const int heads = p.heads * p.batch;
  const int blocks = static_cast<int>(gridDim.x);
  for (int piece = static_cast<int>(blockIdx.x); piece < heads * row_tiles; piece += blocks) {
    const int first_head = piece / (row_tiles * p.section) * p.section;
    const int section = min(p.section, heads - first_head);
    const int within = piece - first_head * row_tiles;
    const int tile_of_rows = row_tiles - 1 - within / section;
    const int head = first_head + within % section;
    const Place place(p, tile_of_rows * tile_rows, head % p.heads, head / p.heads, tile_rows, tile_keys);
    if (place.row0 < place.rows) {
      visit(place, Tiles(p, place, tile_of_rows, masked));
    }
  }
}

}  // namespace mlx_cuda
