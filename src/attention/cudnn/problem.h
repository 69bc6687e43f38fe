// The description of an attention problem for cuDNN, and the memory layouts of the arrays [B, H, T, D] that it reads and writes.
#pragma once

#include "attention/call.h"
#include "attention/cudnn/plans.h"

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

// The problem with every operand contiguous.
SdpaProblem make_problem(const AttentionArrays& in, const AttentionOptions& options);
SdpaBackwardProblem make_backward_problem(const AttentionArrays& in, const AttentionOptions& options);

// An array as cuDNN can read it, or, with `dense`, row-contiguous: itself or a copy.
mx::array readable(const mx::array& in, bool dense, CommandEncoder& encoder, const mx::Stream& stream);

// The strides of a readable array.
SdpaProblem::Strides problem_strides(const mx::array& in);

// Gives `out` memory, with the heads of each position side by side where `pattern` has them so. Returns its strides.
SdpaProblem::Strides allocate_like(mx::array& out, const mx::array& pattern, const mx::Stream& stream);

}  // namespace mlx_cuda
