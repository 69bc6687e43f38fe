// Writes new keys or values into the pages of their sequences.
#include "attention/paged/params.h"

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

}  // namespace mlx_cuda

extern "C" __global__ void __launch_bounds__(256) paged_update(const __grid_constant__ mlx_cuda::PagedUpdateParams params) {
  mlx_cuda::update(params);
}
