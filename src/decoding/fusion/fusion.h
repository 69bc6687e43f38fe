// Runs of primitives that a transformer's block is made of, each given to one kernel.
#pragma once

#include "decoding/graph/plan.h"

namespace mlx_cuda {

// Fuses what it recognizes: an RMS norm and the GEMVs that read it, GEMVs of the same rows, a GEMV and the addition or gate that
// follows, all-reduces, and the preparation of queries, keys and values for attention. Other nodes stay.
void fuse(Plan& plan, const mx::Stream& stream);

}  // namespace mlx_cuda
