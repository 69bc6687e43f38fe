// Which rows of attention a block has, and which tiles of keys it visits for them.
#pragma once

#include "attention/flash/params.h"

namespace mlx_cuda {

// How many pieces a problem has: tiles of rows of a head.
__device__ inline int row_tiles_of(const FlashParams& p, int tile_rows) {
  return (p.q_length + tile_rows - 1) / tile_rows;
}

// One piece: its rows and the keys that they may see, as rows within one sequence.
struct Place {
  int batch;
  int head;
  int tile;      // of rows
  int row0;      // the first
  int rows;      // of the sequence
  int q_offset;  // of the sequence's rows in q and out
  int k_offset;
  int begin;  // keys that are there
  int end;
  int left;  // keys before its own position that a row sees; negative: all
  int right;
  int shift;   // from the number of a row to its position among the keys
  int origin;  // the key from which tiles are counted
  int first;   // tiles of keys that some row sees, without regard to a mask
  int last;

  // Pieces that run at the same time share as many keys as fit into the L2 cache (`section` heads of all batch entries); among
  // those, the last rows begin, which see most under a causal mask.
  __device__ Place(const FlashParams& p, int piece, int tile_rows, int tile_keys) {
    const int row_tiles = row_tiles_of(p, tile_rows);
    const int first_head = piece / (row_tiles * p.section) * p.section;
    const int section = min(p.section, p.heads * p.batch - first_head);
    const int within = piece - first_head * row_tiles;
    tile = row_tiles - 1 - within / section;
    head = (first_head + within % section) % p.heads;
    batch = (first_head + within % section) / p.heads;
    row0 = tile * tile_rows;

    q_offset = p.cu_q ? p.cu_q[batch] : 0;
    k_offset = p.cu_k ? p.cu_k[batch] : 0;
    rows = p.cu_q ? p.cu_q[batch + 1] - q_offset : p.q_length;
    const int keys = p.cu_k ? p.cu_k[batch + 1] - k_offset : p.kv_length;
    begin = p.starts ? max(p.starts[batch], 0) : 0;
    end = p.ends ? min(p.ends[batch], keys) : keys;
    shift = end - rows;
    left = p.window_left;
    right = p.window_right;
    // A row's sum does not depend on tokens before its sequence. Tiles and bits of a mask are counted from the first column.
    const bool masked = p.mask.tiles || p.mask.bits || p.mask.values;
    origin = masked ? 0 : begin;
    const int from = lowest(row0) - origin;
    const int to = highest(min(row0 + tile_rows, rows) - 1) - origin;
    first = from / tile_keys;
    last = to > from ? (to + tile_keys - 1) / tile_keys : first;
  }

  // Packed sequences may have fewer rows than the longest.
  __device__ bool empty() const {
    return row0 >= rows;
  }

  // The first key of a tile.
  __device__ int first_key(int tile, int tile_keys) const {
    return origin + tile * tile_keys;
  }

  // The keys [lowest, highest) that a row may see.
  __device__ int lowest(int row) const {
    const int bounded = max(begin, row + shift - left);
    return left >= 0 ? bounded : begin;
  }
  __device__ int highest(int row) const {
    const int bounded = min(end, row + shift + right + 1);
    return right >= 0 ? bounded : end;
  }
};

struct Tile {
  int index;
  bool masked;  // a mask hides some of it, or adds to its scores
};

// The tiles of keys that a block visits, in ascending order, [first, last) of all or of a mask's list.
class Tiles {
 public:
  int first;
  int last;

  __device__ Tiles(const FlashParams& p, const Place& place, bool masked) : first(place.first), last(place.last) {
    if (masked && p.mask.tiles) {
      const long long* strides = p.mask.tile_strides;
      const long long* counts = p.mask.count_strides;
      list = p.mask.tiles + place.batch * strides[0] + place.head * strides[1] + place.tile * strides[2];
      const int listed = p.mask.tile_counts[place.batch * counts[0] + place.head * counts[1] + place.tile * counts[2]];
      first = entries_before(place.first, listed);
      last = entries_before(place.last, listed);
    }
  }
  __device__ Tile operator[](int i) const {
    if (!list) {
      return {i, false};
    }
    const int entry = list[i];
    return {entry >> 1, (entry & 1) == 0};
  }
  // The same, or anything where there are no more.
  __device__ Tile next(int i) const {
    return list && i >= last ? Tile{} : (*this)[i];
  }

 private:
  __device__ int entries_before(int tile, int listed) const {
    int low = 0;
    for (int size = listed; size > 0;) {
      const int half = size / 2;
      const bool before = list[low + half] >> 1 < tile;
      low += before ? half + 1 : 0;
      size = before ? size - half - 1 : half;
    }
    return low;
  }

  const int* list = nullptr;
};

}  // namespace mlx_cuda
