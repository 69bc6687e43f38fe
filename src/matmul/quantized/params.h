// Parameters of the kernels with quantized weights, and how they divide their work and their shared memory.
#pragma once

namespace mlx_cuda {

// Alignments of rows for kernels that read chunks of 32 values or 16 bytes, or pieces of 8 values.
constexpr int chunk_alignment(int bits) {
  return bits % 4 == 0 ? 16 : bits % 2 == 0 ? 8 : 4;
}
constexpr int piece_alignment(int bits) {
  return bits == 8 ? 8 : 4;
}

// out = x @ w^T, or x @ w. Strides of x are in elements, those of w and of its scales in bytes. The kernels' own parameters
// derive from this; its size is a multiple of 8, so that every compiler has them at the same offset.
struct QuantizedGemmParams {
  const void* x;             // [matrices, rows, inner]
  const void* w;             // quantized [experts, columns, inner], or [experts, inner, columns]
  const void* scales;        // the same with a number for each group of the last
  const void* biases;        // the same, or null
  const unsigned* x_index;   // which matrix of x each batch takes, one after the last being the last; null: its own number
  const unsigned* w_index;   // each row's expert; null: its own number
  void* out;                 // [batches, rows, columns]
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

// Split K: blocks share results, and each sums over a range of inner.
struct SplitKParams : QuantizedGemmParams {
  int block_rows;  // of x, of each block
  int splits;      // blocks that share a result
  int range;       // of inner, of each of them
  int row_blocks;  // blocks that have different rows of x
};

// ------------------------------------------------------------------- few rows of x (quantized_small_m.cu, quantized_plain.cu)
// A warp tile of the tensor core kernels (quantized_small_m.cu, quantized_moe_sm90.cu).
struct SmallMTile {
  static constexpr int kRows = 32;                                 // of w
  static constexpr int kSlice = QuantizedGemmParams::kScaleRange;  // of inner
  static constexpr int kScaleStride = 12;                          // words of a row's scales (8 at most): 8 rows in different banks
  static constexpr int kScaleBytes = kRows * kScaleStride * 4;     // of a warp
  static constexpr int kResultStride = kRows + 4;                  // floats of a row of x
};

struct SmallMParams : SplitKParams {
  int row_warps;    // warps of a block that have different rows of w
  int inner_warps;  // warps that share rows of w and have different slices

  static constexpr int kMostThreads = 512;  // of a block
  static constexpr int kMostRowWarps = 8;   // each has a barrier; a block has 15 besides barrier 0
  static constexpr int kChunk = 32;         // values, of which inner is a multiple

  // x and, for each warp, its scales and its sums of `rows` rows; x has `x_rows` of them.
  constexpr int shared_bytes(int rows, int x_rows) const {
    return range * 2 * x_rows + row_warps * inner_warps * warp_bytes(rows);
  }
  static constexpr int warp_bytes(int rows) {
    return SmallMTile::kScaleBytes + rows * SmallMTile::kResultStride * 4;
  }
};

// The kernels without tensor cores (quantized_plain.cu).
struct PlainKernel {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = 4;                                   // of x, of a block
  static constexpr int kColumns = 32 * 8;                           // of the result, of a block
  static constexpr int kWarpColumns = 4;                            // of a warp with w transposed
  static constexpr int kTransposedColumns = kWarps * kWarpColumns;  // and of a block
};

// ---------------------------------------------------------- rows and the experts that they name, on Hopper (quantized_moe_sm90.cu)
// The pairs of a batch, at most as many as an MMA has columns: their rows of x, the start of their results if the batch's first
// tile has that number, and how many there are.
struct MoeBatch {
  unsigned x_rows[8];
  unsigned results[8];
  int rows;
  int unused[3];
};

// A pair is one row of x and one expert. columns is a multiple of a tile's rows, inner of a slice, and scales are wide.
struct MoeParams : QuantizedGemmParams {
  int row_scales;  // bytes of a row's scales
  int pairs;       // kMostPairs at most
  int batch_rows;  // most pairs of one expert in one GEMM, a batch

  static constexpr int kMostPairs = 64;
  static constexpr int kBlocks = 4;                       // on a multiprocessor
  static constexpr int kMostWarps = 4;                    // of a block: they have different slices
  static constexpr int kScaleBytes = 2048;                // of a warp: those of two slices
  static constexpr int kTableBytes = 2 * kMostPairs * 4;  // of a warp: the batches of the call

  // Of a block: x, and for each warp its scales, two tiles' results, its table of batches and the pairs of one.
  constexpr int shared_bytes(int warps) const {
    const int warp_bytes =
        kScaleBytes + 2 * batch_rows * SmallMTile::kResultStride * 4 + kTableBytes + static_cast<int>(sizeof(MoeBatch));
    return inner * 2 * batch_rows + warps * warp_bytes;
  }
};

// ------------------------------------------------------------------------ some rows of x, on Hopper (quantized_sm90.cu)
// out = x @ w^T; `partial` is [batches, row blocks, tiles of columns, splits, block rows, columns of a tile].
struct QuantizedSm90Params : SplitKParams {
  void* ordered;      // x in the order of the MMA
  unsigned* arrived;  // splits that have written theirs, of each result of a block; unused with one
  int results;        // of blocks
};

struct QuantizedSm90 {
  static constexpr int kConsumers = 2;               // warpgroups, each with 64 rows of w
  static constexpr int kTileRows = kConsumers * 64;  // of w, of a block
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kPart = 128;        // of inner: K of a stage
  static constexpr int kRange = 256;       // of inner: what blocks share begins at multiples of this
  static constexpr int kScaleParts = 4;    // whose scales a warp loads at once
  static constexpr int kScaleStride = 20;  // words of a row's scales of these (16 at most): 8 rows in different banks
  static constexpr int kScaleBytes = 16 * kScaleStride * 4;  // of a warp: 16 rows of w
  static constexpr int kOrderWarps = 4;                      // of a block that puts x in order, each with 8 rows of a part

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

// ----------------------------------------------------------------------------------------- values (dequantize.cu)
// Strides of the packed weights and the scales in bytes, of the result in elements.
struct DequantizeParams {
  const void* w;
  const void* scales;
  const void* biases;  // or null
  const int* offsets;  // [experts + 1], or null: experts whose offset is the next one's are left out
  void* out;
  long long w_distance;
  long long scale_distance;
  long long out_distance;
  long long pieces;  // of kPiece values, of one expert
  int group_shift;   // log2 of a group's values

  static constexpr int kPiece = 8;
  static constexpr int kThreads = 256;
  static constexpr int kPieces = 2;  // of one thread
};

}  // namespace mlx_cuda
