// What the chunked kernels' host and device code share.
#pragma once

#include "recurrence/recurrent_params.h"

namespace mlx_cuda {

inline constexpr int kChunk = 64;  // tokens
inline constexpr int kChunkThreads = 256;
inline constexpr int kChunkKeys = 128;     // elements of a key, the rest of which are zeros
inline constexpr int kChunkColumns = 128;  // of the values, that are prepared at once
inline constexpr int kScanColumns = 32;    // of the values, in a block of the scan
inline constexpr int kPad = 8;             // elements after each row in shared memory, so that rows begin in other banks

// What is known of chunks before the state is: see chunked.cu. By sequence, value head, chunk of this part of the sequence.
struct Prepared {
  void* w;       // [keys, tokens of a chunk]
  void* v;       // [values, tokens of a chunk], padded to whole blocks
  void* p;       // [tokens of a chunk, tokens of a chunk]
  float* decay;  // [2, tokens of a chunk]: from the chunk's beginning to each token, and from each to its end
  int first;     // token of the part
  int chunks;
};

inline constexpr unsigned kPrepareBytes =
    kChunk * (2 * (kChunkKeys + kPad) + kChunkColumns + kPad) * 2 + kChunk * (kChunk + kPad + 3) * 4;
inline constexpr unsigned kScanBytes = (2 * kChunk * (kChunkKeys + kPad) + (kChunkKeys + kChunk + kScanColumns) * (kChunk + kPad) +
                                        (kChunkKeys + 2 * kChunk) * (kScanColumns + kPad)) *
                                           2 +
                                       2 * 2 * kChunk * 4;

}  // namespace mlx_cuda
