// What the kernel that writes to a paged cache takes by value; filled by primitives/paged.cpp.
#pragma once

namespace mlx_cuda {

// One of keys and values. Distances in elements; rows are adjacent elements.
struct PagedRows {
  void* pages;
  const void* rows;
  long long page_strides[3];  // page, head, place in the page
  long long row_strides[3];   // batch, head, row
  int bytes;                  // of a row
};

struct PagedUpdateParams {
  PagedRows sides[2];
  const int* table;
  const int* lengths;
  long long table_stride;
  int item_bytes;
  int batch;
  int heads;
  int count;  // rows of each entry
  int pages;
  int page_size;
  int table_pages;  // of an entry
};

}  // namespace mlx_cuda
