// Writes new keys or values into the pages of their sequences; and computes checksums of rows, which identify equal pages.
#include "attention/paged/params.h"
#include "device/kernel.cuh"
#include "device/reduce.cuh"

namespace mlx_cuda {

// By eight lanes.
template <typename Piece>
__device__ inline void copy_row(char* to, const char* from, int bytes) {
  for (int at = threadIdx.x % 8 * sizeof(Piece); at < bytes; at += 8 * sizeof(Piece)) {
    *reinterpret_cast<Piece*>(to + at) = *reinterpret_cast<const Piece*>(from + at);
  }
}

__device__ inline void update(const PagedUpdateParams& p) {
  const long long index = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 8;  // [batch, head, row]
  if (index >= static_cast<long long>(p.batch) * p.heads * p.count) {
    return;
  }
  const auto row = static_cast<int>(index % p.count);
  const auto head = static_cast<int>(index / p.count % p.heads);
  const auto batch = static_cast<int>(index / p.count / p.heads);
  const int place = p.lengths[batch] - p.count + row;
  if (place < 0 || place / p.page_size >= p.table_pages) {
    return;
  }
  const int page = p.table[batch * p.table_stride + place / p.page_size];
  if (page < 0 || page >= p.page_count) {
    return;
  }
  const char* from = static_cast<const char*>(p.rows) +
                     (batch * p.row_strides[0] + head * p.row_strides[1] + row * p.row_strides[2]) * p.item_bytes;
  char* to = static_cast<char*>(p.pages) +
             (page * p.page_strides[0] + head * p.page_strides[1] + place % p.page_size * p.page_strides[2]) * p.item_bytes;
  if (p.row_bytes % 16 == 0) {
    copy_row<uint4>(to, from, p.row_bytes);
  } else {  // of scales, perhaps only one
    copy_row<unsigned short>(to, from, p.row_bytes);
  }
}

// The number that a seed gives for an index (splitmix64, doi:10.1145/2660193.2660195), made odd: so words that differ in one bit
// have sums that differ.
__device__ inline unsigned long long factor(unsigned long long seed, unsigned long long index) {
  unsigned long long z = seed + (index + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (z ^ (z >> 31)) | 1;
}

template <typename Word>
__device__ inline void sum_rows(const RowSumsParams& p) {
  const long long index = static_cast<long long>(blockIdx.x) * RowSumsParams::kWarps + threadIdx.x / 32;  // [batch, row]
  if (index >= static_cast<long long>(p.batch) * p.count) {
    return;
  }
  const long long batch = index / p.count;
  const long long row = index % p.count;
  const int words = p.row_bytes / static_cast<int>(sizeof(Word));
  unsigned long long sum = 0;
  for (int head = 0; head < p.heads; ++head) {
    const char* const from = static_cast<const char*>(p.rows) +
                             (batch * p.row_strides[0] + head * p.row_strides[1] + row * p.row_strides[2]) * p.item_bytes;
    for (int word = threadIdx.x % 32; word < words; word += 32) {
      const unsigned long long value = reinterpret_cast<const Word*>(from)[word];
      sum += value * factor(p.seed, p.first + static_cast<unsigned long long>(head) * words + word);
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) {
    p.sums[index] += sum;
  }
}

MLX_CUDA_KERNEL(paged_update, (256), PagedUpdateParams, update)

extern "C" __global__ void __launch_bounds__(RowSumsParams::kWarps * 32) row_sums(const __grid_constant__ RowSumsParams params) {
  if (params.row_bytes % 4 == 0) {
    sum_rows<unsigned>(params);
  } else {
    sum_rows<unsigned short>(params);
  }
}

}  // namespace mlx_cuda
