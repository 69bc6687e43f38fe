// Rows on their way to shared memory, and words of it.
#pragma once

#include "device/mma.cuh"

namespace mlx_cuda {

// Rows [first, first + Rows) of a matrix into shared memory; zeros for those outside [begin, end) and for columns that are not
// there. There they are 16 bytes longer than the data: eight rows in turn then lie in different banks.
template <int Rows, int Bytes, int Threads>
__device__ inline void load_rows(
    unsigned to, const char* from, long long row_bytes, int column_bytes, int first, int begin, int end) {
  constexpr int kUnits = Bytes % 128 == 0 ? 8 : 4;  // of 16 bytes, that adjacent threads copy
  constexpr int kRowsAtOnce = Threads / kUnits;
  constexpr int kPitch = Bytes + 16;
  static_assert(Rows % kRowsAtOnce == 0 && Bytes % (kUnits * 16) == 0);
  const int column = threadIdx.x % kUnits * 16;
  const int row = threadIdx.x / kUnits;
  to += row * kPitch + column;
#pragma unroll
  for (int i = 0; i < Rows / kRowsAtOnce; ++i) {
    const int at = first + row + i * kRowsAtOnce;
    const bool there = at >= begin && at < end;
    const char* source = from + (there ? at * row_bytes : 0) + column;
#pragma unroll
    for (int b = 0; b < Bytes; b += kUnits * 16) {
      copy16_async(to + i * kRowsAtOnce * kPitch + b, source + b, there && column + b < column_bytes);
    }
  }
}

__device__ inline void round_to_tf32(float* values) {
  float4 four = *reinterpret_cast<float4*>(values);
  *reinterpret_cast<uint4*>(values) = make_uint4(to_tf32(four.x), to_tf32(four.y), to_tf32(four.z), to_tf32(four.w));
}

__device__ inline float load_shared(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ inline void store_shared(unsigned address, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace mlx_cuda
