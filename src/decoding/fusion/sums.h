// The sum over the GPUs of a tensor parallel model, and with the residual, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

namespace mlx_cuda {

// What gives the result of such a sum (all_sum/all_sum.h), or of the addition that alone reads it.
Item all_sum_item(const Plan& plan, const Item& sum);

// The same in MLX's own graph of these results, which are about to be evaluated: where such an addition has not been computed, it
// becomes the sum.
void sum_with_residuals(Arrays results);

}  // namespace mlx_cuda
