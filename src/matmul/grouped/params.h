// Parameters of the grouped GEMM kernels, and how they divide their work and their shared memory.
#pragma once

namespace mlx_cuda {

// Rows of a launch belong to groups: to group g those from offset g to offset g + 1. Rows of no group come out as zeros.
struct GroupedParams {
  const int* offsets;   // of all groups; may hold anything: they are clamped to the number of rows
  const int* out_rows;  // the position of each row's result; null: its own
  void* out;
  const void* x;            // [rows, depth]; here and below for the kernels without a copy engine
  const void* weights;      // [count, columns, depth], or not transposed [count, depth, columns]
  long long x_stride;       // elements between rows
  long long weight_row;     // between rows of a matrix
  long long weight_matrix;  // between matrices
  int has_begin;            // the first offset is where the first group begins; else that is row 0 and the first offset is its end
  int groups;               // of all launches
  int first;                // group of this launch, whose weights are the first that it is given
  int count;                // groups of this launch
  int rows;
  int columns;  // of the result
  int depth;    // K
};

// The same with quantized weights [count, columns, depth]; strides are in bytes.
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

// The gradient of the weights: for each group, [rows_out, columns] = y^T x over its rows.
struct GroupedGradientParams {
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
  const unsigned* lhs;  // each pair's matrix of x; null: `repeats` adjacent pairs have the same one
  const unsigned* rhs;  // and its weights; too large a number belongs to no group
  int* offsets;         // [groups + 1], of rows
  int* order;           // of the pairs, by group; null: they are in this order
  int* counts;          // [groups + 1] where shared memory does not hold them, else null
  const void* x;
  void* grouped_x;  // the rows by group
  int* out_rows;    // the position of each of these results; null: its own
  int pairs;
  int groups;
  int matrix_rows;
  int matrices;  // of x
  int repeats;
  int row_units;  // of 16 bytes
};

// The GEMV of few rows, each with the weights of its pair.
struct GatherMvParams {
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

// Tiles of the result without Hopper's instructions, for the GEMM and the gradient.
struct GroupedTile {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 128;
  static constexpr int kDepth = 32;  // K of a stage
  static constexpr int kStages = 3;
  static constexpr int kThreads = 128;
  static constexpr int kRowBytes = kRows * kDepth * 2;
  static constexpr int kStageBytes = kRowBytes + kColumns * kDepth * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

// On Hopper: a tile's columns, and the pipeline stages in shared memory.
struct GroupedSm90Tile {
  static constexpr int kRows = 128;
  static constexpr int kDepth = 64;     // K of a stage: 128 adjacent bytes, or 64 rows of them
  static constexpr int kFewRows = 16;   // of x that are copied at once where a tile has few
  static constexpr int kConsumers = 2;  // warpgroups, besides one that produces
  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kRowBytes = kRows * kDepth * 2;

  int columns;
  int stages;

  constexpr int weight_bytes() const {
    return columns * kDepth * 2;
  }
  // Swizzled boxes are aligned to 1024 bytes; each stage has two barriers.
  constexpr int shared_bytes() const {
    return stages * (kRowBytes + weight_bytes()) + 1024 + 2 * stages * 8;
  }
};

inline constexpr GroupedSm90Tile kGroupedGradientSm90{128, 6};

// With quantized weights: some steps wait packed after the stages.
struct GroupedQuantizedSm90 {
  static constexpr GroupedSm90Tile kTile{256, 4};
  static constexpr int kProducers = 128;
  static constexpr int kUnit = 32;  // adjacent values that a producer has of a row
  static constexpr int kPackedAt = (kTile.shared_bytes() + 15) / 16 * 16;

  static constexpr int step_bytes(int bits) {
    return kTile.columns * GroupedSm90Tile::kDepth * bits / 8;
  }
  static constexpr int steps(int bits) {
    const int fit = 32 * 1024 / step_bytes(bits);
    return fit < 8 ? fit : 8;
  }
  static constexpr int shared_bytes(int bits) {
    return kPackedAt + steps(bits) * step_bytes(bits);
  }
};

struct GroupPairs {
  static constexpr int kThreads = 1024;  // of its one block
};

struct GatherMv {
  static constexpr int kThreads = 256;
  static constexpr int kWarpColumns = 4;
  static constexpr int kBlockColumns = kThreads / 32 * kWarpColumns;
};

}  // namespace mlx_cuda
