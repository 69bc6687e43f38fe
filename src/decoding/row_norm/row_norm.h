// A norm and the addition, or the scale, that alone reads it, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives that result of an RMS norm; none where they are not as the kernel takes them.
std::optional<Item> row_norm_item(const Plan& plan, const Item& norm);

}  // namespace mlx_cuda
