// Which experts a token goes to, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// Matches the router of mlx-lm's models: softmax of the gate's result or none, top-k, and their scores, normalized or not, or the
// softmax of these.
std::optional<Item> router_item(const Plan& plan, const mx::array& chosen, const mx::array& scores);

}  // namespace mlx_cuda
