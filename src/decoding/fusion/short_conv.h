// The short causal convolution that models have before linear attention, with what it keeps for the next token.
#pragma once

#include "decoding/fusion/gates.h"
#include "decoding/graph/plan.h"

#include <optional>

namespace mlx_cuda {

// What gives the result of a convolution of each channel with its last few rows, of a bias and silu where these alone read it, and
// the rows that are kept; none where the graph around it is another one.
std::optional<Item> short_conv_item(const Plan& plan, Gates& gates, const Item& convolution);

}  // namespace mlx_cuda
