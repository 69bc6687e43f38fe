// Rows on their way to shared memory, and words of it.
#pragma once

#include "attention/flash/kernels.h"
#include "attention/flash/tiles.cuh"
#include "device/mma.cuh"

namespace mlx_cuda {

// The swizzled position of a 16-byte unit in a row.
__device__ inline int swizzle(int row, int byte) {
  return byte ^ row % 8 * 16;
}

// The offset from one unit to another that is so many bytes (a multiple of 32) after it in the same row.
template <bool Swizzled>
__device__ inline unsigned along(unsigned address, int bytes) {
  return Swizzled ? (address ^ bytes % 128) + bytes / 128 * 128 : address + bytes;
}

// Rows [first, first + Rows) of a matrix into shared memory; zeros for those outside [begin, end) and for columns that are not
// there.
template <int Rows, int Bytes, int Pitch, int Threads, bool Swizzled>
__device__ inline void load_rows(
    unsigned to, const char* from, long long row_bytes, int column_bytes, int first, int begin, int end) {
  constexpr int kUnits = Bytes % 128 == 0 ? 8 : 4;  // of 16 bytes, that adjacent threads copy
  constexpr int kRowsAtOnce = Threads / kUnits;
  static_assert(Rows % kRowsAtOnce == 0 && Bytes % (kUnits * 16) == 0 && (!Swizzled || (kUnits == 8 && kRowsAtOnce % 8 == 0)));
  const int column = threadIdx.x % kUnits * 16;
  const int row = threadIdx.x / kUnits;
  to += row * Pitch + (Swizzled ? swizzle(row, column) : column);
#pragma unroll
  for (int i = 0; i < Rows / kRowsAtOnce; ++i) {
    const int at = first + row + i * kRowsAtOnce;
    const bool there = at >= begin && at < end;
    const char* source = from + (there ? at * row_bytes : 0) + column;
#pragma unroll
    for (int b = 0; b < Bytes; b += kUnits * 16) {
      copy16_async(to + i * kRowsAtOnce * Pitch + b, source + b, there && column + b < column_bytes);
    }
  }
}

__device__ inline void round_to_tf32(float* values) {
  float4 four = *reinterpret_cast<float4*>(values);
  *reinterpret_cast<uint4*>(values) = make_uint4(to_tf32(four.x), to_tf32(four.y), to_tf32(four.z), to_tf32(four.w));
}

// A block's queries, and the keys and values of its head, on their way to where the kernel's shape has them.
template <typename T, FlashShape S>
class Loader {
 public:
  __device__ Loader(const FlashParams& params, const Place& place, unsigned shared) : p(params), place(place), shared(shared) {
    const int kv_head = place.head / (p.heads / p.kv_heads);
    k_head = head_of(p.k, p.k_strides, kv_head, place.k_offset);
    v_head = head_of(p.v, p.v_strides, kv_head, place.k_offset);
  }

  __device__ void queries() const {
    load_rows<S.rows(), S.head_dim * S.itemsize, S.pitch(), S.threads(), S.swizzled()>(
        shared, head_of(p.q, p.q_strides, place.head, place.q_offset), p.q_strides.row * S.itemsize, p.head_dim * S.itemsize,
        place.row0, 0, place.rows);
  }
  __device__ void keys(int tile, int stage) const {
    load_rows<S.keys, S.head_dim * S.itemsize, S.pitch(), S.threads(), S.swizzled()>(
        shared + S.keys_at() + stage * S.keys * S.pitch(), k_head, p.k_strides.row * S.itemsize, p.head_dim * S.itemsize,
        place.first_key(tile, S.keys), place.begin, place.end);
  }
  __device__ void values(int tile, int stage) const {
    load_rows<S.keys, S.v_head_dim * S.itemsize, S.value_pitch(), S.threads(), S.swizzled()>(
        shared + S.values_at() + stage * S.keys * S.value_pitch(), v_head, p.v_strides.row * S.itemsize, p.v_head_dim * S.itemsize,
        place.first_key(tile, S.keys), place.begin, place.end);
  }

 private:
  __device__ const char* head_of(const void* in, const FlashStrides& strides, int head, int row) const {
    return static_cast<const char*>(in) + (place.batch * strides.batch + head * strides.head + row * strides.row) * S.itemsize;
  }

  const FlashParams& p;
  const Place& place;
  unsigned shared;
  const char* k_head;
  const char* v_head;
};

}  // namespace mlx_cuda
