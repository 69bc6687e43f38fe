// Which experts a token goes to, in one kernel.
#pragma once

#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives the numbers of the chosen experts and their scores, if that is what mlx-lm's models do: softmax of the router's
// products or none, the best of them, and their scores, normalised or not, or the softmax of these.
std::optional<Item> router_item(const Plan& plan, const mx::array& chosen, const mx::array& scores);

}  // namespace mlx_cuda
