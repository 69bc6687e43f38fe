#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <cstdint>

namespace mlx_cuda {

// The pages [P, Hkv, page_size, D] of keys and [P, Hkv, page_size, Dv] of values with the rows of keys [B, Hkv, T, D] and values
// [B, Hkv, T, Dv] written at positions lengths[b] - T to lengths[b] - 1 of each sequence, in the pages that the table, int32 [B,
// n], names; rows before position 0, beyond the table or without a page are not written. Pages without other owners are written
// in place. All of one type of 16 or 32 bits, D and Dv multiples of 8, no dimension empty.
Arrays paged_cache_update(
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& keys,
    const mx::array& values,
    const mx::array& table,
    const mx::array& lengths,
    const mx::Stream& stream);

// The same, at once and in place, even if the pages have other owners. Both may be of any 16 or 32 bits and of any number of
// columns: rows of more than 16 bytes that are not a multiple of it take longer.
void write_to_pages(
    const Arrays& pages, const Arrays& rows, const mx::array& table, const mx::array& lengths, const mx::Stream& stream);

// A checksum of each row [B, heads, T, …] of all of these together, uint64 [B, T], at once: the sum of its words of 32 bits (of
// 16 if its bytes are not a multiple of four), each times an odd number by seed and position. All have the same B and T, and 16
// or 32 bits.
mx::array row_sums(const Arrays& rows, std::uint64_t seed, const mx::Stream& stream);

// MLX keeps the Data of all inputs until the work that reads them has run, so pages that are still being read would be copied. A
// kernel of the stream that updated them may read them without that: its node names them as outputs, since MLX's graphs do not
// order a reader before the next writer, and once it is added its input is made to hold the memory apart.
bool updated_on(const mx::array& pages, const mx::Stream& stream);
void hold_apart(const mx::array& pages);

}  // namespace mlx_cuda
