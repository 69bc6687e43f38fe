// Attention through the cuDNN graph API, as nodes of MLX's graph.
#pragma once

#include "attention/cudnn/plans.h"
#include "runtime/memory.h"

#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

// Why this cuDNN on this GPU does not take the problem; empty when it does. Builds no plan (some milliseconds the first time).
std::string why_unsupported(const AttentionProblem& problem, mx::cu::Device& device);
std::string why_unsupported(const AttentionBackwardProblem& problem, mx::cu::Device& device);

using Operands = std::vector<std::pair<Operand, mx::array>>;

// Encodes the attention, or its gradients, of arrays that have memory. The plan is built the first time (tens of milliseconds).
// Returns false, with nothing encoded, when cuDNN does not take these strides.
bool encode_attention(
    const AttentionProblem& problem,
    const Operands& inputs,
    const Operands& outputs,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);
bool encode_attention(
    const AttentionBackwardProblem& problem,
    const Operands& inputs,
    const Operands& outputs,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

}  // namespace mlx_cuda
