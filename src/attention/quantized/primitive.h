// Decoding with a quantized KV cache.
#pragma once

#include "attention/call.h"
#include "matmul/quantized/weights.h"

#include <string>

namespace mlx_cuda {

// Keys or values [B, Hkv, Tk, D] as quantized weights, or their pages. Affine formats have scales and biases of the queries'
// dtype, float16 or bfloat16; the others need bfloat16 queries; 4 or 8 bits. D is a multiple of 32 up to 256.
struct QuantizedCache {
  QuantizedWeights keys;
  QuantizedWeights values;
};

// Attention of up to 64 queries that share a kv head. `in` has no keys and values but `cache`: those of `in` are not looked at.
Arrays quantized_attention(
    const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options, const mx::Stream& stream);

// The device code's source and kernel for this call.
std::string quantized_attention_kernel(const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options);

}  // namespace mlx_cuda
