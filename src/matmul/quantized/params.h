// What the kernels of quantised weights take by value; filled by matmul/quantized/dequantize.cpp.
#pragma once

namespace mlx_cuda {

// out = x @ w^T, or x @ w. Distances of x are in elements, those of w and of its scales in bytes.
struct FewParams {
  const void* x;             // [batches of x, rows, inner]
  const void* w;             // packed [experts, columns, inner], or [experts, inner, columns]
  const void* scales;        // the same with a number for each group of the last
  const void* biases;        // the same, or null
  const unsigned* x_index;   // which matrix of x each product takes, one after the last being the last; null: its own number
  const unsigned* w_index;   // which expert, likewise; null: its own number
  void* out;                 // [products, rows, columns]
  float* partial;            // [splits, products, rows, columns], or null: one split
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
  int row_warps;    // warps of a block that have different rows of w
  int inner_warps;  // warps that share rows of w and have different parts of inner
  int splits;       // blocks that share rows of w
  int range;        // of inner, of each of them
  int wide;         // the scales of a slice can be read at once
};

// Distances of the packed weights and the scales in bytes, of the result in elements.
struct DequantizeParams {
  const void* w;
  const void* scales;
  const void* biases;  // or null
  const int* offsets;  // [experts + 1], or null: experts whose offset is the next one's are left out
  void* out;
  long long w_distance;
  long long scale_distance;
  long long out_distance;
  long long pieces;  // of 8 values, of one expert
  int group_shift;   // log2 of a group's values
};

}  // namespace mlx_cuda
