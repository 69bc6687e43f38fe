// How many of our kernels may run at the same time.
//
// MLX's graphs have no edges but those of the data, so up to a hundred independent calls become as many branches, and a device
// begins those more slowly than short kernels run (docs/internals/design.md). Kernels that fill the device and run for
// microseconds take a lane: those of one lane run one after another. More than one lane hides the beginning of a kernel behind the
// end of another.
#pragma once

#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

// Puts the node that is added next into a lane; called like set_output_array, once everything is allocated.
void take_lane(CommandEncoder& encoder);

}  // namespace mlx_cuda
