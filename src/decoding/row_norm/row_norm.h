// A norm and the addition, or the scale, that alone reads it, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// Matches an RMS norm and what follows; none if the kernel does not support the arrays.
std::optional<Item> row_norm_item(const Plan& plan, const Item& norm);

}  // namespace mlx_cuda
