// GEMVs of a decode step with quantized weights, one after another in one persistent kernel.
#pragma once

#include "decoding/graph/plan.h"
#include "matmul/gemv/gemv.h"

#include <unordered_map>

namespace mlx_cuda {

using GemvCalls = std::unordered_map<const Item*, GemvCall>;

// Replaces each run of GEMVs that the plan computes one after another, if the kernel takes them. `calls`: those of the plan's
// items.
void fuse_runs(Plan& plan, const GemvCalls& calls, const mx::Stream& stream);

}  // namespace mlx_cuda
