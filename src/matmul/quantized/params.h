// What the kernels of products with quantised weights take by value.
#pragma once

namespace mlx_cuda {

// out = x @ w^T, or x @ w. Distances of x are in elements, those of w and of its scales in bytes. The kernels' own parameters
// derive from this; its size is a multiple of 8, so that every compiler puts them at the same place behind it.
struct QuantizedProduct {
  const void* x;             // [matrices, rows, inner]
  const void* w;             // packed [experts, columns, inner], or [experts, inner, columns]
  const void* scales;        // the same with a number for each group of the last
  const void* biases;        // the same, or null
  const unsigned* x_index;   // which matrix of x each product takes, one after the last being the last; null: its own number
  const unsigned* w_index;   // which expert, likewise; null: its own number
  void* out;                 // [products, rows, columns]
  float* partial;            // the sums of each split, or null: one split
  long long x_distance;      // from one matrix of x to the next
  long long x_row;           // from one row of it to the next
  long long w_distance;      // from one expert to the next; 0: there is only one
  long long scale_distance;  // the same of scales and biases
  long long row_bytes;       // of w: from one of its rows to the next
  int matrices;              // of x
  int experts;
  int rows;
  int columns;
  int inner;
  int groups;       // of a row of w
  int group_shift;  // log2 of a group's values
  int wide;         // the scales of kScaleRange values can be read at once

  static constexpr int kScaleRange = 256;
};

// Products whose blocks share results: each sums over a range of inner.
struct SplitProduct : QuantizedProduct {
  int block_rows;  // of x, of each block
  int splits;      // blocks that share a result
  int range;       // of inner, of each of them
  int row_blocks;  // blocks that have different rows of x
};

}  // namespace mlx_cuda
