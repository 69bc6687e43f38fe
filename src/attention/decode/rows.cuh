// What the decode kernels share: which keys a worker takes, and which of them a query sees.
//
// A unit is a batch entry, a kv head and, of many rows, a part of them. The tiles of keys of all units form one sequence, which the
// workers (blocks that are all resident at once) share evenly: the time follows the sum of the lengths, whatever the longest. A
// worker that takes a whole unit writes its result; what of a unit is not whole goes to one of two slots of the worker, for its
// first and its last unit (results.cuh).
#pragma once

#include "attention/decode/params.h"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

constexpr int kTileRows = 16;

// The keys that some query of a batch entry sees.
struct Span {
  int begin;
  int end;
  int diagonal;  // the key that stands at the place of the first query
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

// How the tiles of all units are shared.
struct Work {
  int workers;
  unsigned quota;       // tiles of a worker
  unsigned extra;       // workers that have one more: the first
  unsigned parts;       // of each unit, one for each worker, where that is nearly as even; otherwise 0, and
  unsigned unit_tiles;  // tiles of it

  __device__ unsigned start(unsigned worker) const {
    return parts > 0 ? worker / parts * unit_tiles + worker % parts * unit_tiles / parts : quota * worker + min(worker, extra);
  }
  __device__ int worker_of(unsigned tile) const {
    if (parts > 0) {
      return static_cast<int>(tile / unit_tiles * parts + ((tile % unit_tiles + 1) * parts - 1) / unit_tiles);
    }
    const unsigned pivot = extra * (quota + 1);
    return static_cast<int>(tile < pivot ? tile / (quota + 1) : extra + (tile - pivot) / quota);
  }
};

__device__ inline unsigned tiles_of(const DecodeParams& p, int batch) {
  return batch < p.batch ? span_of(p, batch).tiles * p.kv_heads * p.row_blocks : 0;
}

__device__ inline unsigned warp_sum(unsigned value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
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

__device__ inline Work share_work(const DecodeParams& p) {
  if (p.unit_tiles > 0) {
    return {p.workers, p.quota, p.extra, static_cast<unsigned>(p.parts), static_cast<unsigned>(p.unit_tiles)};
  }
  const unsigned total = tiles_before(p, p.batch);
  const unsigned workers = min(static_cast<unsigned>(p.workers), max(total / p.fewest_tiles, 1u));
  return {static_cast<int>(workers), total / workers, total % workers, 0, 0};
}

// The batch entry that a tile (of those that there are) belongs to, and the tiles before those of that entry.
__device__ inline int entry_of(const DecodeParams& p, unsigned tile, unsigned& before) {
  before = 0;
  if (p.unit_tiles > 0) {
    const unsigned each = p.unit_tiles * p.kv_heads * p.row_blocks;
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

// One part of a worker's tiles: those that belong to one unit.
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
  unsigned begin;  // of its first tile
};

// The parts of a unit: where their results are put aside.
struct Parts {
  int count;
  int head;  // slot of the first, and
  int tail;  // of others i: tail + i * pitch
  int pitch;
};

// The parts of the unit of a segment.
__device__ inline Parts parts_of(const Work& work, const Segment& s) {
  const int first = work.worker_of(s.begin);
  return {work.worker_of(s.begin + s.span.tiles - 1) - first + 1, 2 * first + (work.start(first) != s.begin), 2 * first, 2};
}

// Goes through a worker's segments. Even: every unit has all keys, and one block's rows.
template <bool Even = false>
class Segments {
 public:
  __device__ explicit Segments(const DecodeParams& p) : p_(p), work_(share_work(p)) {
    const int worker = blockIdx.x;
    at_ = begin_ = work_.start(worker);
    stop_ = worker < work_.workers ? work_.start(worker + 1) : begin_;
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
    return parts_of(work_, s);
  }

 private:
  const DecodeParams& p_;
  Work work_;
  unsigned begin_;
  unsigned at_;
  unsigned stop_;
  unsigned before_ = 0;
  int batch_ = 0;
};

// Then little has to be done before the first copy, and nothing from one unit to the next.
template <>
class Segments<true> {
 public:
  __device__ explicit Segments(const DecodeParams& p) : p_(p) {
    const unsigned worker = blockIdx.x;
    if (p.parts > 0) {
      const int part = static_cast<int>(worker) % p.parts;
      unit_ = static_cast<int>(worker) / p.parts;
      skipped_ = p.unit_tiles * part / p.parts;
      left_ = p.unit_tiles * (part + 1) / p.parts - skipped_;
    } else {
      const unsigned begin = p.quota * worker + min(worker, p.extra);
      unit_ = static_cast<int>(begin / p.unit_tiles);
      skipped_ = static_cast<int>(begin) - unit_ * p.unit_tiles;
      left_ = static_cast<int>(p.quota + (worker < p.extra));
    }
    batch_ = unit_ / p.kv_heads;
    kv_head_ = unit_ - batch_ * p.kv_heads;
  }

  __device__ bool next(Segment& segment) {
    if (left_ == 0) {
      return false;
    }
    segment.span = {0, p_.kv_length, p_.kv_length - p_.q_length, p_.unit_tiles};
    segment.unit = unit_++;
    segment.begin = segment.unit * p_.unit_tiles;
    segment.batch = batch_;
    segment.kv_head = kv_head_;
    segment.row = 0;
    segment.rows = p_.group * p_.q_length;
    segment.tiles = min(left_, p_.unit_tiles - skipped_);
    segment.first = skipped_ << p_.tile_shift;
    segment.last = min(p_.kv_length, segment.first + segment.tiles * p_.tile_keys);
    segment.slot = segment.tiles == p_.unit_tiles ? -1 : 2 * static_cast<int>(blockIdx.x) + later_;
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
    return parts_of(share_work(p_), s);
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

// The head and query of a row.
struct Row {
  int head;
  int query;
};

__device__ inline Row row_of(const DecodeParams& p, const Segment& s, int row) {
  return {s.kv_head * p.group + (s.row + row) / p.q_length, (s.row + row) % p.q_length};
}

// Whether every query of a unit sees every key of a tile, and nothing but a factor is done to their scores.
__device__ inline bool whole_tile(const DecodeParams& p, const Segment& s, int tile) {
  return p.plain && tile >= s.span.begin && tile + p.tile_keys <= s.last &&
         (p.window_left < 0 || tile >= s.span.end - 1 - p.window_left) &&
         (p.window_right < 0 || tile + p.tile_keys - 1 <= s.span.diagonal + p.window_right);
}

__device__ inline float capped(const DecodeParams& p, float score) {
  return p.softcap > 0 ? p.softcap * kLog2e * (1.0f - 2.0f / (exp2f(2.0f * kLog2e * score) + 1.0f)) : score;
}

// A score in units of log2(e), or minus infinity where the row does not see the key.
template <typename T>
__device__ inline float restricted(const DecodeParams& p, const Segment& s, float score, const Row& row, bool there, int key) {
  score = capped(p, score * p.scale);
  const int diagonal = s.span.diagonal + row.query;
  bool seen = there && key >= s.span.begin && key < s.last;
  seen = seen && (p.window_left < 0 || key >= diagonal - p.window_left);
  seen = seen && (p.window_right < 0 || key <= diagonal + p.window_right);
  if (p.mask && seen) {
    const long long at =
        s.batch * p.mask_strides[0] + row.head * p.mask_strides[1] + row.query * p.mask_strides[2] + key * p.mask_strides[3];
    if (p.mask_is_bool) {
      seen = static_cast<const unsigned char*>(p.mask)[at] != 0;
    } else {
      // A finite number stays finite, however low.
      const float bias = to_float(static_cast<const T*>(p.mask)[at]);
      score = bias == -kInfinity ? bias : fmaxf(fmaf(kLog2e, bias, score), -kLargest);
    }
  }
  return seen ? score : -kInfinity;
}

// The keys [x, y) that a row of the unit sees.
__device__ inline int2 keys_of(const DecodeParams& p, const Segment& s, int row) {
  const int diagonal = s.span.diagonal + (s.row + row) % p.q_length;
  const int from = p.window_left < 0 ? s.span.begin : max(s.span.begin, diagonal - p.window_left);
  const int to = p.window_right < 0 ? s.last : min(s.last, diagonal + p.window_right + 1);
  return make_int2(from, row < s.rows ? to : 0);
}

// Scores of a lane for keys `key`, `key` + 1 of each of `Blocks` blocks of 8 keys and for rows `row` and `row` + 8, as products
// leave them: in units of log2(e) or minus infinity afterwards.
template <typename T, int Blocks, bool Masks = true>
__device__ inline void restrict_scores(const DecodeParams& p, const Segment& s, float (*scores)[4], int row, int key) {
  if (!Masks || !p.mask) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 seen = keys_of(p, s, row + half * 8);
#pragma unroll
      for (int block = 0; block < Blocks; ++block) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = key + block * 8 + e;
          float& score = scores[block][half * 2 + e];
          score = at >= seen.x && at < seen.y ? capped(p, score * p.scale) : -kInfinity;
        }
      }
    }
    return;
  }
  // This is rare, so it is kept short: in a loop, by way of local memory.
  float staged[Blocks * 4];
#pragma unroll
  for (int i = 0; i < Blocks * 4; ++i) {
    staged[i] = scores[i / 4][i % 4];
  }
#pragma unroll 1
  for (int i = 0; i < Blocks * 4; ++i) {
    const int mine = row + i % 4 / 2 * 8;
    staged[i] = restricted<T>(p, s, staged[i], row_of(p, s, mine), mine < s.rows, key + i / 4 * 8 + i % 2);
  }
#pragma unroll
  for (int i = 0; i < Blocks * 4; ++i) {
    scores[i / 4][i % 4] = staged[i];
  }
}

// Where a piece of 16 bytes of a row of K or V lies in shared memory: exchanged with others of eight such that neither a fragment
// of K (eight rows, four adjacent pieces) nor one of V (every second of eight rows, eight pieces) meets another in a bank.
__device__ inline int place_of(int row, int piece) {
  return piece ^ (row & 1) << 2 ^ (row & 6);
}

// Copies 16 bytes to shared memory meanwhile, or zeros; `from` is not read then. Keys and values are read once: they leave the L2
// cache first, so that the results to be merged stay in it.
__device__ inline void copy16(void* to, const void* from, bool there) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  unsigned long long once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(address), "l"(from),
               "r"(there ? 16 : 0), "l"(once)
               : "memory");
}

}  // namespace mlx_cuda
