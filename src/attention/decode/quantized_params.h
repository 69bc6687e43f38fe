// Parameters of the decode kernel for a quantized KV cache.
#pragma once

#include "attention/decode/params.h"

namespace mlx_cuda {

// Distances in bytes.
struct PackedStrides {
  long long batch;  // of pages: from one page to the next
  long long head;
  int row;
};

// Keys or values.
struct QuantizedOperand {
  const void* rows;    // packed, aligned to 16 bytes
  const void* scales;  // T, or bytes
  PackedStrides row_strides;
  PackedStrides scale_strides;
  long long biases_after;  // the scales; alike in memory
  int group_shift;
  int nvfp4;
};

struct QuantizedParams : DecodeParams {
  QuantizedOperand keys;
  QuantizedOperand values;
};

}  // namespace mlx_cuda
