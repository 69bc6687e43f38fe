// Attention through the cuDNN graph API.
#pragma once

#include "runtime/memory.h"

#include <cstdint>
#include <string>

namespace mlx_cuda {

// softmax(scale * q k^T) v. Lengths in elements; strides of the batch, head and sequence dimensions, head_dim being adjacent.
struct AttentionProblem {
  mx::Dtype dtype;
  std::int64_t batch, heads, kv_heads, q_length, kv_length, head_dim;
  float scale;
  bool causal;      // lower right: the last query sees every key
  int window_left;  // keys before its own place that a query sees, with causal; negative: all

  struct Strides {
    std::int64_t batch, head, row;
  };
  Strides q, k, v, out;
};

// Why this cuDNN on this GPU does not take the problem; empty when it does. Builds no plan (some milliseconds the first time).
std::string why_unsupported(const AttentionProblem& problem, mx::cu::Device& device);

// Encodes the attention of arrays that have memory. The plan is built the first time (tens of milliseconds). Returns false, with
// nothing encoded, when cuDNN does not take these strides.
bool encode_attention(
    const AttentionProblem& problem,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

}  // namespace mlx_cuda
