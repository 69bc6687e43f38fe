// How the kernel for some rows of x on Hopper is called, and how it divides its work and its shared memory.
#pragma once

namespace mlx_cuda {

// out = x @ w^T. Distances of x are in elements, those of w and of its scales in bytes.
struct QuantizedSm90Params {
  const void* x;             // [matrices, rows, inner]
  const void* w;             // packed [experts, columns, inner]
  const void* scales;        // the same with a number for each group of the last
  const void* biases;        // the same, or null
  const unsigned* x_index;   // which matrix of x each product takes; null: its own number
  const unsigned* w_index;   // which expert; null: its own number
  void* ordered;             // x as products read it
  void* out;                 // [products, rows, columns]
  float* partial;            // [products, blocks of rows, tiles of columns, splits, rows of a block, columns of a tile]
  unsigned* arrived;         // splits that have written theirs, of each result of a block; unused with one
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
  int block_rows;   // of x, of each block
  int splits;       // blocks that share rows of w
  int range;        // of inner, of each of them
  int results;      // of blocks
  int wide;         // the scales of 256 values can be read at once
};

struct QuantizedSm90 {
  static constexpr int kConsumers = 2;               // warpgroups, each with 64 rows of w
  static constexpr int kTileRows = kConsumers * 64;  // of w, of a block
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kPart = 128;                // of inner: what is copied and multiplied at once
  static constexpr int kRange = 256;               // of inner: what blocks share begins at multiples of this
  static constexpr int kScaleBytes = 16 * 20 * 4;  // of a warp: 16 rows of w, 512 values
  static constexpr int kOrderWarps = 4;            // of a block that puts x in order, each with 8 rows of a part

  int block_rows;

  constexpr int stages() const {  // parts of x in shared memory
    return block_rows == 128 ? 4 : 6;
  }
  constexpr int depth() const {  // parts of w
    return block_rows == 128 ? 5 : 6;
  }
  constexpr int stage_bytes() const {
    return block_rows * kPart * 2;
  }
  static constexpr int slot_bytes(int bits) {
    return kTileRows * kPart / 8 * bits;
  }
  constexpr int shared_bytes(int bits) const {
    return 1024 + stages() * (stage_bytes() + 16) + depth() * slot_bytes(bits) + kConsumers * 4 * kScaleBytes;
  }
};

}  // namespace mlx_cuda
