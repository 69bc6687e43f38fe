// Restores NaN in the gradient of v, which cuDNN's backward pass loses.
#pragma once

#include "attention/cudnn/problem.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

// Whether the cuDNN that is loaded takes probabilities that are NaN for 0 where it sums the gradient of v, as 9.28 does and 9.19
// does not.
bool loses_nan();

// Overwrites the gradient of v with NaN where q and k, as cuDNN has read them, call for it.
void restore_nan(
    const SdpaBackwardProblem& problem, const mx::array& q, const mx::array& k, mx::array& d_v, CommandEncoder& encoder);

}  // namespace mlx_cuda
