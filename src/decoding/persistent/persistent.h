// GEMVs of a decode step with quantized weights, one after another in one persistent kernel, with routers and attention between
// them.
#pragma once

#include "decoding/graph/plan.h"
#include "decoding/router/router.h"
#include "decoding/token/token.h"
#include "matmul/gemv/gemv.h"

#include <unordered_map>

namespace mlx_cuda {

// The computations of a plan's items.
struct PersistentCalls {
  std::unordered_map<const Item*, GemvCall> gemvs;
  std::unordered_map<const Item*, RouterCall> routers;
  std::unordered_map<const Item*, TokenCall> tokens;
};

// Replaces each run of such items that the plan computes one after another, if the kernel takes them.
void fuse_runs(Plan& plan, const PersistentCalls& calls, const mx::Stream& stream);

}  // namespace mlx_cuda
