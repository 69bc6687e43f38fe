// What makes a token's queries, keys and values ready for attention, as one kernel.
#pragma once

#include "decoding/plan.h"

#include <optional>

namespace mlx_cuda {

// For an append to a cache: the norms and rotations of its keys and of the queries of the attention that reads them, and the
// append. Nothing where they are not as the kernel has them.
std::optional<Item> heads_item(const Plan& plan, const Item& append);

}  // namespace mlx_cuda
