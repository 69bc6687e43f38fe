// A norm of what a block gives, and its sum with the residual, in one kernel.
#pragma once

#include "decoding/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives the sum that alone reads an RMS norm; none where they are not as the kernel takes them.
std::optional<Item> norm_add_item(const Plan& plan, const Item& norm);

}  // namespace mlx_cuda
