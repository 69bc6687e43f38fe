// How the products of a step's few rows are called, and how they divide their work.
#pragma once

namespace mlx_cuda {

// What becomes of the sums.
enum class RowEpilogue : int {
  none,
  add,     // plus another array
  swiglu,  // silu of the first part times the second
};

// One matrix of several that the same rows are multiplied by.
struct RowPart {
  const void* w;       // [columns, inner], 16-bit or packed
  const void* scales;  // [columns, groups], and
  const void* biases;  // likewise, of packed ones
  void* out;           // [rows, columns]
  int columns;
  int first;  // of all parts' rows of w, the first of its own
};

// x is [rows, inner], of which each row may be normalised first: x / sqrt(mean(x^2) + eps) * norm.
//
// Of experts, w of a part is all their matrices, of which the kernel reads the chosen ones. Either each gives `expert_rows` rows of
// the result, one expert after another; or each is multiplied by its own row of x, and their products are summed, as if inner were
// `turns` times as long.
//
// A block has `block_rows` adjacent rows of all parts, or of both parts that are gated. Halves of tiles are up to 8 rows of one
// part. A unit of work is 128 bytes of a tile's rows; warps take the block's in turn, so that together they read what is adjacent.
struct RowProductParams {
  static constexpr int kMostParts = 3;
  static constexpr int kMostRows = 8;     // of x
  static constexpr int kMostChosen = 32;  // experts: a lane for each
  static constexpr int kTileRows = 16;    // of w
  static constexpr int kHalfRows = 8;
  static constexpr int kLeastWarps = 4;   // of a block: a multiple of this
  static constexpr int kMostWarps = 12;   // and no more
  static constexpr int kStages = 3;       // of a warp's ring: units that are under way
  static constexpr int kUnitBytes = 128;  // of a row of w
  static constexpr int kStageBytes = kTileRows * kUnitBytes;
  static constexpr int kZeroBytes = 256;     // for columns that are no row's
  static constexpr int kHalfBytes = 32;      // of what a block knows of half a tile
  static constexpr int kMostSums = 16384;    // bytes of partial sums, and
  static constexpr int kMostScales = 32768;  // of scales and biases, which bound the tiles of a block

  const void* x;
  const void* norm;         // [inner], or null
  const void* added;        // [rows, columns], or null
  const unsigned* experts;  // [chosen]: which of the matrices of each part, or null
  const void* factors;      // [turns]: what x is multiplied by for each of them, or null
  float eps;
  int rows;
  int inner;
  int chosen;       // experts
  int expert_rows;  // of w, of each
  int turns = 1;    // experts whose products are summed: x is [turns, inner] then, otherwise each expert has rows of the result
  int groups;       // of a row of w: values that share a scale
  int parts;
  int row_limit;   // of all parts' rows of w; of one where they are gated
  int block_rows;  // of these
  int tiles;       // of a block, at most
  RowEpilogue epilogue;
  RowPart part[kMostParts];

  static constexpr int unit_values(int bits) {
    return kUnitBytes * 8 / bits;
  }
  // A row's values that four threads read at once.
  static constexpr int span_values(int bits) {
    return unit_values(bits) / 2;
  }
  // The parts of a span that have a scale each: a row of x has two columns for each of them.
  static constexpr int scales_of_span(int bits, int group) {
    return bits == 16 || group >= span_values(bits) ? 1 : span_values(bits) / group;
  }
  // The columns of so many rows of x, as 8 of a tensor core product.
  static constexpr int blocks(int bits, int group, int rows) {
    return bits == 16 ? 1 : (rows * scales_of_span(bits, group) + 3) / 4;
  }
  constexpr int turn_units(int bits) const {
    return (inner + unit_values(bits) - 1) / unit_values(bits);
  }
  constexpr int units(int bits) const {
    return turns * turn_units(bits);
  }
  // Bytes of a row of x, with zeros up to a whole unit: 16-bit numbers, or both halves of integers of 16 bits. The first values of
  // what threads read at once do not lie in the same banks.
  constexpr int x_distance(int bits) const {
    return units(bits) * unit_values(bits) * 2 + (bits == 16 ? 16 : 128);
  }
  // The groups of a span, each with a step and a sum.
  constexpr int groups_of_span(int bits, int group) const {
    return rows * scales_of_span(bits, group);
  }
  constexpr int groups_bytes(int bits, int group) const {
    return bits == 16 ? 0 : units(bits) * 2 * groups_of_span(bits, group) * 8;
  }
  // Of a row's scales, with zeros up to a whole unit; an odd number of 8 bytes, so that rows lie in different banks.
  constexpr int scales_distance(int bits, int group) const {
    return bits == 16 ? 0 : (units(bits) * unit_values(bits) / group * 2 + 7) / 8 / 2 * 16 + 8;
  }
  constexpr int scales_bytes(int bits, int group) const {
    return 2 * tiles * kTileRows * scales_distance(bits, group);
  }
  constexpr int square_bytes() const {
    return rows * (kMostWarps + 4) * 4;
  }
  constexpr int sums_bytes() const {
    return tiles * rows * kTileRows * kMostWarps * 4;
  }
  constexpr int shared_bytes(int bits, int group, int warps) const {
    return warps * kStages * kStageBytes + tiles * 2 * kHalfBytes + kZeroBytes + rows * x_distance(bits) +
           groups_bytes(bits, group) + square_bytes() + scales_bytes(bits, group) + sums_bytes();
  }
};

}  // namespace mlx_cuda
