// Parameters of the GEMVs of a decode step, and how they divide their work.
#pragma once

namespace mlx_cuda {

// The epilogue of the sums.
enum class GemvEpilogue : int {
  none,
  add,         // plus another array
  swiglu,      // silu of the first part times the second
  geglu,       // exact gelu
  geglu_tanh,  // its approximation
};
constexpr bool is_gated(GemvEpilogue epilogue) {
  return epilogue >= GemvEpilogue::swiglu;
}

// The format of w in memory, and constants that depend on it.
struct GemvForm {
  int bits = 16;
  int group_shift = 5;  // log2 of the values that share a scale
  bool floats = false;  // floats of 4 or 8 bits: their scales are bytes, and there are no biases
  bool many = false;    // 4 bits for more rows of x, on Hopper: not as integers

  constexpr bool packed() const {
    return bits < 16;
  }
  // Whether packed values are multiplied as integers (operands.cuh), not as 16-bit numbers (unpacked_rows.cuh).
  constexpr bool integers() const {
    return !floats && !many && (bits == 4 || bits == 8);
  }
  // A unit of work has so many adjacent values of each row: 128 bytes, or those of 256 values.
  constexpr int unit_values() const {
    return bits < 8 ? 256 : 1024 / bits;
  }
  constexpr int unit_bytes() const {
    return unit_values() / 8 * bits;
  }
  // From row to row of a unit in shared memory: threads that read a span of all rows find them in different banks.
  constexpr int ring_bytes() const {
    return unit_bytes() + (bits % 2 != 0 ? 16 : bits % 4 != 0 ? 32 : 0);
  }
  // A row's values that four threads read at once.
  constexpr int span_values() const {
    return unit_values() / 2;
  }
  // The parts of a span that have a scale each: as integers, a row of x has two columns for each of them.
  constexpr int scales_of_span() const {
    return packed() && span_values() >> group_shift > 1 ? span_values() >> group_shift : 1;
  }
  constexpr int scale_bytes() const {
    return !packed() ? 0 : floats ? 1 : 2;
  }
  // The scales of so many values of a row.
  constexpr int scale_bytes(int values) const {
    return (values >> group_shift) * scale_bytes();
  }
  // Of x: more take longer than MLX's and our other kernels, because each block makes all of x ready. An MMA has 8 columns, and a
  // row of x several as integers.
  constexpr int most_rows() const {
    return many ? 8 : !packed() ? 4 : (integers() && scales_of_span() > 2) || bits == 6 ? 1 : 2;
  }
};

// One matrix of several that the same rows are multiplied by.
struct GemvPart {
  const void* w;       // [columns, inner], 16-bit or quantized
  const void* scales;  // [columns, inner / a group's values], if quantized, and
  const void* biases;  // of quantized integers
  void* out;           // [rows, columns]
  int columns;
  int first;  // of all parts' rows of w, the first of its own
};

// x is [rows, inner]; each row may be normalized first: x / sqrt(mean(x^2) + eps) * norm.
//
// MoE: w of a part is the matrices of all experts, of which the kernel reads the chosen ones. Either each gives `expert_rows`
// rows of the result, one expert after another; or each is multiplied by its own row of x, and the results are summed, as if
// inner were `turns` times as long.
//
// A block, or a cluster whose blocks have parts of inner, has `block_rows` adjacent rows of all parts, or of both parts that are
// gated. Halves of tiles are up to 8 rows of one part. Warps take turns at the block's units of work, so that together they read
// adjacent memory.
struct GemvParams {
  static constexpr int kMostParts = 3;
  static constexpr int kMostChosen = 32;  // experts: a lane for each
  static constexpr int kTileRows = 16;    // of w
  static constexpr int kHalfRows = 8;
  static constexpr int kLeastWarps = 4;      // of a block: a multiple of this
  static constexpr int kMostWarps = 12;      // and no more
  static constexpr int kStages = 3;          // of a warp's pipeline: units in flight
  static constexpr int kZeroBytes = 256;     // for columns that are no row's
  static constexpr int kHalfBytes = 32;      // of a block's data of half a tile
  static constexpr int kMostSums = 16384;    // bytes of partial sums, and
  static constexpr int kMostScales = 32768;  // of scales and biases, which bound the tiles of a block
  static constexpr int kMostSplits = 2;      // blocks of a cluster

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
  int turns = 1;    // experts whose results are summed: x is [turns, inner]; otherwise each expert has rows of the result
  int group_shift;  // of w's form
  int parts;
  int row_limit;    // of all parts' rows of w; of one where they are gated
  int block_rows;   // of these
  int tiles;        // of a block, at most
  int splits = 1;   // blocks of a cluster
  int split_units;  // of each but the last, if there are several
  GemvEpilogue epilogue;
  GemvPart part[kMostParts];

  constexpr int turn_units(const GemvForm& form) const {
    return (inner + form.unit_values() - 1) / form.unit_values();
  }
  // Of a block.
  constexpr int units(const GemvForm& form) const {
    return form.many && splits > 1 ? split_units : turns * turn_units(form);
  }
  // Bytes of a row of x, padded with zeros to a whole unit: 16-bit numbers, or both halves of integers of 16 bits. Rows start in
  // different banks.
  constexpr int x_distance(const GemvForm& form) const {
    return units(form) * form.unit_values() * 2 + (!form.packed() ? 16 : form.integers() ? 128 : 64);
  }
  // The groups of a span, each with a step and a sum.
  constexpr int groups_of_span(const GemvForm& form) const {
    return rows * form.scales_of_span();
  }
  constexpr int groups_bytes(const GemvForm& form) const {
    return form.integers() ? units(form) * 2 * groups_of_span(form) * 8 : 0;
  }
  // Bytes of a row's scales, padded with zeros to a whole unit; an odd number of 8 bytes, so that rows start in different banks.
  constexpr int scales_distance(const GemvForm& form) const {
    return form.packed() ? (units(form) * form.scale_bytes(form.unit_values()) + 7) / 8 / 2 * 16 + 8 : 0;
  }
  constexpr int scales_bytes(const GemvForm& form) const {
    return (form.floats ? 1 : 2) * tiles * kTileRows * scales_distance(form);
  }
  constexpr int square_bytes() const {
    return rows * (kMostWarps + 4) * 4;
  }
  constexpr int sums_bytes() const {
    return tiles * rows * kTileRows * kMostWarps * 4;
  }
  // The pipeline stages of a warp.
  static constexpr int warp_bytes(const GemvForm& form) {
    return kStages * kTileRows * form.ring_bytes();
  }
  constexpr int shared_bytes(const GemvForm& form, int warps) const {
    return warps * warp_bytes(form) + tiles * 2 * kHalfBytes + kZeroBytes + rows * x_distance(form) + groups_bytes(form) +
           square_bytes() + scales_bytes(form) + sums_bytes();
  }
};

}  // namespace mlx_cuda
