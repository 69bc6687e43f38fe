// Parameters of the kernels around a captured step, passed by value.
#pragma once

namespace mlx_cuda {

// The position of one kind of cache: the token's own position, the row of the cache that it is written to, how many rows there
// are with it, and the shift of the rows before a sequence's first. Paged caches use only the first.
struct Place {
  int offset;
  int row;
  int length;
  int start;
};

// The layout of a position in memory: its offset and its row, then numbers for each sequence.
enum PlaceField { kOffsets, kLengths, kStarts, kPages, kRows, kPlaceFields };

constexpr int place_field(int field, int batch) {  // where it begins
  return 2 + field * batch;
}

// Copies a step's inputs to the memory that its kernels read. A sequence whose cache is not paged is its own page.
struct BeginParams {
  static constexpr int kMostPlaces = 64;
  static constexpr int kThreads = 128;

  const void* tokens;  // [batch, 1]
  void* tokens_to;
  int* places_to;
  const int* sequences;      // [count, 2, batch]: each sequence's additions to the offset and the start
  long long token_distance;  // from one sequence to the next, in bytes
  int token_bytes;
  int batch;
  int given;  // sequences that there are; the others of the batch have no token, and keys neither if they have pages
  int count;
  const int* table;  // [count, batch, columns]: pages of the sequences, or null
  int* table_to;
  int columns;
  int page_size;
  Place places[kMostPlaces];
};

// Writes a token's keys and values to their page and row of each sequence and head of the cache; nothing if the page is negative.
struct AppendParams {
  static constexpr int kThreads = 128;

  const void* rows[2];        // keys and values [batch, heads, 1, dim]
  void* caches[2];            // [pages, heads, capacity, dim], row-contiguous
  const int* where;           // [2, batch]: pages and rows
  long long distances[2][2];  // from one sequence, and from one head, of the rows to the next, in bytes
  long long capacity;
  int row_bytes[2];
  int batch;
  int heads;
};

// A KV cache that is quantized with mode "affine".
struct QuantizedRows {
  static constexpr int kMostDim = 256;  // a multiple of 32, as groups are

  void* packed[2];  // [pages, heads, capacity, dim * bits / 32]; these are row-contiguous
  void* scales[2];  // [pages, heads, capacity, dim / group]
  void* biases[2];  // biases of keys and values
  int dims[2];
  int group;
};

// The same, written to such a cache.
struct QuantizedAppendParams {
  static constexpr int kWarps = 4;  // of a block, each with a row

  const void* rows[2];  // keys and values [batch, heads, 1, dim]
  QuantizedRows to;
  const int* where;           // [2, batch]: pages and rows
  long long distances[2][2];  // from one sequence, and from one head, of the rows to the next
  long long capacity;
  int batch;
  int heads;
};

// Arrays, copied to others.
struct ReplaceParams {
  static constexpr int kMost = 96;
  static constexpr int kThreads = 256;
  static constexpr int kMostBlocks = 64;  // for each

  const void* from[kMost];
  void* to[kMost];
  long long bytes[kMost];
};

}  // namespace mlx_cuda

// step.cu, for quantized KV caches. EACH(name, dtype, bits).
#define MLX_CUDA_STEP_APPEND_KERNELS(EACH)        \
  EACH(step_append_float32_affine4, float32, 4)   \
  EACH(step_append_float32_affine8, float32, 8)   \
  EACH(step_append_float16_affine4, float16, 4)   \
  EACH(step_append_float16_affine8, float16, 8)   \
  EACH(step_append_bfloat16_affine4, bfloat16, 4) \
  EACH(step_append_bfloat16_affine8, bfloat16, 8)
