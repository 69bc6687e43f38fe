// The logarithm of what attention's softmax divides by, as a result of its own that can be differentiated.
#pragma once

#include "attention/cudnn/problem.h"

#include <optional>

namespace mlx_cuda {

// `lse`, which came with the attention of q and k, with its derivative: attention's own leaves it out, for that of the output
// needs one pass of cuDNN and this two more.
mx::array differentiable_lse(
    const mx::array& q,
    const mx::array& k,
    const mx::array& lse,
    const std::optional<mx::array>& sinks,
    const CudnnOptions& options,
    const mx::Stream& stream);

}  // namespace mlx_cuda
