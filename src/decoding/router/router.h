// Which experts a token goes to, in one kernel.
#pragma once

#include "decoding/graph/plan.h"
#include "decoding/router/params.h"

#include <optional>

namespace mlx_cuda {

// The arrays of a router besides its parameters.
struct RouterCall {
  RouterParams params;
  mx::array logits;
  mx::array chosen;
  mx::array scores;
};

// Matches the router of mlx-lm's models: softmax of the gate's result or none, top-k, and their scores, normalized or not, or the
// softmax of these.
std::optional<RouterCall> router_call(const Plan& plan, const mx::array& chosen, const mx::array& scores);

Item router_item(const RouterCall& call);

}  // namespace mlx_cuda
