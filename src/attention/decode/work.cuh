// Which keys of which rows a block takes.
//
// A unit is a batch entry, a kv head and, of many rows, a block of them. Stream-K: the tiles of keys of all units form one
// sequence, which the blocks (all resident at once) share evenly, so that the time follows the sum of the lengths, whatever the
// longest. Where the units are about equally long, each block has a part of one unit instead: it begins and ends only once. A block
// that takes a whole unit writes its result; a part of a unit goes to one of two slots of the block, for its first and its last
// unit, and is merged (results.cuh).
#pragma once

#include "attention/decode/params.h"
#include "device/reduce.cuh"

namespace mlx_cuda {

constexpr int kUnevenKeys = 256;  // that a block may have more than the average: a second unit costs it as much

// The keys that some query of a batch entry sees.
struct Span {
  int begin;
  int end;
  int diagonal;  // the key at the position of the first query
  int tiles;
};

__device__ inline Span span_of(const DecodeParams& p, int batch) {
  Span span;
  span.begin = p.starts ? max(p.starts[batch], 0) : 0;
  span.end = p.ends ? min(p.ends[batch], p.kv_length) : p.kv_length;
  span.diagonal = span.end - p.q_length;
  if (p.window_left >= 0) {
    span.begin = max(span.begin, span.diagonal - p.window_left);
  }
  span.tiles = span.begin < span.end ? ((span.end + p.tile_keys - 1) >> p.tile_shift) - (span.begin >> p.tile_shift) : 0;
  return span;
}

// The first tile of a block, and the block that has a tile.
__device__ inline unsigned start_of(const StreamK& work, unsigned block) {
  return work.tiles_per_block * block + min(block, work.longer_blocks);
}
__device__ inline int block_of(const StreamK& work, unsigned tile) {
  const unsigned longer = work.tiles_per_block + 1;
  const unsigned pivot = work.longer_blocks * longer;
  return static_cast<int>(tile < pivot ? tile / longer : work.longer_blocks + (tile - pivot) / work.tiles_per_block);
}

__device__ inline unsigned tiles_of(const DecodeParams& p, int batch) {
  return batch < p.batch ? span_of(p, batch).tiles * p.kv_heads * p.row_blocks : 0;
}

// The tiles of the batch entries before one; by a whole warp, like the next two.
__device__ inline unsigned tiles_before(const DecodeParams& p, int batch) {
  unsigned before = 0;
#pragma unroll 1
  for (int other = threadIdx.x % 32; other < batch; other += 32) {
    before += tiles_of(p, other);
  }
  return warp_sum(before);
}

__device__ inline StreamK share_tiles(const DecodeParams& p) {
  StreamK work = p.stream_k;
  if (work.unit_tiles == 0) {
    const unsigned units = p.kv_heads * p.row_blocks;  // of an entry
    unsigned least = ~0u;                              // tiles of an entry
    unsigned most = 0;
    unsigned total = 0;
#pragma unroll 1
    for (int entry = threadIdx.x % 32; entry < p.batch; entry += 32) {
      const unsigned tiles = tiles_of(p, entry);
      least = min(least, tiles);
      most = max(most, tiles);
      total += tiles;
    }
    total = warp_sum(total);
    const unsigned blocks = min(static_cast<unsigned>(work.blocks), max(total / work.fewest_tiles, 1u));
    const unsigned parts = blocks / (p.batch * units);
    if (__all_sync(
            ~0u, least >= parts * units * work.fewest_tiles &&
                     most <= parts * units * (total / blocks + (kUnevenKeys >> p.tile_shift)))) {
      work.blocks_per_unit = parts;  // 0 where there are fewer blocks
    }
    work.blocks = static_cast<int>(blocks);
    work.tiles_per_block = total / blocks;
    work.longer_blocks = total % blocks;
  }
  return work;
}

// The batch entry that a tile (of those that there are) belongs to, and the tiles before those of that entry.
__device__ inline int entry_of(const DecodeParams& p, unsigned tile, unsigned& before) {
  before = 0;
  if (p.stream_k.unit_tiles > 0) {
    const unsigned each = p.stream_k.unit_tiles * p.kv_heads * p.row_blocks;
    before = tile / each * each;
    return static_cast<int>(tile / each);
  }
#pragma unroll 1
  for (int first = 0;; first += 32) {
    const int lane = threadIdx.x % 32;
    const unsigned mine = tiles_of(p, first + lane);
    unsigned through = mine;  // of this entry and those before it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = __shfl_up_sync(~0u, through, distance);
      through += lane >= distance ? other : 0;
    }
    const unsigned later = __ballot_sync(~0u, tile < before + through);
    if (later) {
      const int found = __ffs(later) - 1;
      before += __shfl_sync(~0u, through - mine, found);
      return first + found;
    }
    before += __shfl_sync(~0u, through, 31);
  }
}

// Those of a block's tiles that belong to one unit.
struct Segment {
  Span span;
  int batch;
  int kv_head;
  int row;    // of the unit's first row among those of the kv head
  int rows;   // of the unit
  int first;  // key of the first tile
  int last;   // after the last key
  int tiles;
  int slot;        // of an incomplete result, or -1
  int unit;        // its number among all, and
  unsigned begin;  // of its first tile, in a sequence of tiles: of all units, or of an entry where blocks have parts of one unit

  // Whether a key of its tiles is there at all: the first and the last tile may reach beyond the span.
  __device__ bool has(int key) const {
    return key >= span.begin && key < last;
  }
};

// The parts of a unit: where their results are put aside.
struct Parts {
  int count;
  int head;  // slot of the first, and
  int tail;  // of others i: tail + i * pitch
  int pitch;

