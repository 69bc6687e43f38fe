// The sum over the GPUs of a tensor parallel model, and with the residual, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

namespace mlx_cuda {

// Matches such an all-reduce (all_sum/all_sum.h), or the addition that is its only reader.
Item all_sum_item(const Plan& plan, const Item& sum);

// The same in MLX's own graph of these results, which are about to be evaluated: where such an addition has not been computed, it
// becomes the sum.
void sum_with_residuals(Arrays results);

}  // namespace mlx_cuda
