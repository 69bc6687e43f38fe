// The sum over the GPUs of a tensor parallel model, and with the residual, in one kernel.
#pragma once

#include "decoding/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives the result of such a sum (all_sum/all_sum.h), or of the addition that alone reads it.
Item all_sum_item(const Plan& plan, const Item& sum);

}  // namespace mlx_cuda
