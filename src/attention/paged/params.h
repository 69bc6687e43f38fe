// Parameters of the kernel that writes to a paged KV cache, passed by value; attention/paged/primitive.cpp fills them in.
#pragma once

namespace mlx_cuda {

// Distances in elements; those of a row are adjacent.
struct PagedUpdateParams {
  void* pages;
  const void* rows;
  const int* table;
  const int* lengths;
  long long page_strides[3];  // page, head, row in the page
  long long row_strides[3];   // batch, head, row
  long long table_stride;
  int item_bytes;
  int row_bytes;
  int batch;
  int heads;
  int count;  // rows of each entry
  int page_count;
  int page_size;
  int table_pages;  // of an entry
};

// The same of the checksum kernel. A warp processes a row of all heads.
struct RowSumsParams {
  static constexpr int kWarps = 8;  // of a block
  unsigned long long* sums;         // [batch, count], to which it adds
  const void* rows;
  long long row_strides[3];
  unsigned long long seed;
  unsigned long long first;  // factor, of all those that are drawn from the seed
  int item_bytes;
  int row_bytes;
  int batch;
  int heads;
  int count;
};

}  // namespace mlx_cuda
