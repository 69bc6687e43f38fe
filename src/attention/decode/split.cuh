// Split-K: a unit is cut into equal parts of keys, a block for each: block (part, kv head and rows, batch entry).
#pragma once

#include "attention/decode/traits.h"
#include "attention/decode/work.cuh"

namespace mlx_cuda {

// How many parts of a unit have keys, or one.
__device__ inline int parts_of_unit(const DecodeParams& p, const Span& span) {
  const int first = span.begin / DirectTraits::kTileKeys * DirectTraits::kTileKeys;
  return max((span.end - first + p.split_k.keys - 1) / p.split_k.keys, 1);
}

// The part of a unit that a block takes. RowBlocks: a kv head may have several units.
template <bool RowBlocks>
__device__ inline Segment part_of_unit(const DecodeParams& p) {
  const int split = blockIdx.x;
  Segment s{};
  s.batch = blockIdx.z;
  s.kv_head = RowBlocks ? blockIdx.y / p.row_blocks : blockIdx.y;
  s.row = RowBlocks ? blockIdx.y % p.row_blocks * p.block_rows : 0;
  s.unit = blockIdx.z * gridDim.y + blockIdx.y;
  s.rows = min(p.group * p.q_length - s.row, p.block_rows);
  s.span = span_of(p, s.batch);
  s.slot = parts_of_unit(p, s.span) > 1 ? s.unit * p.split_k.splits + split : -1;
  s.first = s.span.begin / DirectTraits::kTileKeys * DirectTraits::kTileKeys + split * p.split_k.keys;
  s.last = min(s.span.end, s.first + p.split_k.keys);
  return s;
}

}  // namespace mlx_cuda
