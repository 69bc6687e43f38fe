// Constants and parameters that the chunked kernels' host and device code share.
#pragma once

#include "recurrence/recurrent_params.h"

namespace mlx_cuda {

inline constexpr int kChunk = 64;  // tokens
inline constexpr int kChunkThreads = 256;
inline constexpr int kChunkKeys = 128;     // elements of a key, the rest of which are zeros
inline constexpr int kChunkColumns = 128;  // of the values, that are prepared at once
inline constexpr int kScanColumns = 32;    // of the values, in a block of the scan
inline constexpr int kPad = 8;             // elements after each row in shared memory, so that rows begin in other banks

// Tensors of chunks that do not depend on the state: see chunked.cu. By sequence, value head, chunk of this part of the sequence.
struct Prepared {
  void* w;       // [keys, tokens of a chunk]
  void* v;       // [values, tokens of a chunk], padded to whole blocks
  void* p;       // [tokens of a chunk, tokens of a chunk]
  float* decay;  // [2, tokens of a chunk]: from the chunk's beginning to each token, and from each to its end
  void* solve;   // M^T [tokens of a chunk, tokens of a chunk], for gradients of the delta rule; or null
  int first;     // token of the part
  int chunks;
};

// Tensors of all chunks of a sequence that are saved for gradients, in 16 bits: by sequence, value head, chunk. See
// chunked_back.cu.
struct Kept {
  void* states;            // S^T [key size, value size] as a chunk finds it
  void* changes;           // U [tokens of a chunk, value size]
  void* gradients;         // R^T [key size, value size], after a chunk
  void* change_gradients;  // dU [tokens of a chunk, value size]
  void* solve;             // of Prepared; null without the delta rule
};

inline constexpr int kGradientThreads = 512;  // of the kernel that is parallel over chunks
inline constexpr int kGradientValues = 128;   // the most that it takes

// The results: the gradients of queries and keys for each value head, also of heads that share a query or key head.
struct Gradients {
  Operand dy;       // the gradients of the results
  void *q, *k;      // [value heads that share one, batch, token, key head, key size]
  void* v;          // [batch, token, value head, value size]
  float *g, *beta;  // [batch, token, value head]
  int chunks, batches;
};

// Their sums, of `shared` each, 8 elements at a time: of q, and then of k.
struct SharedSums {
  const void *q, *k;
  void *q_sum, *k_sum;
  long long units;
  int shared;
};
inline constexpr int kSumThreads = 256;

inline constexpr unsigned kPrepareBytes =
    kChunk * (kChunkKeys + kPad + kChunkColumns + kPad + 4 * (kChunk + kPad)) * 2 + 3 * kChunk * 4 + kChunkThreads / 32 * 4;
inline constexpr unsigned kScanBackBytes = (2 * kChunk * (kChunkKeys + kPad) + (kChunkKeys + kChunk) * (kChunk + kPad) +
                                            (kChunkKeys + 3 * kChunk) * (kScanColumns + kPad)) *
                                               2 +
                                           2 * 2 * kChunk * 4;
inline constexpr unsigned kScanBytes = kScanBackBytes + kScanColumns * (kChunk + kPad) * 2;  // for V'

inline constexpr unsigned kGradientBytes =
    ((5 * kChunk + 2 * kChunkKeys) * (kGradientValues + kPad) + 3 * kChunk * (kChunk + kPad)) * 2 +
    (16 * kChunk + kGradientThreads / 32) * 4;

}  // namespace mlx_cuda
