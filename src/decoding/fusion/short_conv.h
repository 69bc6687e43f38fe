// The short causal convolution before linear attention, and the rows that it keeps for the next token.
#pragma once

#include "decoding/fusion/gates.h"
#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// Matches a convolution of each channel over its last few rows, a bias and silu if they are its only readers, and the rows that
// are kept; none if the graph around it differs.
std::optional<Item> short_conv_item(const Plan& plan, Gates& gates, const Item& convolution);

}  // namespace mlx_cuda
