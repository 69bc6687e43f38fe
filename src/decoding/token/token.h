// A token's attention with all that comes between it and the projections.
#pragma once

#include "decoding/heads/heads.h"

namespace mlx_cuda {

// Such a call and the attention that reads it in one kernel; none where this GPU, these heads or so many sequences have none, or
// where others read the queries as well.
std::optional<Item> token_item(const Plan& plan, const HeadsCall& call);

}  // namespace mlx_cuda
