// Runs of primitives that a transformer's block is made of, each given to one kernel.
#pragma once

#include "decoding/graph/plan.h"

namespace mlx_cuda {

// Replaces what it recognises: an RMS norm and the products that read it, products of the same rows, a product and the addition or
// the gate that follows, sums over GPUs, and what makes queries, keys and values ready for attention. Whatever it does not
// recognise stays.
void fuse(Plan& plan);

}  // namespace mlx_cuda
