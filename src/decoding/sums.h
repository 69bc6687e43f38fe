// The sum over the GPUs of a tensor parallel model, and with the residual, in one kernel.
#pragma once

#include "decoding/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives the result of such a sum, or of the addition that alone reads it; none where something else is or the kernel does not
// take it. Collective where it is one.
std::optional<Item> all_sum_item(const Plan& plan, const Item& sum, const mx::Stream& stream);

}  // namespace mlx_cuda