  __device__ int slot(int part) const {
    return part == 0 ? head : tail + part * pitch;
  }
};

// The parts of a unit whose tiles begin at `begin`.
__device__ inline Parts parts_of(const StreamK& work, int unit, unsigned begin, int tiles) {
  if (const auto parts = static_cast<int>(work.blocks_per_unit); parts > 0) {
    return {parts, 2 * unit * parts, 2 * unit * parts, 2};
  }
  const int first = block_of(work, begin);
  return {block_of(work, begin + tiles - 1) - first + 1, 2 * first + (start_of(work, first) != begin), 2 * first, 2};
}

// Goes through a block's segments. Even: every unit has all keys, and one block's rows.
template <bool Even = false>
class Segments {
 public:
  __device__ explicit Segments(const DecodeParams& p) : p_(p), work_(share_tiles(p)) {
    const int block = blockIdx.x;
    if (const auto parts = static_cast<int>(work_.blocks_per_unit); parts > 0) {  // the sequence begins with the entry
      const int units = p.kv_heads * p.row_blocks;
      batch_ = block / parts / units;
      const int tiles = batch_ < p.batch ? span_of(p, batch_).tiles : 0;
      const int unit = block / parts % units * tiles;
      at_ = begin_ = unit + block % parts * tiles / parts;
      stop_ = unit + (block % parts + 1) * tiles / parts;
      return;
    }
    at_ = begin_ = start_of(work_, block);
    stop_ = block < work_.blocks ? start_of(work_, block + 1) : begin_;
    if (begin_ < stop_) {
      batch_ = entry_of(p, at_, before_);
    }
  }

  __device__ bool next(Segment& segment) {
    if (at_ >= stop_) {
      return false;
    }
    const int units = p_.kv_heads * p_.row_blocks;
    Span span = span_of(p_, batch_);
#pragma unroll 1
    while (at_ >= before_ + span.tiles * units) {
      before_ += span.tiles * units;
      span = span_of(p_, ++batch_);
    }
    const int unit = (at_ - before_) / span.tiles;
    const int skipped = (at_ - before_) % span.tiles;
    segment.span = span;
    segment.unit = batch_ * units + unit;
    segment.begin = before_ + unit * span.tiles;
    segment.batch = batch_;
    segment.kv_head = unit / p_.row_blocks;
    segment.row = unit % p_.row_blocks * p_.block_rows;
    segment.rows = min(p_.group * p_.q_length - segment.row, p_.block_rows);
    segment.tiles = min(static_cast<int>(stop_ - at_), span.tiles - skipped);
    segment.first = ((span.begin >> p_.tile_shift) + skipped) << p_.tile_shift;
    segment.last = min(span.end, segment.first + segment.tiles * p_.tile_keys);
    segment.slot = segment.tiles == span.tiles ? -1 : 2 * static_cast<int>(blockIdx.x) + (at_ != begin_);
    at_ += segment.tiles;
    return true;
  }

  __device__ Parts parts(const Segment& s) const {
    return parts_of(work_, s.unit, s.begin, s.span.tiles);
  }

 private:
  const DecodeParams& p_;
  StreamK work_;
  unsigned begin_;
  unsigned at_;
  unsigned stop_;
  unsigned before_ = 0;
  int batch_ = 0;
};

// Then there is little to do before the first copy, and nothing between units.
template <>
class Segments<true> {
 public:
  __device__ explicit Segments(const DecodeParams& p) : p_(p) {
    const StreamK& work = p.stream_k;
    const int block = blockIdx.x;
    const int tiles = static_cast<int>(work.unit_tiles);
    if (const int parts = static_cast<int>(work.blocks_per_unit); parts > 0) {
      const int part = block % parts;
      unit_ = block / parts;
      skipped_ = tiles * part / parts;
      left_ = tiles * (part + 1) / parts - skipped_;
    } else {
      const unsigned begin = work.tiles_per_block * block + min(static_cast<unsigned>(block), work.longer_blocks);
      unit_ = static_cast<int>(begin / work.unit_tiles);
      skipped_ = static_cast<int>(begin) - unit_ * tiles;
      left_ = static_cast<int>(work.tiles_per_block + (block < static_cast<int>(work.longer_blocks)));
    }
    batch_ = unit_ / p.kv_heads;
    kv_head_ = unit_ - batch_ * p.kv_heads;
  }

  __device__ bool next(Segment& segment) {
    if (left_ == 0) {
      return false;
    }
    const int tiles = static_cast<int>(p_.stream_k.unit_tiles);
    segment.span = {0, p_.kv_length, p_.kv_length - p_.q_length, tiles};
    segment.unit = unit_++;
    segment.begin = segment.unit * tiles;
    segment.batch = batch_;
    segment.kv_head = kv_head_;
    segment.row = 0;
    segment.rows = p_.group * p_.q_length;
    segment.tiles = min(left_, tiles - skipped_);
    segment.first = skipped_ << p_.tile_shift;
    segment.last = min(p_.kv_length, segment.first + segment.tiles * p_.tile_keys);
    segment.slot = segment.tiles == tiles ? -1 : 2 * static_cast<int>(blockIdx.x) + later_;
    later_ = 1;
    left_ -= segment.tiles;
    skipped_ = 0;
    if (++kv_head_ == p_.kv_heads) {
      kv_head_ = 0;
      ++batch_;
    }
    return true;
  }

  __device__ Parts parts(const Segment& s) const {
    return parts_of(share_tiles(p_), s.unit, s.begin, s.span.tiles);
  }

 private:
  const DecodeParams& p_;
  int unit_;
  int skipped_;  // tiles of it, which are others'
  int left_;     // tiles
  int batch_;
  int kv_head_;
  int later_ = 0;
};

}  // namespace mlx_cuda
