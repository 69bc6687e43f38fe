// What the grouped matrix product's kernels are called with.
#pragma once

namespace mlx_cuda {

// Rows of a launch belong to groups: to group g those from offset g to offset g + 1. Rows of no group come out as zeros.
struct GroupedParams {
  const int* offsets;   // of all groups; may hold anything: what it says is held to the rows that there are
  const int* out_rows;  // where each row's result goes; null: to its own place
  void* out;
  const void* x;            // [rows, depth]; here and below for the kernels without a copy engine
  const void* weights;      // [count, columns, depth], or [count, depth, columns]
  long long x_stride;       // elements between rows
  long long weight_row;     // between rows of a matrix
  long long weight_matrix;  // between matrices
  int has_begin;            // the first offset is where the first group begins; else that is row 0 and the first offset is its end
  int groups;               // of all launches
  int first;                // group of this launch, whose weights are the first that it is given
  int count;                // groups of this launch
  int rows;
  int columns;  // of the result
  int depth;    // what is summed over
};

// The same with packed weights [count, columns, depth]; distances are in bytes.
struct GroupedQuantizedParams {
  GroupedParams rows;
  const void* w;
  const void* scales;
  const void* biases;    // or null
  long long w_distance;  // from one matrix to the next
  long long scale_distance;
  long long row_bytes;  // from one row of the weights to the next
  int row_groups;       // of a row, each with a scale
  int group_shift;      // log2 of a group's values
};

// The gradient of the matrices: for each group, [rows_out, columns], the sum over its rows of the products of a row of y and one of
// x.
struct GroupedWeightsParams {
  const int* offsets;
  const void* x;  // [rows, columns]
  const void* y;  // [rows, rows_out]
  void* out;
  long long x_stride;
  long long y_stride;
  int has_begin;
  int groups;
  int rows;
  int rows_out;
  int columns;
};

// Pairs of a matrix of x, [matrix_rows, depth], and one of the weights: how they become groups of rows.
struct GatherParams {
  const unsigned* lhs;  // of each pair, its matrix of x; null: `repeats` pairs in turn have the same one
  const unsigned* rhs;  // and its weights; what is too large belongs to no group
  int* offsets;         // [groups + 1], of rows
  int* order;           // of the pairs, by group
  int* counts;          // [groups + 1] where shared memory does not hold them, else null
  const void* x;
  void* grouped_x;  // the rows by group
  int* out_rows;    // where the result of each of these goes
  int pairs;
  int groups;
  int matrix_rows;
  int matrices;  // of x
  int repeats;
  int row_units;  // of 16 bytes
};

// The product of few rows, each with the weights of its pair.
struct GroupedFewParams {
  const unsigned* lhs;  // as above
  const unsigned* rhs;
  const void* x;
  const void* weights;
  void* out;
  long long weight_row;
  long long weight_matrix;
  int groups;
  int matrix_rows;
  int matrices;
  int repeats;
  int columns;
  int depth;
};

}  // namespace mlx_cuda
